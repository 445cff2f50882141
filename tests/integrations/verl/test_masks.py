"""Tokens with a mask of 0 are inert in verl's functions on fastrl, and an empty mask gives 0."""

import functools

import pytest
import torch

from fastrl.integrations.verl import masks
from tests.integrations.compared import close, outcome
from tests.integrations.verl.cases import (
    COUNTS,
    ESTIMATORS,
    LOSSES,
    MODES,
    OURS,
    batch,
    estimate,
    policy_loss,
    transcribed,
)


def of_policy(name, mode, data):
    config = transcribed(global_batch_info=COUNTS["local"], **LOSSES[name])
    loss, metrics, gradient = policy_loss(OURS, name, data, config, mode, data.weights)
    return [loss, gradient, *(torch.tensor(x) for x in metrics.values())]


def of_values(mode, data):
    rest = (data.advantages, data.old, data.mask, 0.5, mode)
    return outcome(lambda x: OURS.compute_value_loss(x, *rest), data.values)


def added_up(mode, data):
    return outcome(lambda x: OURS.agg_loss(x, data.mask, mode), data.values)


#: name -> function of a batch of nine responses
RUNS = {
    **{
        f"{name}, {mode}": functools.partial(of_policy, name, mode)
        for name in LOSSES
        for mode in ("token-mean", "seq-mean-token-mean")
    },
    **{f"value loss, {mode}": functools.partial(of_values, mode) for mode in MODES},
    **{f"agg_loss, {mode}": functools.partial(added_up, mode) for mode in MODES},
    **{name: functools.partial(estimate, OURS, name) for name in ESTIMATORS},
}
RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["bools", "fractions"])
@RUN
def test_masked_tokens_are_inert(run, kind, dtype):
    data, poisoned = batch(kind, dtype, B=9), batch(kind, dtype, B=9)
    data.rewards[data.mask == 0] = 0.0  # rewards of masked tokens count, as in verl, unless NaN
    for name in ("old", "log_prob", "advantages", "weights", "values", "rewards"):
        getattr(poisoned, name)[data.mask == 0] = float("nan")
    for a, b in zip(run(data), run(poisoned), strict=True):
        assert torch.equal(a, b)


@RUN
@pytest.mark.parametrize("readable", [True, False])
def test_an_empty_mask_gives_zero(run, readable, monkeypatch):
    monkeypatch.setattr(masks, "_on_the_host", lambda _: readable)
    data = batch("integers", B=9)
    data.mask = 0 * data.mask
    assert all((x == 0).all() for x in run(data))


@RUN
def test_a_mask_that_cannot_be_read_gives_the_same(run, monkeypatch):
    # as on a GPU, where the values of a mask are not read
    plain = run(batch("bools", B=9))
    monkeypatch.setattr(masks, "_on_the_host", lambda _: False)
    close(run(batch("integers", B=9)), plain)
