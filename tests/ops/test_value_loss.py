"""The value loss: mean squared error and Huber, with and without the clip of PPO."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from fastrl.contract import AGGREGATIONS
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    POISONS,
    cu_seqlens,
    dtypes,
    filled_shapes,
    in_layout,
    layouts,
    make_mask,
    packed,
    seeds,
)


def exact_value_loss(values, returns, mask, weights, old_values=None, clip=None, loss="mse"):
    """Loss, gradient and share of clipped tokens, token by token in float64."""

    def error(v, r):
        if loss == "mse" or abs(v - r) <= 1:
            return (v - r) ** 2 / 2, v - r
        return abs(v - r) - 0.5, math.copysign(1.0, v - r)

    total, gradient, clipped = 0.0, torch.zeros_like(values, dtype=torch.float64), 0
    for b, t in mask.nonzero().tolist():
        v, r = values[b, t].item(), returns[b, t].item()
        value, slope = error(v, r)
        if clip is not None:
            old = old_values[b, t].item()
            held = min(max(v, old - clip), old + clip)
            other, _ = error(held, r)
            if other > value:
                value, slope, clipped = other, 0.0, clipped + 1
        total += weights[b, t].item() * value
        gradient[b, t] = weights[b, t].item() * slope
    return torch.tensor(total, dtype=torch.float64), gradient, clipped / max(int(mask.sum()), 1)


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
    weights = fastrl.token_weights(
        inputs["mask"].double(), aggregation=aggregation, normalizer=options.get("normalizer")
    ).double()
    truth_options = {name: inputs.get(name) for name in ("old_values", "clip")}
    exact, slope, share = exact_value_loss(
        *(inputs[name].double() for name in ("values", "returns")),
        inputs["mask"],
        weights,
        **truth_options,
        loss=options.get("loss", "mse"),
    )
    # the weights that the truth took are float32
    single = 4 * torch.finfo(torch.float32).eps
    assert_within_budget(result.loss, exact, size=1 + exact, atol=single * float(1 + exact))
    assert_within_budget(gradient, slope, ulps=1, atol=single * float(1 + slope.abs().amax()))
    assert gradient.dtype == inputs["values"].dtype
    assert result.metrics["clip_fraction"].item() == pytest.approx(share)


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


def test_a_broken_old_value_breaks_loss_and_gradient():
    values = torch.tensor([0.0, 1.0], requires_grad=True)
    old = torch.tensor([math.nan, 1.0])
    loss = fastrl.value_loss(values, torch.ones(2), torch.ones(2), old_values=old, clip=0.2).loss
    loss.backward()
    assert loss.isnan()
    assert values.grad.isnan().tolist() == [True, False]


@pytest.mark.parametrize("constant", [2.0, 0.1])
def test_explained_variance_of_constant_returns_is_zero(constant):
    # the rounded mean of a hundred times 0.1 is another number
    returns = torch.full((10, 10), constant)
    result = fastrl.value_loss(torch.randn(10, 10), returns, torch.ones(10, 10))
    assert result.metrics["explained_variance"].item() == 0


@pytest.mark.parametrize("poison", POISONS, ids=str)
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_values_at_masked_tokens_change_no_bit(loss, poison):
    inputs = make_inputs(4, 6, clip=0.2)
    clean, gradient = run(**inputs, loss=loss)
    for name in ("values", "returns", "old_values"):
        inputs[name] = inputs[name].masked_fill(~inputs["mask"], poison)
    dirty, same = run(**inputs, loss=loss)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(gradient, same)
    assert (same[~inputs["mask"]] == 0).all()
    assert all(torch.equal(clean.metrics[name], dirty.metrics[name]) for name in clean.metrics)


@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if name != "prompt-mean"])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_an_all_masked_batch_has_loss_and_gradient_zero(shape, aggregation):
    if aggregation == "seq-mean-token-sum-norm" and shape[1] == 0:
        pytest.skip("a width of 0 is no length to divide by")
    bad = torch.full(shape, math.nan)
    result, gradient = run(
        bad,
        returns=bad,
        mask=torch.zeros(shape),
        old_values=bad,
        clip=0.1,
        aggregation=aggregation,
    )
    assert result.loss.item() == 0
    assert (gradient == 0).all()
    assert all(value.item() == 0 for value in result.metrics.values())


def test_packed_values_give_the_same_as_padded_ones():
    lengths = [3, 0, 5, 1]
    inputs = make_inputs(4, 5, clip=0.2)
    inputs["mask"] &= torch.arange(5) < torch.tensor(lengths)[:, None]
    padded, gradient = run(**inputs, aggregation="seq-mean-token-mean")
    flat = {name: packed(x, lengths) if torch.is_tensor(x) else x for name, x in inputs.items()}
    result, same = run(**flat, aggregation="seq-mean-token-mean", cu_seqlens=cu_seqlens(lengths))
    torch.testing.assert_close(result.loss, padded.loss)
    assert torch.equal(same, packed(gradient, lengths))


def test_prompt_mean():
    inputs = make_inputs(4, 5)
    ids = torch.tensor([3, 1, 3, 1])
    result, _ = run(**inputs, aggregation="prompt-mean", group_ids=ids)
    order = torch.tensor([0, 2, 1, 3])
    sorted_inputs = {name: x[order] for name, x in inputs.items()}
    expected, _ = run(**sorted_inputs, aggregation="prompt-mean", group_size=2)
    torch.testing.assert_close(result.loss, expected.loss)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_gradcheck(loss, clip):
    inputs = make_inputs(3, 4, torch.float64, clip=clip)
    values = inputs.pop("values").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: fastrl.value_loss(v, **inputs, loss=loss).loss, values
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_the_loss_is_the_same(mode):
    inputs = make_inputs(3, 4, clip=0.2)
    expected, _ = run(**inputs)
    with mode():
        result = fastrl.value_loss(**inputs)
    assert torch.equal(result.loss, expected.loss)


def test_the_gradient_flows_to_the_values_alone():
    inputs = make_inputs(3, 4, clip=0.2)
    for name in ("returns", "old_values"):
        inputs[name].requires_grad_()
    run(**inputs)
    assert inputs["returns"].grad is None
    assert inputs["old_values"].grad is None
