"""Compares the policy loss with its definition: padded and packed, in any dtype."""

import torch

import fastrl
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import cu_seqlens, packed
from tests.support.policy_loss_truth import exact_policy_loss

PER_TOKEN = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy", "mask")
PER_TOKEN += ("policy_weights",)


def run(backend, objective, inputs, use=("old_logprobs",), **options):
    """Call `policy_loss` on the `inputs` named in `use`; return result and gradients."""
    logprobs = inputs["logprobs"].detach().requires_grad_()
    given = {name: inputs[name] for name in use}
    if "entropy" in given:
        given["entropy"] = inputs["entropy"].detach().requires_grad_()
    result = fastrl.policy_loss(
        logprobs,
        inputs["advantages"],
        inputs["mask"],
        **given,
        objective=objective,
        backend=backend,
        **options,
    )
    result.loss.backward()
    return result, logprobs.grad, given["entropy"].grad if "entropy" in given else None


def needed(o):
    """The optional inputs that an objective needs."""
    names = ["old_logprobs"]
    names += ["ref_logprobs"] if o.kl_coef else []
    names += ["entropy"] if o.entropy_coef or o.top_entropy_quantile < 1 else []
    names += ["rollout_logprobs"] if o.rollout_correction else []
    return tuple(names)


def pack(inputs, lengths):
    """The padded `inputs`, packed to `lengths`; `[B]` advantages are kept."""
    names = [*PER_TOKEN, *(["advantages"] if inputs["advantages"].dim() == 2 else [])]
    return {**inputs, **{name: packed(inputs[name], lengths) for name in names}}


def truth_of(o, inputs, use, lengths=None, **options):
    """Expected results for padded inputs, or for packed ones if `lengths` are given."""
    mask = inputs["mask"].bool().flatten().tolist()
    if lengths is None:
        B, width = inputs["mask"].shape
        lengths = [width] * B
    else:
        width = None
    ends = torch.tensor(lengths).cumsum(0).tolist()
    sequences = [
        [t for t in range(end - n, end) if mask[t]] for end, n in zip(ends, lengths, strict=True)
    ]
    flat = {name: inputs[name].double().flatten() for name in ("logprobs", *use)}
    advantages = inputs["advantages"].double()
    if advantages.numel() == len(lengths) != len(mask):
        advantages = advantages.repeat_interleave(torch.tensor(lengths))
    return exact_policy_loss(
        o,
        sequences,
        flat["logprobs"],
        advantages.flatten(),
        old=flat.get("old_logprobs"),
        ref=flat.get("ref_logprobs"),
        rollout=flat.get("rollout_logprobs"),
        entropy=flat.get("entropy"),
        policy_weights=flat.get("policy_weights"),
        width=width,
        **options,
    )


def assert_exact(backend, objective, inputs, use=None, lengths=None, groups=None, **options):
    """Compare loss, gradients and every metric with the expected results."""
    o = fastrl.Objective.preset(objective) if isinstance(objective, str) else objective
    use = needed(o) if use is None else use
    bounds = {} if lengths is None else {"cu_seqlens": cu_seqlens(lengths)}
    result, gradient, entropy_gradient = run(backend, o, inputs, use, **bounds, **options)
    normalizer = options.get("normalizer")
    exact = truth_of(
        o, inputs, use, lengths, groups=groups, normalizer=normalizer and float(normalizer)
    )
    assert_within_budget(result.loss, exact.loss, size=1e-3 + exact.size, ulps=32)
    assert gradient.dtype == inputs["logprobs"].dtype
    # the weights and ratios are fp32 or better, only the result is rounded to the dtype
    fine = 32 * torch.finfo(result.loss.dtype).eps
    largest = float(exact.gradient.abs().max()) if exact.gradient.numel() else 0.0
    assert_within_budget(gradient.flatten(), exact.gradient, ulps=1, atol=fine * largest)
    if entropy_gradient is not None and o.entropy_coef:
        assert_within_budget(entropy_gradient.flatten(), exact.entropy_gradient, ulps=4)
    assert list(result.metrics) == list(exact.metrics)
    for name, value in result.metrics.items():
        assert value.dim() == 0
        assert not value.requires_grad
        wanted = torch.tensor(exact.metrics[name], dtype=torch.float64)
        size = exact.size if name == "policy_loss" else wanted.abs()
        assert_within_budget(value, wanted, size=1 + size, ulps=32)
    return result
