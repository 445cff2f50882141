"""Mask values other than 0 and 1 are factors in verl, and so in fastrl."""

import pytest
import torch

from fastrl.integrations import verl as ours
from fastrl.integrations.verl import masks as verl_masks
from fastrl.integrations.verl import policy_losses as verl_policy_losses
from tests.support.verl_cases import (
    FIELDS,
    GLOBAL,
    LOCAL,
    MODES,
    POLICY_LOSSES,
    batch,
    close,
    implementations,
    policy_loss,
    same_policy_loss,
    value_and_gradient,
)


@pytest.fixture(params=implementations(), ids=lambda found: found.name)
def theirs(request):
    return request.param


def weighted(kind="fractions", **options):
    """A batch with a weighted mask: one response is empty, one has a sum below 1."""
    data = batch(**options)
    factor = {"fractions": torch.rand(data.mask.shape) + 0.1, "doubles": torch.tensor(2)}[kind]
    data.mask = data.mask * factor
    if kind == "fractions":
        data.mask[3] /= 2 * data.mask[3].sum()
    return data


MASKS = pytest.mark.parametrize("kind", ["fractions", "doubles"])


@MASKS
@pytest.mark.parametrize("name", ["outcome", "vectorized_outcome"])
@pytest.mark.parametrize("by_std", [True, False])
def test_group_advantages(theirs, kind, name, by_std):
    numpy = pytest.importorskip("numpy")
    data = weighted(kind)
    index = numpy.array(["b", "a", "b", "alone", "a", "b"], dtype=object)
    arguments = (data.rewards, data.mask, index, 1e-6, by_std)
    function = f"compute_grpo_{name}_advantage"
    a, b = (getattr(n, function)(*arguments) for n in (ours, theirs))
    close(a[0], b[0])
    close(a[1], b[1])
    assert (a[0][data.mask == 0] == 0).all()


def test_a_half_masked_token_has_half_the_advantage():
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.5], [0.25, 0.0]])
    advantages, _ = ours.compute_grpo_outcome_advantage(
        rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[0.5, 0.25], [-0.125, 0.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.0, 0.5)])
def test_gae(theirs, gamma, lam):
    data = weighted()
    arguments = (data.rewards, data.values, data.mask, gamma, lam)
    a, b = (n.compute_gae_advantage_return(*arguments) for n in (ours, theirs))
    close(a[0], b[0], data.mask > 0)
    close(a[1], b[1], data.mask > 0)
    assert (a[0][data.mask == 0] == 0).all()
    assert (a[1][data.mask == 0] == 0).all()


@MASKS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
def test_aggregation_and_value_loss(theirs, kind, mode, info):
    data = weighted(kind)
    old = data.values + torch.randn(6, 9)

    def added_up(n):
        return lambda x: n.agg_loss(x, data.mask, mode, **info)

    def value_loss(n):
        return lambda x: n.compute_value_loss(x, data.rewards, old, data.mask, 0.5, mode, **info)

    for function in (added_up, value_loss):
        a, b = (value_and_gradient(function(n), data.values) for n in (ours, theirs))
        close(a[0], b[0])
        close(a[1], b[1])
        for x, y in zip(a[2], b[2], strict=True):
            close(x, y)


@MASKS
@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
def test_policy_losses(theirs, kind, name, mode, info):
    data = weighted(kind)
    same_policy_loss(name, theirs, data, mode, info, data.weights)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_advantages_of_zero_and_no_weights(theirs, name):
    data = weighted()
    data.advantages[:, ::2] = 0.0
    same_policy_loss(name, theirs, data, "token-mean", LOCAL)


def test_a_sequence_ratio_saturates_as_for_plain_masks(theirs):
    data = weighted(seed=2, spread=2.0)
    data.log_prob[0] = data.old[0] + 15.0  # above gspo's bound of 10
    data.advantages[0] = -data.advantages[0].abs()
    same_policy_loss("gspo", theirs, data, "token-mean", LOCAL)


def test_a_mask_of_twos_doubles_the_value_loss_also_at_its_bounds():
    values, zero = torch.tensor([[0.5, -0.5, 0.0, 2.0]]), torch.zeros(1, 4)
    once, twice = (
        value_and_gradient(
            lambda x, m=m: ours.compute_value_loss(
                x, zero + 1, zero, torch.full((1, 4), m), 0.5, "token-sum"
            ),
            values,
        )
        for m in (1, 2)
    )
    assert torch.equal(twice[0], 2 * once[0])
    assert torch.equal(twice[1], 2 * once[1])
    close(twice[2][0], once[2][0])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_tokens_are_inert(name):
    data, poisoned = weighted(), weighted()
    poisoned.mask = data.mask
    for field in ("old", "log_prob", "advantages", "weights"):
        getattr(poisoned, field)[data.mask == 0] = float("nan")
    a, b = (
        policy_loss(
            verl_policy_losses, name, d, "token-mean", LOCAL, d.weights, **FIELDS.get(name, {})
        )
        for d in (data, poisoned)
    )
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert a[2] == b[2]


def test_masked_values_are_inert():
    data = weighted()
    poisoned = data.values.clone()
    poisoned[data.mask == 0] = float("nan")
    a, b = (
        value_and_gradient(
            lambda x: ours.compute_value_loss(x, data.rewards, data.values, data.mask, 0.5), values
        )
        for values in (data.values, poisoned)
    )
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_cannot_be_read_gives_the_same(name, mode, monkeypatch):
    # as on a GPU, where the values of a mask are not read
    data = batch()
    plain = policy_loss(
        verl_policy_losses, name, data, mode, LOCAL, data.weights, **FIELDS.get(name, {})
    )
    monkeypatch.setattr(verl_masks, "_on_the_host", lambda _: False)
    data.mask = data.mask.long()
    unread = policy_loss(
        verl_policy_losses, name, data, mode, LOCAL, data.weights, **FIELDS.get(name, {})
    )
    close(unread[0], plain[0])
    close(unread[1], plain[1])
    assert unread[2] == pytest.approx(plain[2], abs=1e-6)
    data.mask[:] = 0
    loss, gradient, metrics = policy_loss(
        verl_policy_losses, name, data, mode, LOCAL, **FIELDS.get(name, {})
    )
    assert loss == 0
    assert gradient.abs().max() == 0
    assert set(metrics.values()) <= {0.0}
