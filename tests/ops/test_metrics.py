"""The reduced metrics of micro-batches and ranks are those of the whole batch."""

import copy
import math

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.library import METRICS
from tests.ops.inputs import policy_inputs
from tests.ops.policy_loss_cases import run

OBJECTIVE = Objective(kl_coef=0.1, entropy_coef=0.05, clip_low=0.1)
USE = ("old_logprobs", "ref_logprobs", "entropy")


def rows(inputs, chosen):
    return {name: x[chosen] for name, x in inputs.items()}


def metrics_of(backend, inputs, **options):
    return run(backend, OBJECTIVE, inputs, USE, **options)[0].metrics


def batch(backend):
    inputs = policy_inputs(8, 6, torch.float64 if backend == "reference" else torch.float32)
    inputs["mask"][3] = False
    return inputs


@pytest.mark.parametrize("split", [[8], [4, 4], [1, 3, 2, 2], [1] * 8])
def test_micro_batches_together_are_the_whole(backend, split):
    inputs = batch(backend)
    tokens = float(inputs["mask"].sum())
    whole = metrics_of(backend, inputs, normalizer=tokens)
    parts = [
        metrics_of(backend, rows(inputs, chosen), normalizer=tokens)
        for chosen in torch.arange(8).split(split)
    ]
    together = fastrl.reduce_metrics(parts)
    assert list(together) == list(METRICS)
    torch.testing.assert_close(together, whole, rtol=1e-6, atol=1e-7)


def test_local_token_means_are_averaged_by_their_tokens(backend):
    inputs = batch(backend)
    parts = [metrics_of(backend, rows(inputs, slice(a, b))) for a, b in ((0, 3), (3, 4), (4, 8))]
    together = fastrl.reduce_metrics(parts, policy_loss="mean")
    torch.testing.assert_close(together, metrics_of(backend, inputs), rtol=1e-6, atol=1e-7)


def test_nan_stays_visible(backend):
    inputs = batch(backend)
    inputs["mask"][:] = True
    clean = metrics_of(backend, inputs)
    inputs["logprobs"][0, 0] = math.nan
    together = fastrl.reduce_metrics([clean, metrics_of(backend, inputs)])
    for name in ("policy_loss", "kl", "ratio_mean", "ratio_max", "ratio_min"):
        assert together[name].isnan()
    assert together["active_tokens"] == 96


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
    metrics = metrics_of("reference", batch("reference"))
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
