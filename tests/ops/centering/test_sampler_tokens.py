"""`TopKLogprobs` made, taken apart and joined; compiled calls; metrics that go places."""

import copy
import io
import pickle
from types import SimpleNamespace as Output

import pytest
import torch
from torch.utils import _pytree as pytree

import fastrl
from fastrl import Teacher, TopKLogprobs
from fastrl.ops.metrics import CENTERING_METRICS, TEACHER_METRICS
from tests.ops.centering.centered_losses import WEIGHTS, B, T, V, centered, drawn

NOTHING = -torch.inf


def test_from_lists():
    top = TopKLogprobs.from_lists([[3, 1], [], (2,)], [[-1.0, -2.0], [], [-0.5]])
    assert top.token_ids.tolist() == [[3, 1], [-1, -1], [2, -1]]
    assert top.logprobs.tolist() == [[-1.0, -2.0], [NOTHING] * 2, [-0.5, NOTHING]]
    assert [x.dtype for x in top] == [torch.int64, torch.float32]
    assert TopKLogprobs.from_lists([[]], [[]]).token_ids.tolist() == [[-1]]
    assert TopKLogprobs.from_lists([], []).token_ids.shape == (0, 1)


def vllm_token(*rows):
    """What vLLM has for a token: a dict from ids to log-probability and rank."""
    return {token: Output(logprob=logprob, rank=rank) for token, logprob, rank in rows}


def test_from_vllm_leaves_out_the_sampled_token_beyond_the_top():
    beyond = vllm_token((9, -6.0, 17), (1, -0.5, 1), (4, -1.5, 2))
    within = vllm_token((4, -1.5, 2), (1, -0.5, 1))
    excluded = vllm_token((2, 0.0, 1), (5, NOTHING, 2))  # by top-p
    first = Output(token_ids=[9, 4], logprobs=[beyond, within])
    second = Output(token_ids=[2], logprobs=[excluded])
    top = TopKLogprobs.from_vllm([first, second], top_k=2)
    assert top.token_ids.tolist() == [[1, 4], [4, 1], [2, 5], [-1, -1]]
    assert top.logprobs[0].tolist() == [-0.5, -1.5]
    with pytest.raises(ValueError, match="requested, got 2 at 0"):
        TopKLogprobs.from_vllm([first], top_k=3)
    alone = TopKLogprobs.from_vllm([first, second], top_k=1, length=1)
    assert alone.token_ids.tolist() == [[1], [2]]
    assert TopKLogprobs.from_vllm([first], top_k=2, length=3).token_ids[2].tolist() == [-1, -1]
    assert TopKLogprobs.from_vllm([], top_k=2).token_ids.shape == (0, 2)


def test_rows_taken_joined_and_moved():
    top = TopKLogprobs.from_lists([[3, 1], [2], [7, 8]], [[-1.0, -2.0], [-0.5], [-1.0, -3.0]])
    for index in (torch.tensor([2, 0]), torch.tensor([2, 0], dtype=torch.uint8)):
        assert top.take(index).token_ids.tolist() == [[7, 8], [3, 1]]
    assert top.take(torch.tensor([True, False, True])).logprobs.tolist() == [[-1, -2], [-1, -3]]
    of_batch = TopKLogprobs(*(x[:, None] for x in top))  # [B, T, K]
    assert of_batch.take(torch.tensor([1])).token_ids.tolist() == [[2, -1]]
    one = TopKLogprobs.from_lists([[5]], [[-0.25]])
    joined = TopKLogprobs.concatenate(iter([one, of_batch]))
    assert joined.token_ids.tolist() == [[5, -1], [3, 1], [2, -1], [7, 8]]
    assert joined.logprobs[0].tolist() == [-0.25, NOTHING]
    assert all(x.device.type == "meta" for x in top.to("meta"))
    assert isinstance(pickle.loads(pickle.dumps(top)), TopKLogprobs)


@pytest.mark.parametrize("kind", ["none", "truncated"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_compiled_calls(backend, form, kind):
    """Also a value that only a run can refuse."""
    torch.compiler.reset()
    o = centered("reinforce", *WEIGHTS[kind])
    logits, given, top, _ = drawn(o)
    del given["objective"]

    def loss(x, top, given):
        options = {**given, "objective": o, "backend": backend, "rollout_top_k": top}
        if form == "logits":
            return fastrl.logits_policy_loss(x, **options)
        return fastrl.linear_policy_loss(x, torch.eye(V), **options)

    compiled, found = torch.compile(loss, fullgraph=True, backend="aot_eager"), []
    for function in (loss, compiled):
        leaf = logits.clone().requires_grad_()
        result = function(leaf, top, given)
        result.loss.backward()
        found.append((result.loss.detach(), *result.metrics.values(), leaf.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)
    wrong = top._replace(token_ids=top.token_ids + V)
    if (backend, form) != ("reference", "logits"):  # which has no operator that could check
        with pytest.raises(ValueError, match=r"rollout_top_k.token_ids must lie in \[0, 40\)"):
            compiled(logits, wrong, given)


def metrics_of(*, teacher=False, **more):
    o = centered("reinforce", teacher_coef=0.5 * teacher, **more)
    logits, given, top, _ = drawn(o)
    beside = {"teacher": Teacher.from_logits(torch.randn(B, T, V))} if teacher else {}
    return fastrl.logits_policy_loss(logits, **given, **beside, rollout_top_k=top).metrics


@pytest.mark.parametrize("teacher", [False, True])
def test_metrics_travel(teacher):
    metrics = metrics_of(teacher=teacher)
    names = [*metrics]
    assert names[-3:] == [*CENTERING_METRICS]
    assert ([*TEACHER_METRICS] == names[-6:-3]) == teacher
    stored = io.BytesIO()
    torch.save(metrics, stored)
    stored.seek(0)
    tree = pytree.tree_map(lambda x: x.clone(), metrics)
    copies = [copy.copy(metrics), copy.deepcopy(metrics), fastrl.ops.metrics.LossMetrics(metrics)]
    copies += [tree, torch.load(stored), pickle.loads(pickle.dumps(metrics)), dict(metrics)]
    for other in copies:
        assert [*other] == names
        assert all(torch.equal(other[name], metrics[name]) for name in names)
    floats = metrics.to_floats()
    assert floats == {name: x.item() for name, x in metrics.items()}
    assert 0 < floats["centering_mass"] < 1
    assert floats["head_kl"] > 0


@pytest.mark.parametrize("teacher", [False, True])
def test_metrics_are_reduced_over_tokens(teacher):
    parts = [metrics_of(teacher=teacher) for _ in range(3)]
    tokens = torch.stack([part["active_tokens"] for part in parts])
    for given in (parts, [dict(part) for part in parts]):
        found = fastrl.reduce_metrics(given)
        assert [*found] == [*parts[0]]
        for name in CENTERING_METRICS:
            every = torch.stack([part[name] for part in parts])
            torch.testing.assert_close(found[name], (every * tokens).sum() / tokens.sum())
    others = metrics_of(teacher=not teacher)
    with pytest.raises(ValueError, match="all or none must have divergence, teacher_agreement"):
        fastrl.reduce_metrics([parts[0], others])
