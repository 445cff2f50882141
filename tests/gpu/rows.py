"""Rows of logits for the tests of GPU kernels, and what is exactly true of them."""

import contextlib
from math import nan

import torch

from fastrl import Objective, TokenStats, reference
from fastrl.contract import (
    KL_ESTIMATORS,
    KL_GRADIENTS,
    SURROGATES,
    LossArguments,
    RowArguments,
    RowStats,
)
from fastrl.library import operators
from tests.gpu.on_host import without_clusters
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import make_logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = (
    {},
    {"temperature": 0.7, "logit_scale": 1.5, "logit_softcap": 8.0},
    {"temperatures": torch.tensor([[0.5, 1.0, 1.7, nan]])},
)
OUTPUTS = ("logprobs", "entropy", "logsumexp")


def shared_out(backend, monkeypatch, otherwise=True):
    """Share out rows otherwise: over several programs, or without clusters of blocks."""
    if not otherwise:
        return contextlib.nullcontext()
    if backend == "cuda":
        return without_clusters()
    return _over_programs(monkeypatch)


@contextlib.contextmanager
def _over_programs(monkeypatch):
    from fastrl.triton.vocabulary import rows

    with monkeypatch.context() as patch:
        patch.setattr(rows, "processors", lambda device: 10**6)
        yield


def make_rows(V, dtype, beside=0, B=1, T=4):
    """Logits [B, T, V] with NaN beside them, ids and mask; the last row does not count."""
    token_ids = torch.randint(V, (B, T))
    token_ids.view(-1)[:2] = torch.tensor([V - 1, 0])[: B * T]
    whole = torch.full((B, T + 1, V + beside), nan, dtype=dtype)
    logits = whole[:, :T, :V]
    logits.copy_(make_logits(B, T, V, token_ids=token_ids))
    mask = torch.ones(B, T, dtype=torch.bool)
    if B * T > 1:
        mask[-1, -1] = False
        logits[-1, -1] = nan
    return whole, logits, token_ids, mask


def rows_of(token_ids, mask=None, **options):
    """Return what accompanies logits."""
    plain = RowArguments(token_ids, mask, -100, None, 1.0, 1.0, 0.0)
    return plain._replace(**options)


def token_stats(backend, logits, rows):
    return RowStats._make(operators(backend).token_stats_fwd(logits, *rows, True, True))


def saved(stats):
    return stats.row_max, stats.log_sum, stats.entropy


def exact(logits, token_ids, mask, temperatures=None, temperature=1.0, **options):
    options = {"logit_scale": 1.0, "logit_softcap": None, **options}
    heat = temperature if temperatures is None else temperatures.double()
    stats = reference.token_stats(logits.double(), token_ids, mask, temperature=heat, **options)
    return TokenStats(*stats)


def gradient(logits, token_ids, mask, grads, temperatures=None, temperature=1.0, **options):
    """Return what flows to the logits from `grads`, and the magnitude of its parts."""
    leaf = logits.double()
    leaf[~mask] = 0
    leaf.requires_grad_()
    stats = exact(leaf, token_ids, mask, temperatures, temperature, **options)
    grads = [torch.where(mask, grad.double(), 0.0) for grad in grads]
    loss = sum(getattr(stats, name) * grad for name, grad in zip(OUTPUTS, grads, strict=True))
    heat = temperature if temperatures is None else temperatures[..., None]
    slope = torch.where(mask[..., None], options.get("logit_scale", 1.0) / heat, 0.0)
    cap = options.get("logit_softcap")
    z = leaf.detach() * slope if cap is None else cap * torch.tanh(leaf * slope * heat / cap) / heat
    logp = torch.where(mask[..., None], z.detach(), 0.0).log_softmax(-1)
    of_logprobs, of_entropy, of_logsumexp = (grad.abs()[..., None] for grad in grads)
    parts = of_logprobs + of_logsumexp + of_entropy * (stats.entropy.detach()[..., None] + 1)
    size = logp.exp() * (parts - of_entropy * logp) * (1 - logp)
    size.scatter_add_(-1, token_ids[..., None], of_logprobs)
    return torch.autograd.grad(loss.sum(), leaf)[0], size * slope


def assert_gradient(actual, expected, size):
    """In the arithmetic of float32, then rounded once."""
    float32 = torch.finfo(torch.float32).eps
    smallest = torch.finfo(actual.dtype).smallest_normal
    assert_within_budget(actual, expected, ulps=1, atol=16 * float32 * size + smallest)


# --- the loss in one pass


def objective_of(surrogate="ppo_clip", kl_estimator="k3", kl_gradient="exact", **scalars):
    """Return an objective as the operators take it; a bound that is not given is not set."""
    plain = Objective().arguments
    return plain._replace(
        surrogate=SURROGATES.index(surrogate),
        kl_estimator=KL_ESTIMATORS.index(kl_estimator),
        kl_gradient=KL_GRADIENTS.index(kl_gradient),
        coefficients=plain.coefficients._replace(**scalars),
    )


#: objectives, and which optional arguments there are
OBJECTIVES = {
    "ppo": (objective_of(clip_high=0.28, dual_clip=3.0), "old_logprobs"),
    "everything": (
        objective_of(kl_gradient="bias-corrected", kl_coef=0.1, entropy_coef=0.02),
        "old_logprobs ref_logprobs kl_weights entropy_weights policy_weights",
    ),
    "cispo": (
        objective_of("cispo", "k1", "straight-through", clip_low=1.0, clip_high=0.1, kl_coef=0.3),
        "old_logprobs ref_logprobs",
    ),
    "sapo": (
        objective_of("sapo", kl_estimator="abs", kl_coef=0.1, kl_clamp=2.0, log_ratio_low=1.0),
        "old_logprobs ref_logprobs",
    ),
    "on policy": (objective_of(entropy_coef=0.1), ""),
    "reinforce": (
        objective_of("reinforce", kl_estimator="k2", kl_coef=0.2),
        "ref_logprobs entropy_weights",
    ),
}


def loss_of(name, logits, token_ids, mask, **options):
    """Return the arguments of the loss of an objective, per token, and the objective."""
    objective, given = OBJECTIVES[name]
    logprobs = exact(logits, token_ids, mask, **options).logprobs.float().nan_to_num(0.0)
    noise = [torch.randn_like(logprobs) for _ in range(5)]
    everything = LossArguments(
        advantages=noise[0],
        weights=noise[1].abs(),
        kl_weights=noise[2].abs(),
        entropy_weights=noise[3].abs(),
        policy_weights=noise[4].abs(),
        old_logprobs=logprobs + 0.3 * noise[1],
        ref_logprobs=logprobs + 0.3 * noise[2],
        cu_seqlens=None,
    )
    left_out = set(LossArguments._fields) - {"advantages", "weights", *given.split()}
    return everything._replace(**dict.fromkeys(left_out)), objective


def loss_gradient(logits, token_ids, mask, loss, objective, **options):
    """Return the exact gradient of the loss and the magnitude of its parts."""
    stats = exact(logits, token_ids, mask, **options)
    double = LossArguments._make(None if x is None else x.double() for x in loss)
    _, slope, entropy_slope, _ = reference.policy_loss(
        stats.logprobs, stats.entropy, mask, double, objective
    )
    zero = torch.zeros(token_ids.shape)
    flows = (slope, zero if entropy_slope is None else entropy_slope, zero)
    expected, size = gradient(logits, token_ids, mask, flows, **options)
    # the slope carries the rounding of the log-probability, which the parts of it multiply
    return expected, 8 * size + 2 * size.amax(-1, keepdim=True)


def one_pass(backend, logits, rows, loss, objective):
    return operators(backend).logits_policy_loss_fwd(logits, *rows, *loss, *objective)
