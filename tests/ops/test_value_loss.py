"""The value loss: mean squared error and Huber, with and without the clip of PPO."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from fastrl.contract import AGGREGATIONS
from tests.fuzz.oracle.bounded import Bounded, of_results
from tests.fuzz.oracle.tokens import Weighing, token_weights
from tests.fuzz.oracle.values import explained_variance, value_terms
from tests.ops.closeness import assert_covers
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    dtypes,
    filled_shapes,
    in_layout,
    layouts,
    make_mask,
    seeds,
)


def make_inputs(B, T, dtype=torch.float32, mask="random", clip=None):
    inputs = {
        "values": torch.randn(B, T).to(dtype) * 2,
        "returns": torch.randn(B, T).to(dtype) * 2,
        "mask": make_mask(mask, B, T),
    }
    if clip is not None:
        inputs |= {"old_values": torch.randn(B, T).to(dtype), "clip": clip}
    return inputs


def run(values, **inputs):
    values = values.detach().requires_grad_()
    result = fastrl.value_loss(values, **inputs)
    result.loss.backward()
    return result, values.grad


def assert_exact(inputs, aggregation="token-mean", **options):
    result, gradient = run(**inputs, aggregation=aggregation, **options)
    arithmetic = of_results(str(inputs["values"].dtype).removeprefix("torch."))
    valid = inputs["mask"].numpy().flatten()
    v, r, old = (
        None if x is None else Bounded(x.double().numpy().flatten()[valid], 0.0, arithmetic)
        for x in (inputs["values"], inputs["returns"], inputs.get("old_values"))
    )
    value, slope, clipped = value_terms(v, r, old, inputs.get("clip"), options.get("loss", "mse"))
    B, T = inputs["mask"].shape
    weighing = Weighing(valid, np.repeat(np.arange(B), T), B, T)
    w = token_weights(weighing, aggregation, options.get("normalizer"), arithmetic)[valid]
    assert_covers((w * value).sum(), result.loss, "loss")
    got = gradient.flatten()
    assert_covers(w * slope, got[valid], "gradient", inputs["values"].dtype)
    assert not got[~valid].any()
    share = clipped.yes.sum() / max(valid.sum(), 1)
    doubt = clipped.doubtful.sum() / max(valid.sum(), 1)
    assert result.metrics["clip_fraction"].item() == pytest.approx(share, abs=1e-6 + doubt)
    assert_covers(explained_variance(v, r), result.metrics["explained_variance"])


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_exact_in_every_dtype(loss, clip, dtype):
    assert_exact(make_inputs(5, 7, dtype, clip=clip), loss=loss)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if name != "prompt-mean"])
def test_exact_for_every_aggregation_and_mask(aggregation, mask):
    for normalizer in (None, 3.5) if aggregation != "token-sum" else (None,):
        inputs = make_inputs(5, 7, mask=mask, clip=0.3)
        assert_exact(inputs, aggregation, normalizer=normalizer)


@given(filled_shapes, layouts, dtypes, seeds, st.sampled_from([None, 0.2]))
def test_any_shape_layout_and_dtype(shape, layout, dtype, seed, clip):
    torch.manual_seed(seed)
    inputs = make_inputs(*shape, dtype, clip=clip)
    for name in ("values", "returns", "mask", *(["old_values"] if clip else [])):
        inputs[name] = in_layout(inputs[name], layout)
    assert_exact(inputs, "seq-mean-token-mean")


# value, return, old value, clip, loss: what one token costs and its gradient, by hand
BY_HAND = [
    (3.0, 1.0, None, None, "mse", 2.0, 2.0),
    (1.5, 1.0, None, None, "huber", 0.125, 0.5),
    (4.0, 1.0, None, None, "huber", 2.5, 1.0),
    (-2.0, 1.0, None, None, "huber", 2.5, -1.0),
    (2.0, 1.0, None, None, "huber", 0.5, 1.0),  # the corner
    (1.0, 0.0, 2.0, 0.5, "mse", 1.125, 0.0),  # held at 1.5, which is worse
    (1.0, 3.0, 0.0, 0.5, "mse", 3.125, 0.0),  # held at 0.5: max(2, 3.125)
    (1.0, 0.0, 0.0, 0.5, "mse", 0.5, 1.0),  # held at 0.5, which is better: the larger counts
    (1.0, 3.0, 0.9, 0.5, "mse", 2.0, -2.0),  # within the clip
    (1.0, 5.0, 0.0, 0.5, "huber", 4.0, 0.0),  # held at 0.5: max(3.5, 4)
]


@pytest.mark.parametrize(("value", "ret", "old", "clip", "loss", "cost", "slope"), BY_HAND)
def test_numbers_by_hand(value, ret, old, clip, loss, cost, slope):
    old = {} if old is None else {"old_values": torch.tensor([[old]]), "clip": clip}
    result, gradient = run(
        torch.tensor([[value]]),
        returns=torch.tensor([[ret]]),
        mask=torch.ones(1, 1),
        loss=loss,
        **old,
    )
    assert result.loss.item() == pytest.approx(cost)
    assert gradient.item() == pytest.approx(slope)
    assert result.metrics["clip_fraction"].item() == (clip is not None and slope == 0)


def test_metrics_by_hand():
    # errors 2 0 1 against returns 0 2 4: var(R - V) / var(R) = (2/3) / (8/3)
    result = fastrl.value_loss(
        torch.tensor([-2.0, 2.0, 3.0, math.nan]),
        torch.tensor([0.0, 2.0, 4.0, math.nan]),
        torch.tensor([1, 1, 1, 0]),
    )
    came = {name: value.item() for name, value in result.metrics.items()}
    expected = {"value_mean": 1, "return_mean": 2, "clip_fraction": 0, "explained_variance": 0.75}
    assert came == pytest.approx(expected)
    assert not any(value.requires_grad for value in result.metrics.values())


@pytest.mark.parametrize("constant", [2.0, 0.1])
def test_explained_variance_of_constant_returns_is_zero(constant):
    # the rounded mean of a hundred times 0.1 is another number
    returns = torch.full((10, 10), constant)
    result = fastrl.value_loss(torch.randn(10, 10), returns, torch.ones(10, 10))
    assert result.metrics["explained_variance"].item() == 0


def test_prompt_mean():
    inputs = make_inputs(4, 5)
    ids = torch.tensor([3, 1, 3, 1])
    result, _ = run(**inputs, aggregation="prompt-mean", group_ids=ids)
    order = torch.tensor([0, 2, 1, 3])
    sorted_inputs = {name: x[order] for name, x in inputs.items()}
    expected, _ = run(**sorted_inputs, aggregation="prompt-mean", group_size=2)
    torch.testing.assert_close(result.loss, expected.loss)
