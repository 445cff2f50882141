"""Calls the policy loss, padded and packed, and holds it against the oracle of the fuzzer."""

import numpy as np
import torch

import fastrl
from fastrl.library import METRICS
from tests.fuzz.oracle.bounded import Bounded, Doubts, of_results
from tests.fuzz.oracle.policy import fields_of, policy_loss
from tests.fuzz.oracle.tokens import Tokens, Weighing, term_weights
from tests.ops.closeness import assert_covers
from tests.ops.inputs import cu_seqlens, packed

PER_TOKEN = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy", "mask")
PER_TOKEN += ("policy_weights",)


def widest(backend):
    """The widest dtype that a backend takes."""
    return torch.float64 if backend == "reference" else torch.float32


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


def expected(o, inputs, use, lengths=None, groups=None, normalizer=None, term=None):
    """The oracle's loss of padded inputs, or of packed ones if `lengths` are given; `term` is that
    of an objective that is a function. Also which tokens are valid.
    """
    valid = inputs["mask"].bool().flatten().numpy()
    count, width = (len(lengths), 0) if lengths else inputs["mask"].shape
    sequence = np.repeat(np.arange(count), lengths or width)
    arithmetic = of_results(str(inputs["logprobs"].dtype).removeprefix("torch."))

    def of_valid(name):
        x = inputs[name].detach().double().flatten().numpy()
        x = x[sequence] if inputs[name].dim() < inputs["mask"].dim() or len(x) == count else x
        return Bounded(x[valid], 0.0, arithmetic)

    beside = {name.removesuffix("_logprobs"): of_valid(name) for name in use}
    tokens = Tokens(of_valid("logprobs"), of_valid("advantages"), sequence[valid], count, **beside)
    groups = None if groups is None else np.array(groups)
    weighing = Weighing(valid, sequence, count, width, groups, o.length_norm, o.count_empty)
    fields = fields_of(o)
    weights = term_weights(weighing, fields, normalizer, arithmetic)
    with np.errstate(all="ignore"):
        return policy_loss(tokens, fields, weights, Doubts(), term), valid


def assert_exact(
    backend, objective, inputs, use=None, lengths=None, groups=None, term=None, **options
):
    """Compare loss, gradients and every metric with the oracle's."""
    o = fastrl.Objective.preset(objective) if isinstance(objective, str) else objective
    use = needed(o) if use is None else use
    bounds = {} if lengths is None else {"cu_seqlens": cu_seqlens(lengths)}
    result, gradient, entropy_gradient = run(backend, o, inputs, use, **bounds, **options)
    normalizer = options.get("normalizer")
    if not isinstance(normalizer, dict):
        normalizer = {"policy": normalizer}
    normalizer = {k: None if x is None else float(x) for k, x in normalizer.items()}
    exact, valid = expected(o, inputs, use, lengths, groups, normalizer, term)
    assert_covers(exact.loss, result.loss, "loss")
    assert list(result.metrics) == list(METRICS)
    for name, value in result.metrics.items():
        assert not value.requires_grad
        assert_covers(exact.metrics[name], value, name)
    slopes = {"gradient": (gradient, exact.slope)}
    if entropy_gradient is not None and o.entropy_coef:
        slopes["gradient of the entropy"] = (entropy_gradient, exact.entropy_slope)
    for name, (got, want) in slopes.items():
        got, masked = got.flatten()[valid], got.flatten()[~valid]
        assert_covers(want, got, name, inputs["logprobs"].dtype)
        assert not masked.any()
    return result
