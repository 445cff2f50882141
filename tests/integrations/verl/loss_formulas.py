"""verl 0.9's policy losses, transcribed from their formulas in float64."""

import types

import torch

from tests.integrations.formulas import clipped, mean, only, sequence_mean, weighed
from tests.integrations.verl.formulas import agg_loss

SEQUENCES = "seq-mean-token-mean"


def verls(mode="token-mean", *, always=None):
    """Turn (losses of tokens, metrics of tokens) of a batch into verl's function.

    It aggregates by ``mode`` if its caller names none, or by ``always``.
    """

    def function(formula):
        def compute(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            loss_agg_mode=mode,
            config=None,
            rollout_is_weights=None,
        ):
            mask, weights = response_mask, rollout_is_weights
            x = types.SimpleNamespace(mask=mask, weights=weights, A=advantages.double())
            x.old, x.new = old_log_prob.double(), log_prob.double()
            x.log_ratio = only(mask, log_prob - old_log_prob)
            f, metrics = formula(x, config)
            metrics = {f"actor/{key}": mean(value, mask).item() for key, value in metrics.items()}
            if f.dim() == 1:  # of whole responses
                return f.mean(), metrics
            f = f if weights is None else f * weights
            return agg_loss(f, mask, always or loss_agg_mode, **config.global_batch_info), metrics

        return compute

    return function


def bounds(config):
    low, high = config.clip_ratio_low, config.clip_ratio_high
    low = config.clip_ratio if low is None else low
    return low, config.clip_ratio if high is None else high


def shares(log_ratio, above=None, below=None):
    """Return the metrics of the clipped losses."""
    found = {"pg_clipfrac": above, "ppo_kl": -log_ratio, "pg_clipfrac_lower": below}
    return {name: torch.zeros_like(log_ratio) if y is None else y for name, y in found.items()}


@verls()
def compute_policy_loss_vanilla(x, config):
    cap, log_ratio = config.get("clip_ratio_c", 3.0), x.log_ratio.clamp(-20, 20)
    free, bounded = clipped(log_ratio.exp(), x.A, *bounds(config))
    worse = torch.maximum(free, bounded)
    f = torch.where(x.A < 0, torch.minimum(worse, -x.A * cap), worse)
    return f, shares(log_ratio, bounded > free, (x.A < 0) & (worse > -x.A * cap))


@verls(SEQUENCES)
def compute_policy_loss_gspo(x, config):
    of_sequence = sequence_mean(x.log_ratio, x.mask).detach()
    ratio = (x.new - x.new.detach() + of_sequence).clamp(max=10).exp()
    free, bounded = clipped(ratio, x.A, *bounds(config))
    return torch.maximum(free, bounded), shares(x.log_ratio, bounded > free)


@verls(SEQUENCES, always=SEQUENCES)
def compute_policy_loss_sapo(x, config):
    log_ratio = x.log_ratio.clamp(-20, 20)
    tau = torch.where(x.A > 0, *map(x.A.new_tensor, (config.tau_pos, config.tau_neg)))
    return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * x.A, shares(log_ratio)


@verls()
def compute_policy_loss_cispo(x, config):
    (low, high), log_ratio = bounds(config), x.log_ratio.clamp(-20, 20)
    held = log_ratio.exp().clamp(1 - low, 1 + high)
    return -held.detach() * x.A * x.new, shares(log_ratio, held != log_ratio.exp())


@verls()
def compute_policy_loss_geo_mean(x, config):
    def typical(values):
        return weighed(x.mask, values).sum(-1) / (x.mask.sum(-1) + 1e-8)

    (low, high), A = bounds(config), only(x.mask, x.A)
    held = x.log_ratio.clamp(-low, high)
    chosen = A.sign() * torch.minimum(A.sign() * x.log_ratio, A.sign() * held)
    f = -typical(A) * typical(chosen).exp()
    if x.weights is not None:
        f = f * typical((x.weights + 1e-10).log()).exp()
    beyond = held != x.log_ratio
    return f, shares(x.log_ratio, beyond & (A > 0), beyond & (A < 0))


@verls()
def compute_policy_loss_gpg(x, config):
    return -x.new * x.A, {}


def within_a_divergence(x, config, kept):
    cap, log_ratio = config.get("clip_ratio_c", 20.0), x.log_ratio.clamp(-20, 20).detach()
    ratio = log_ratio.exp()
    f = -x.A * ratio.clamp(max=cap) * x.new * kept
    return f, shares(log_ratio, ~kept, (ratio > cap) & kept)


@verls()
def compute_policy_loss_dppo_tv(x, config):
    low, high = bounds(config)
    moved = x.new.detach().exp() - x.old.exp()
    return within_a_divergence(x, config, torch.where(x.A > 0, ~(moved > high), ~(-moved > low)))


@verls()
def compute_policy_loss_dppo_kl(x, config):
    low, high = bounds(config)
    p, old, taken = x.new.detach().exp(), x.old.exp(), torch.distributions.Bernoulli
    distance = torch.distributions.kl_divergence(taken(old), taken(p))
    up, down = (x.A > 0) & (p > old), ~(x.A > 0) & (p < old)
    return within_a_divergence(x, config, ~(up & (distance > high)) & ~(down & (distance > low)))


@verls()
def compute_policy_loss_clip_cov(x, config):
    own, current = config.policy_loss, x.new.detach()
    free, bounded = clipped(x.log_ratio.exp(), x.A, *bounds(config))
    together = (x.A - mean(x.A, x.mask)) * (current - mean(current, x.mask))
    eligible = (together > own.clip_cov_lb) & (together < own.clip_cov_ub)
    places = (eligible & x.mask.bool() & (bounded <= free)).nonzero()
    kept = torch.ones_like(x.A)
    if len(places):
        count = max(int(own.clip_cov_ratio * x.mask.sum().item()), 1)
        for place in places[torch.randperm(len(places))[:count]]:
            kept[tuple(place)] = 0
    f = torch.maximum(free, bounded) * kept
    return f, {"pg_clipfrac": 1 - kept, "ppo_kl": -x.log_ratio}


@verls()
def compute_policy_loss_kl_cov(x, config):
    own, active = config.policy_loss, x.mask.bool()
    scores, current = x.A[active], x.new.detach()[active]
    together = torch.full_like(x.A, -float("inf"))
    together[active] = (scores - scores.mean()) * (current - current.mean())
    count = max(1, int(len(scores) * own.kl_cov_ratio))
    penalized = together >= together.flatten().sort(descending=True).values[count - 1]
    far = x.log_ratio.abs()
    return -x.A * x.log_ratio.exp() + own.ppo_kl_coef * far * penalized, {"ppo_kl": far}


@verls()
def compute_policy_loss_dro(x, config):
    f = config.policy_loss.dro_beta * x.log_ratio**2 / 2 - x.new * x.A
    return f, {"ppo_kl": -x.log_ratio}


@verls("seq-mean-token-sum")
def compute_policy_loss_reinforce(x, config):
    """Of which `bypass_mode` calls the first argument `rollout_log_prob`."""
    return -x.new * x.A, {"ppo_kl": -x.log_ratio}
