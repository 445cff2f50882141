"""Losses with score centering and all their gradients, beside float64 over the whole vocabulary."""

from itertools import product

import pytest
import torch

import fastrl
from fastrl import KeptTokens, RolloutCorrection, Teacher
from tests.ops.centering.centered_losses import (
    WEIGHTS,
    WIDTH,
    B,
    T,
    V,
    centered,
    drawn,
    exact_loss,
    factors,
    sampler_of,
)

pytestmark = pytest.mark.kernels
TEMPERATURE = torch.linspace(0.5, 2.0, B * T).view(B, T)
SCALINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7, "logit_scale": 1.3},
    "temperatures": {"temperature": TEMPERATURE, "logit_scale": 0.8},
    "softcap": {"logit_softcap": 4.0, "logit_scale": 1.5, "temperature": 0.9},
}
HOWS = {
    ("logits", "plain"): {},
    ("logits", "in place"): {"inplace": True},
    ("hidden", "plain"): {"chunk_tokens": 3},
    ("hidden", "whole rows"): {"compact": False, "chunk_tokens": 5},
    ("hidden", "without metrics"): {"metrics": False, "chunk_tokens": 1},
}


def near(found, exact, bound=2e-5, what=""):
    error = (found.double() - exact).abs().max()
    assert error <= bound * exact.abs().max().clamp(min=1e-6), (what, error, exact.abs().max())


def compare(
    given,
    top,
    leaves,
    logits_of,
    weights,
    form,
    excluded=0.0,
    bound=2e-5,
    value=True,
    exact=(),
    **options,
):
    """Compare a loss and the gradients of its leaves; `logits_of` makes logits from these.

    Where all tokens of a set are the sampler's, alpha, and the value of C, is a rounding error.
    """
    truth = {**given, **dict(exact)}
    mine = [x.clone().requires_grad_() for x in leaves]
    double = [x.detach().double().requires_grad_() for x in leaves]
    call = {**given, **options, "rollout_top_k": top}
    if form == "logits":  # not a leaf, as `inplace` requires
        result = fastrl.logits_policy_loss(logits_of(*mine) * 1, **call)
    else:
        head, more = (mine[0], mine[1]), {}
        if len(mine) > 2:
            more = {"bias": mine[2], "lora": (mine[3], mine[4], 0.5)}
        result = fastrl.linear_policy_loss(*head, **call, **more)
    apart = ("kept", "backend", "chunk_tokens", "compact")
    scaled = {name: x for name, x in {**truth, **options}.items() if name not in apart}
    loss, term = exact_loss(logits_of(*double), scaled, top, weights, excluded)
    if value:
        assert abs(result.loss.item() - loss.item()) <= bound * (1 + abs(loss.item()))
    assert ("centering_mass" in result.metrics) == options.get("metrics", True)
    (1.5 * result.loss).backward()
    (1.5 * loss).backward()
    for number, (x, y) in enumerate(zip(mine, double, strict=True)):
        near(x.grad, y.grad, bound, f"leaf {number}")
    return result, term


def same(x):
    return x


def head_logits(hidden, weight, bias=None, a=None, b=None):
    logits = hidden @ weight.T
    return logits if bias is None else logits + bias + 0.5 * (hidden @ a.T) @ b.T


def leaves_of(form, logits):
    if form == "logits":
        return [logits], same
    # a tail of hardly any mass makes the value of C inexact, though not its gradient
    head = [torch.randn(B, T, WIDTH), 0.4 * torch.randn(V, WIDTH), torch.randn(V)]
    return [*head, torch.randn(2, WIDTH), 0.4 * torch.randn(V, 2)], head_logits


def objects(form, o):
    """Leaves, how logits come from them, and what the objective takes beside."""
    logits, given, top, rollout = drawn(o)
    leaves, logits_of = leaves_of(form, logits)
    if form == "hidden":  # a sampler near the policy
        made = logits_of(*leaves)
        top, log_q = sampler_of(made)
        if "rollout_logprobs" in given:
            own = given["token_ids"][..., None]
            given["rollout_logprobs"] = log_q.gather(-1, own)[..., 0].float()
    return leaves, logits_of, given, top, rollout


@pytest.mark.parametrize("kind", [*WEIGHTS])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_every_weight(backend, form, kind):
    o = centered("reinforce", *WEIGHTS[kind])
    leaves, logits_of, given, top, _ = objects(form, o)
    _, term = compare(given, top, leaves, logits_of, factors(given, o), form, backend=backend)
    assert (abs(term) < 1e-12) == (kind == "unbounded")


@pytest.mark.some_on("triton", "cuda")
@pytest.mark.parametrize("scaling", [*SCALINGS])
@pytest.mark.parametrize(("form", "how"), [*HOWS])
def test_forms_and_scalings(backend, form, how, scaling):
    o = centered("reinforce", *WEIGHTS["truncated"], entropy_coef=0.05)
    leaves, logits_of, given, top, _ = objects(form, o)
    options = {**SCALINGS[scaling], **HOWS[form, how], "backend": backend}
    compare(given, top, leaves, logits_of, factors(given, o), form, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_dtypes_of_logits(backend, dtype, inplace):
    """The gradient is rounded once; that of the exact one is half a unit in the last place."""
    o = centered("reinforce", *WEIGHTS["truncated"])
    logits, given, top, _ = drawn(o, dtype=dtype)
    backend = "auto" if dtype == torch.float64 and backend != "reference" else backend
    options = {"backend": backend, "inplace": inplace}
    bound = max(2e-5, torch.finfo(dtype).eps) if dtype != torch.float64 else 1e-12
    compare(given, top, [logits], same, factors(given, o), "logits", bound=bound, **options)


def test_autocast(backend):
    """Leaves that bfloat16 has; their gradients are products of rounded operands."""
    o = centered("reinforce", *WEIGHTS["truncated"])
    leaves, logits_of, given, top, _ = objects("hidden", o)
    leaves = [x.bfloat16().float() for x in leaves[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        bound, weights = 2**-7, factors(given, o)
        compare(given, top, leaves, logits_of, weights, "hidden", bound=bound, backend=backend)


OBJECTIVES = {
    "ppo": centered("ppo", *WEIGHTS["truncated"]),
    "grpo": centered("grpo"),
    "dapo": centered("dapo", *WEIGHTS["masked"], kl_coef=0.1),
    "dual clip": centered("ppo", dual_clip=3.0, delta=1.5),
    "sapo": centered("sapo", *WEIGHTS["filtered"]),
    "cispo": centered("cispo", entropy_coef=0.1),
    "token-sum": centered("reinforce", aggregation="token-sum"),
    "seq-mean-token-sum": centered("reinforce", aggregation="seq-mean-token-sum"),
    "exact KL": centered("grpo", kl_estimator="exact", kl_coef=0.2),
    "gamma": centered("reinforce", kl_coef=0.3, kl_estimator="k1"),
}


@pytest.mark.parametrize("name", [*OBJECTIVES])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_objectives_on_policy(backend, form, name):
    o = OBJECTIVES[name]
    leaves, logits_of, given, top, rollout = objects(form, o)
    if o.has_exact_kl:
        given["teacher"] = Teacher.from_logits(torch.randn(B, T, V))
    elif o.kl_coef:
        given["ref_logprobs"] = rollout - 0.1
    compare(given, top, leaves, logits_of, factors(given, o), form, backend=backend)


@pytest.mark.parametrize(
    "clips", [(0.2, 0.1, None), (2.0, 0.3, None), (0.5, 0.5, (-0.1, 0.2)), (0.0, 0.0, None)]
)
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_cispo_with_logprobs_of_the_sampler(backend, form, clips):
    o = centered("cispo", clip_low=clips[0], clip_high=clips[1], log_ratio_clamp=clips[2])
    leaves, logits_of, given, top, rollout = objects(form, o)
    given["old_logprobs"] = rollout
    compare(given, top, leaves, logits_of, factors(given, o), form, backend=backend)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("kind", ["mask", "filter"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_weights_of_the_policy_term_and_filters_of_sequences(backend, form, kind, by_token):
    filters = RolloutCorrection(kind="filter", level="sequence", low=0.4, high=1e9)
    o = centered("reinforce", RolloutCorrection(kind=kind, low=0.5, high=2.0), filters)
    leaves, logits_of, given, top, _ = objects(form, o)
    log_p = logits_of(*leaves).log_softmax(-1)
    own = log_p.gather(-1, given["token_ids"][..., None])[..., 0]
    given["rollout_logprobs"] = own.clone()
    given["rollout_logprobs"][1] += 5.0  # this sequence is dropped
    given["policy_weights"] = torch.rand(*((B, T) if by_token else (B,)))
    given["policy_weights"][2] = 0.0
    weights = factors(given, o)
    weights[1] = 0.0
    result, _ = compare(given, top, leaves, logits_of, weights, form, backend=backend)
    dropped = given["mask"][1:].sum() / given["mask"].sum()
    torch.testing.assert_close(result.metrics["zero_weight_fraction"], dropped)


def teacher_of(kind, excluded=None):
    """A teacher beside V logits, or the one in float64 whose logits outside of a set are -inf."""
    logits = torch.randn(B, T, V, generator=torch.Generator().manual_seed(1))
    if kind == "none":
        return {}
    if kind == "top-k":
        values, ids = logits.log_softmax(-1).topk(3)
        return {"teacher": Teacher.from_top_k(ids, values, beta=0.5)}
    if excluded is None and kind == "hidden":
        return {"teacher": Teacher.from_hidden(logits, torch.eye(V), beta=0.3)}
    logits = logits if excluded is None else logits.double() + excluded
    return {"teacher": Teacher.from_logits(logits, beta=0.3)}


@pytest.mark.parametrize(
    ("teacher", "kept_count"),
    [*product(["none", "hidden", "logits"], [1, 4, 12, None]), ("top-k", None)],
)
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_kept_tokens_and_teachers(backend, form, teacher, kept_count):
    """Over a set that has not all of the sampler's tokens; every third row has no set."""
    o = centered("reinforce", *WEIGHTS["truncated"], teacher_coef=0.5 * (teacher != "none"))
    leaves, logits_of, given, top, _ = objects(form, o)
    excluded = torch.zeros(B, T, V, dtype=torch.float64)
    if kept_count is not None:
        sets = [torch.randperm(V)[:kept_count].tolist() for _ in range(B * T)]
        sets[::3] = [[] for _ in sets[::3]]
        given["kept"] = KeptTokens.from_lists(sets)
        rows = zip(excluded.view(-1, V), sets, given["token_ids"].flatten(), strict=True)
        for row, one, own in rows:
            if one:
                row[:] = -torch.inf
                row[[*one, int(own)]] = 0.0
        top, _ = sampler_of(logits_of(*leaves).double() + excluded)
    given |= {**teacher_of(teacher), "temperature": 0.8}
    exact = teacher_of(teacher, excluded)
    options = {"backend": backend, "exact": exact, "value": kept_count in (12, None)}
    compare(given, top, leaves, logits_of, factors(given, o), form, excluded, **options)
