"""Every provider of the small selection gives the answer, or fails with a reason."""

import math

import pytest
import torch

from fastrl.backend import unavailable
from fastrl.bench.case import PASSES
from fastrl.bench.cases import OPS, SELECTIONS, Size, cases
from fastrl.bench.peers import PEERS
from fastrl.bench.timing import Calls, Plan

CPU = torch.device("cpu")
#: Of an answer in float32, and of one whose gradients or GEMMs are rounded to bfloat16. Libraries
#: that keep log-probabilities in bfloat16 have the last.
BUDGETS = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
OURS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
#: Why a library may have no answer here; of one that is installed, none is that it has changed.
REASONS = ("need a CUDA device", "pip install", "this version of torch has no")


def made(size, step, backends=("cpu",), peers=()):
    """The case of a size, and calls of its providers."""
    (case,) = cases([size], [step], CPU, backends, peers)
    return case, Calls(case, CPU, Plan(sets=1))


def first(op):
    return next(size for size in SELECTIONS["smoke"] if size.op == op)


@pytest.mark.parametrize("step", PASSES)
@pytest.mark.parametrize("op", OPS)
def test_every_provider_has_the_answer_or_a_reason(op, step, monkeypatch):
    """That torch.compile takes the function whole, without its code for the CPU, which is slow."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compile_(f, backend="eager", **o))
    peers = [peer for peer in PEERS if peer != "compile" or step == "both"]
    sizes = [size for size in SELECTIONS["smoke"] if size.op == op]
    found = cases(sizes, [step], CPU, ["cpu", "reference"], peers)
    assert found or step != "forward"
    for case in found:
        torch._dynamo.reset()
        run = Calls(case, CPU, Plan(sets=1))
        for provider in case.providers:
            if provider.kind == "floor":
                run.call(provider, run.first)()
                continue
            try:
                error = run.error(*run.answered(provider))
            except (ImportError, RuntimeError) as failure:
                error = str(failure)
            if isinstance(error, str):
                assert provider.kind == "peer", error
                assert any(reason in error for reason in REASONS), error
            else:
                budgets = OURS if provider.kind.startswith("fastrl") else BUDGETS
                assert error <= budgets[case.size.dtype], (case.name, provider.name)


@pytest.mark.parametrize("op", ["logits_policy_loss", "linear_policy_loss", "policy_loss"])
def test_a_wrong_gradient_and_a_wrong_loss_with_the_right_one_are_found(op):
    case, run = made(first(op), "both")
    right = case.providers[0]
    answer = run.call(right, run.first)()
    for wrong in range(len(answer)):
        changed = [1.01 * x if i == wrong else x for i, x in enumerate(answer)]
        assert case.error(changed, run.first) > 5e-3
        nans = [torch.full_like(x, torch.nan) if i == wrong else x for i, x in enumerate(answer)]
        assert math.isnan(case.error(nans, run.first))
    wrong = right._replace(forward=lambda inputs: right.forward(inputs) + 1)
    assert run.error(*run.answered(right)) < 4e-3
    assert run.error(*run.answered(wrong)) > 0.3


def test_a_slice_stays_one_where_the_gradient_is_written_over_it():
    case, run = made(Size("logits_policy_loss", "tiny", 16, torch.bfloat16, "sliced"), "both")
    (provider,) = [one for one in case.providers if one.kind == "fastrl in place"]
    before = run.first["logits"].clone()
    ready = provider.prepare(run.first)["logits"]
    assert ready.stride() == run.first["logits"].stride() != before.stride()
    assert ready.equal(before)
    assert run.error(*run.answered(provider)) <= OURS[torch.bfloat16]
    assert run.first["logits"].equal(before)


@pytest.mark.parametrize("op", ["token_logprobs", "token_stats", "linear_token_logprobs"])
@pytest.mark.parametrize("sequence", [0, 3, 7])
@pytest.mark.parametrize("token", [0, -1])
def test_a_wrong_row_of_any_sequence_is_found(op, sequence, token):
    case, run = made(Size(op, "tiny", 8 * 40, torch.float32), "forward")
    _, answer = run.answered(case.providers[0])
    changed = [one.clone() for one in ([answer] if torch.is_tensor(answer) else answer)]
    changed[-1][sequence, token] += 0.5
    assert case.error(changed, run.first) > 0.05
    changed[0][sequence, 20] = torch.nan  # also where nothing is compared
    with pytest.raises(ValueError, match="not finite"):
        run.error(None, changed)


@pytest.mark.parametrize(("sequences", "each"), [(16, 2**15), (1, 2**17), (128, 4096)])
def test_all_tokens_of_long_sequences_are_compared(sequences, each):
    size = Size("gae", "", sequences * each, torch.float32, f"{each} tokens each")
    case, run = made(size, "forward")
    _, answer = run.answered(case.providers[0])
    assert run.error(None, answer) < 2e-6
    for sequence in (0, -1):
        changed = answer.clone()
        changed[sequence, 0] += 0.1
        assert run.error(None, changed) > 1e-3


@pytest.mark.parametrize("variant", ["", "half the rows masked", "packed"])
def test_about_one_token_in_forty_is_clipped(variant):
    case, _ = made(Size("logits_policy_loss", "tiny", 4096, torch.float32, variant), "forward")
    inputs = case.inputs(0)
    logprobs = inputs["logits"].log_softmax(-1).gather(-1, inputs["token_ids"][..., None])[..., 0]
    ratio = (logprobs - inputs["old_logprobs"]).exp()
    gains = inputs["advantages"].expand_as(ratio) > 0
    clipped = torch.where(gains, ratio > 1.2, ratio < 0.8).float().mean()
    assert 0.015 < clipped < 0.035
    assert logprobs.exp().quantile(0.05) < 0.05
    assert logprobs.exp().quantile(0.95) > 0.95


@pytest.mark.skipif(unavailable("cuda") is None, reason="the CUDA backend is available")
def test_a_backend_that_is_unavailable_fails_with_its_reason():
    case, run = made(SELECTIONS["smoke"][0], "forward", ["cuda"])
    with pytest.raises(RuntimeError) as raised:
        run.answered(case.providers[0])
    assert str(raised.value) == unavailable("cuda")


@pytest.mark.parametrize("selection", SELECTIONS)
def test_selections_have_cases_of_distinct_names(selection):
    sizes = SELECTIONS[selection]
    assert len(set(sizes)) == len(sizes)
    found = cases(sizes, PASSES, CPU)
    assert len({case.name for case in found}) == len(found) >= len(sizes)
    if selection in ("cpu", "cuda", "smoke"):
        assert {size.op for size in sizes} == set(OPS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "softmax"}, "op must be among token_logprobs, .*'softmax'"),
        ({"model": "qwen9"}, "model must be among tiny, .*'qwen9'"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"variant": "frozen head"}, "variant of token_logprobs .* sliced, got 'frozen head'"),
        ({"op": "gae"}, "model must be among '', got 'tiny'"),
        ({"step": "sideways"}, "steps must be among forward, backward, both, got 'sideways'"),
        ({"backends": ["tpu"]}, "backends must be among reference, .*'tpu'"),
        ({"peers": ["numpy"]}, f"peers must be among {', '.join(PEERS)}, got"),
    ],
)
def test_unknown_sizes_and_names(changes, message):
    size = {"op": "token_logprobs", "model": "tiny", "rows": 16, "dtype": torch.float32}
    own = {name: changes[name] for name in changes if name in Size._fields}
    others = {name: changes[name] for name in changes if name not in own}
    with pytest.raises(ValueError, match=message):
        made(Size(**{**size, **own}), **{"step": "forward", **others})
