"""Metrics: reduced over micro-batches, refused, saved and copied."""

import copy

import pytest
import torch

import fastrl
from fastrl import Objective
from tests.calls.case import Case
from tests.calls.entries import Entry
from tests.ops.inputs import widest


def test_local_token_means_are_averaged_by_their_tokens(backend):
    fields = {"kl_coef": 0.1, "clip_low": 0.1}
    entry = Entry(Case("policy_loss", objective="ppo", fields=fields, old="near", ref="near"))
    inputs = entry.draw(8, 6, widest(backend))
    inputs["mask"][3] = False

    def metrics_of(rows):
        part = {name: x[rows] for name, x in inputs.items()}
        return fastrl.policy_loss(**part, **entry.options, backend=backend).metrics

    parts = [metrics_of(slice(a, b)) for a, b in ((0, 3), (3, 4), (4, 8))]
    together = fastrl.reduce_metrics(parts, policy_loss="mean")
    torch.testing.assert_close(together, metrics_of(slice(8)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ([], ValueError, "at least one micro-batch"),
        ({}, ValueError, "metrics must have the names policy_loss, kl.*got none"),
        ([{"kl": torch.zeros(())}], ValueError, "got kl"),
        (3, TypeError, "got int"),
        ([3], TypeError, "got int"),
    ],
)
def test_invalid_metrics_are_refused(metrics, error, message):
    with pytest.raises(error, match=message):
        fastrl.reduce_metrics(metrics)


def test_an_invalid_process_group_is_refused():
    metrics = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)).metrics
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup or None, got str"):
        fastrl.reduce_metrics(metrics, "world")
    with pytest.raises(ValueError, match="must be one of sum, mean, rank-mean; got 'max'"):
        fastrl.reduce_metrics(metrics, policy_loss="max")


def test_metrics_are_saved_and_loaded_as_plain_tensors(tmp_path):
    metrics = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)).metrics
    torch.save({"metrics": metrics}, tmp_path / "metrics.pt")
    loaded = torch.load(tmp_path / "metrics.pt", weights_only=True)["metrics"]
    assert list(loaded) == list(metrics)
    assert {name: x.item() for name, x in loaded.items()} == metrics.to_floats()
    assert type(metrics)(loaded).to_floats() == metrics.to_floats()


def test_metrics_are_a_node_of_trees_and_can_be_copied():
    result = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    doubled = torch.utils._pytree.tree_map(lambda x: x.double(), result.metrics)
    assert doubled["ratio_mean"].dtype == torch.float64
    for same in (copy.copy(result.metrics), copy.deepcopy(result.metrics)):
        assert same.to_floats() == result.metrics.to_floats()
    plain = type(result.metrics)(result.metrics.to_floats())
    assert plain.to_floats() == result.metrics.to_floats()


def of_reference(given, kl_coef):
    objective = Objective(kl_coef=kl_coef)
    lower = {"ref_logprobs": torch.full((1, 2), -1.0)} if given else {}
    inputs = torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)
    return fastrl.policy_loss(*inputs, **lower, objective=objective)


def test_without_a_reference_there_is_no_kl(tmp_path):
    """Nor in metrics that are copied, saved, reduced or made of a mapping."""
    metrics = of_reference(given=False, kl_coef=None).metrics
    torch.save(metrics, tmp_path / "metrics.pt")
    same = [metrics, copy.copy(metrics), copy.deepcopy(metrics), type(metrics)(dict(metrics))]
    same += [torch.utils._pytree.tree_map(torch.clone, metrics)]
    same += [fastrl.reduce_metrics(metrics), fastrl.reduce_metrics([dict(metrics), metrics])]
    for found in (*same, torch.load(tmp_path / "metrics.pt"), metrics.to_floats()):
        assert "kl" not in found
        assert len(found) == len(list(found)) == 11
    with pytest.raises(KeyError, match="kl"):
        metrics["kl"]
    with_kl = of_reference(given=True, kl_coef=0.0).metrics
    assert list(with_kl)[:2] == ["policy_loss", "kl"]
    with pytest.raises(
        ValueError, match="all or none must have kl, from a teacher, a reference or"
    ):
        fastrl.reduce_metrics([metrics, with_kl])


def test_a_reference_needs_a_coefficient():
    """One of 0 computes the metric alone."""
    with pytest.raises(ValueError, match=r"ref_logprobs has no effect .* objective.kl_coef is set"):
        of_reference(given=True, kl_coef=None)
    measured, weighed = (of_reference(given=True, kl_coef=x) for x in (0.0, 0.5))
    k3 = 2.718281828**-1
    assert measured.metrics["kl"].item() == pytest.approx(k3)
    assert weighed.loss.item() - measured.loss.item() == pytest.approx(0.5 * k3)


@pytest.mark.parametrize("view", ["values", "items", "keys"])
def test_compiled_code_iterates_over_metrics(backend, view):
    inputs = torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)

    def found(*inputs):
        metrics = fastrl.policy_loss(*inputs, backend=backend).metrics
        return [*getattr(metrics, view)()]

    torch.compiler.reset()
    assert torch.compile(found, fullgraph=True, backend="aot_eager")(*inputs) == found(*inputs)
