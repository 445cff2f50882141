"""The policy loss written out token by token, independent of the package: the expected results."""

import math
from typing import NamedTuple

import torch


class Truth(NamedTuple):
    loss: torch.Tensor
    metrics: dict
    gradient: torch.Tensor
    entropy_gradient: torch.Tensor
    size: float  # sum of the magnitudes that the loss adds up


def hold(x, low, high):
    """x clamped to bounds, with gradient 1 inside and 0 outside."""
    return x * 0 + low if x < low else x * 0 + high if x > high else x


def log_ratio_bounds(o):
    clamp = o.log_ratio_clamp
    low, high = clamp if isinstance(clamp, tuple) else (-(clamp or 80.0), clamp or 80.0)
    return max(low, -80.0), min(high, 80.0)


def token_loss(o, d, A, logprob):
    """Loss and clip flag of one token; d is the (held) log-ratio that it uses."""
    r = torch.exp(d)
    if o.surrogate == "ppo_clip":
        free = hold(r, -math.inf, math.inf if o.delta is None else o.delta) * A
        clipped = hold(r, 1 - o.clip_low, 1 + o.clip_high) * A
        loss = -(clipped if clipped < free else free)
        flag = -1 if A < 0 and r < 1 - o.clip_low else 1 if A > 0 and r > 1 + o.clip_high else 0
        if o.delta is not None and r > o.delta and free <= clipped and A != 0:
            flag = 1
        if o.dual_clip is not None and A < 0 and loss > -o.dual_clip * A:
            loss, flag = loss * 0 - o.dual_clip * A, 1
        return loss, flag
    if o.surrogate == "cispo":
        r = r.detach()
        flag = 0 if A == 0 else -1 if r < 1 - o.clip_low else 1 if r > 1 + o.clip_high else 0
        return -hold(r, 1 - o.clip_low, 1 + o.clip_high) * A * logprob, flag
    if o.surrogate == "sapo":
        tau = o.sapo_temperature_pos if A > 0 else o.sapo_temperature_neg
        return -4 / tau / (1 + torch.exp(-tau * (r - 1))) * A, 0
    if o.surrogate == "reinforce":
        return -A * logprob, 0
    raise AssertionError(o.surrogate)


def token_kl(o, logprob, ref, d):
    """The KL term of one token; d is the log-ratio of the policy term."""
    if o.kl_gradient == "bias-corrected":
        return torch.exp(hold(d, -40.0, 40.0)) * kl_estimate(o, hold(ref - logprob, -40.0, 40.0))
    x = hold(ref - logprob, -80.0, 80.0)
    if o.kl_gradient == "straight-through":
        return kl_estimate(o, x).detach() + x * x / 2 - (x * x / 2).detach()
    return kl_estimate(o, x)


def kl_estimate(o, x):
    if o.kl_estimator == "k1":
        kl = -x
    elif o.kl_estimator == "k2":
        kl = x * x / 2
    elif o.kl_estimator == "k3":
        kl = torch.exp(x) - 1 - x
    else:
        kl = x if x > 0 else -x
    return kl if o.kl_clamp is None else hold(kl, -o.kl_clamp, o.kl_clamp)


def token_weight(o, sequences, groups, s, normalizer, width, aggregation=None):
    """w_t of a token of sequence s, from the definition of each aggregation."""
    aggregation = aggregation or o.aggregation
    lengths = [len(tokens) for tokens in sequences]
    if aggregation == "token-sum":
        return 1.0
    if aggregation == "token-mean":
        return 1 / (normalizer or sum(lengths))
    if aggregation == "prompt-mean":
        nonempty = {g for g, length in zip(groups, lengths, strict=True) if length}
        of_group = sum(n for g, n in zip(groups, lengths, strict=True) if g == groups[s])
        return 1 / ((normalizer or len(nonempty)) * of_group)
    weight = 1 / (normalizer or sum(length > 0 or o.count_empty for length in lengths))
    if aggregation == "seq-mean-token-mean":
        return weight / lengths[s]
    if aggregation == "seq-mean-token-sum-norm":
        return weight / (o.length_norm or width)
    assert aggregation == "seq-mean-token-sum"
    return weight


def rollout_weights(correction, old, rollout, tokens):
    """is_t of every token of one sequence."""
    differences = {t: (old[t] - rollout[t]).item() for t in tokens}
    if correction.level == "sequence":
        differences = dict.fromkeys(tokens, sum(differences.values()))
    elif correction.level == "geometric":
        differences = dict.fromkeys(tokens, sum(differences.values()) / max(len(tokens), 1))
    weights = {}
    for t in tokens:
        ratio = math.exp(min(max(differences[t], -80.0), 80.0))
        inside = correction.low <= ratio <= correction.high
        if correction.kind == "mask":
            weights[t] = ratio if inside else 0.0
        elif correction.kind == "filter":
            weights[t] = float(inside)
        else:
            weights[t] = min(max(ratio, correction.low), correction.high)
    return weights


def kept_in_policy(o, sequences, lp, old, rollout, advantages, H):
    """The tokens that keep their policy term, and among them those of high entropy."""
    kept = top = {t for tokens in sequences for t in tokens}
    if o.off_policy_threshold is not None:
        sampled = old if rollout is None else rollout
        for tokens in filter(None, sequences):
            drift = sum((sampled[t] - lp[t]).item() for t in tokens) / len(tokens)
            if drift > o.off_policy_threshold:
                kept = kept - {t for t in tokens if advantages[t] < 0}
    if o.top_entropy_quantile < 1 and kept | top:
        values = torch.stack([H[t].detach() for t in sorted(top)])
        threshold = torch.quantile(values, 1 - o.top_entropy_quantile)
        top = {t for t in top if H[t] >= threshold}
    return kept & top, top


def exact_policy_loss(o, sequences, logprobs, advantages, **options):
    """Loss, metrics and gradients; `sequences` lists the active tokens of each; the rest is flat.

    Options: old, ref, rollout, entropy, policy_weights (flat tensors), normalizer, groups (the
    group of each sequence), width (the padded length).
    """
    lp = logprobs.detach().clone().requires_grad_()
    entropy = options.get("entropy")
    H = None if entropy is None else entropy.detach().clone().requires_grad_()
    old, ref = options.get("old"), options.get("ref")
    old = lp.detach() if old is None else old
    lowest, highest = log_ratio_bounds(o)
    policy = kl_part = bonus = 0.0 * lp.new_zeros(())
    size, rows = 0.0, []  # rows: token, flag, ratio, token log-ratio, kl
    factors = options.get("policy_weights")
    kept, top = kept_in_policy(o, sequences, lp, old, options.get("rollout"), advantages, H)
    shape = (options.get("groups"), options.get("width"))
    for s, tokens in enumerate(sequences):
        if not tokens:
            continue

        def weight(of, aggregation, s=s):
            groups, width = shape
            normalizer = options.get("normalizer") if aggregation is None else None
            return token_weight(o, of, groups, s, normalizer, width, aggregation)

        w = weight(sequences, None)
        w_kl = weight(sequences, o.kl_aggregation)
        correction = dict.fromkeys(tokens, 1.0)
        for one in o.rollout_corrections:
            more = rollout_weights(one, old, options["rollout"], tokens)
            correction = {t: correction[t] * more[t] for t in tokens}
        own = {t: hold(lp[t] - old[t], lowest, highest) for t in tokens}
        mean = sum(lp[t] - old[t] for t in tokens) / len(tokens)
        shared = hold(mean, lowest, highest)
        if o.surrogate == "gmpo":
            flags = {}
            clipped = []
            for t in tokens:
                rises = advantages[t] >= 0
                low, high = (-math.inf, o.clip_high) if rises else (-o.clip_low, math.inf)
                clipped.append(hold(own[t], low, high))
                above = bool(own[t] > high) and bool(advantages[t] > 0)
                flags[t] = int(above) - int(own[t] < low)
            shared = sum(clipped) / len(tokens)
        for t in tokens:
            d = shared if o.level == "sequence" else own[t]
            if o.level == "sequence-token":
                d = hold(mean.detach() + lp[t] - lp[t].detach(), lowest, highest)
            if callable(o.surrogate):
                to_ref = None if ref is None else ref[t]
                f, flag = o.surrogate(lp[t], old[t], to_ref, advantages[t]), 0
            elif o.surrogate == "gmpo":
                f, flag = -advantages[t] * torch.exp(shared), flags[t]
            else:
                f, flag = token_loss(o, d, advantages[t], lp[t])
            kl = lp.new_zeros(()) if ref is None else token_kl(o, lp[t], ref[t], d)
            factor = correction[t] * (t in kept) * (1.0 if factors is None else float(factors[t]))
            policy = policy + w * factor * f
            kl_factor = correction[t] if o.rollout_weighs == "policy-and-kl" else 1.0
            if o.kl_coef:
                kl_part = kl_part + w_kl * kl_factor * o.kl_coef * kl
            if o.entropy_coef and t in top:
                on = [[x for x in others if x in top] for others in sequences]
                w_entropy = weight(on, o.entropy_aggregation) if o.entropy_aggregation else w
                bonus = bonus - w_entropy * o.entropy_coef * H[t]
            size += w * abs(f.item() * factor) + w_kl * kl_factor * abs(kl.item()) * o.kl_coef
            rows.append((t, flag, torch.exp(d).item(), own[t].item(), kl.item()))
    loss = policy + kl_part + bonus
    gradient = torch.zeros_like(lp)
    if loss.requires_grad:
        gradient = torch.autograd.grad(loss, lp, retain_graph=True, allow_unused=True)[0]
    entropy_gradient = torch.zeros_like(lp)
    if o.entropy_coef and rows:
        entropy_gradient = torch.autograd.grad(loss, H)[0]
    return Truth(
        loss.detach(),
        exact_metrics(o, policy, rows, gradient, -lp.detach() if H is None else H.detach(), top),
        gradient,
        entropy_gradient,
        size + abs(bonus.item()),
    )


def exact_metrics(o, policy, rows, gradient, entropy, top):
    n = len(rows)
    if n == 0:
        names = "policy_loss kl kl_old entropy ratio_mean ratio_max ratio_min clip_low clip_high"
        return dict.fromkeys(
            [*names.split(), "clip_fraction", "active_tokens", "zero_grad_fraction"], 0.0
        )
    tokens, flags, ratios, own, kls = zip(*rows, strict=True)
    return {
        "policy_loss": policy.item(),
        "kl": sum(kls) / n,
        "kl_old": sum(math.exp(d) - 1 - d for d in own) / n,
        "entropy": sum(float(entropy[t]) for t in tokens) / n,
        "ratio_mean": sum(ratios) / n,
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "clip_low": sum(flag < 0 for flag in flags) / n,
        "clip_high": sum(flag > 0 for flag in flags) / n,
        "clip_fraction": sum(flag != 0 for flag in flags) / n,
        "active_tokens": float(n),
        "zero_grad_fraction": sum(
            bool(gradient[t] == 0) and not (o.entropy_coef and t in top) for t in tokens
        )
        / n,
    }
