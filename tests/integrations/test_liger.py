"""Liger's fused GRPO loss on fastrl equals its formulas and, where it is installed, Liger."""

import types
import warnings

import pytest
import torch

from fastrl.integrations import liger as ours
from tests.integrations import compared
from tests.integrations.compared import (
    assert_same_parameters,
    close,
    each,
    equal,
    implementations,
)
from tests.integrations.liger_formulas import NO_SEQUENCES, SEQUENCES, Transcription

HOME = "liger_kernel.chunked_loss"
NAME = "LigerFusedLinearGRPOLoss"


IMPLEMENTATIONS = implementations(Transcription, HOME, NAME)
theirs = each(IMPLEMENTATIONS)


def batch(seed=0, B=4, T=7, H=8, V=23):
    torch.manual_seed(seed)
    mask = (torch.rand(B, T) < 0.8).float()
    mask[:, 0] = 1
    mask[1] = 0  # a completion without a token
    hidden, weight = torch.randn(B, T, H), 0.3 * torch.randn(V, H)
    ids = torch.randint(V, (B, T))
    near = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return types.SimpleNamespace(
        tensors=(hidden, weight),
        bias=0.1 * torch.randn(V),
        ids=ids,
        mask=mask,
        advantages=torch.tensor([1.5, -0.5, -1.0, 0.7]),
        old=near + 0.3 * torch.randn(B, T),
        ref=near + 0.3 * torch.randn(B, T),
        ratio=torch.rand(B, T) * 2,
        ref_tensors=(hidden + 0.1 * torch.randn(B, T, H), weight + 0.02 * torch.randn(V, H)),
    )


def outcome(loss_function, data, *, bias=None, **arguments):
    """Loss, metrics and gradients."""

    def run(hidden, weight, bias=None):
        batch = (data.ids, data.mask, data.advantages)
        loss, metrics = loss_function(hidden, weight, *batch, bias=bias, **arguments)
        return loss, *metrics

    return compared.outcome(run, *data.tensors, *([] if bias is None else [bias]))


def compare(theirs, options, data, **arguments):
    kinds = (ours.LigerFusedLinearGRPOLoss, theirs)
    close(
        *(outcome(kind(compiled=False, **options), data, **arguments) for kind in kinds), 1e-4, 1e-5
    )


LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"max_completion_length": 11},
    "dapo": {"epsilon_low": 0.1, "epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.2},
    "sapo": {"sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3},
    "vespo": {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0},
}


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("on_policy", [False, True])
def test_token_level(theirs, loss_type, beta, on_policy):
    data = batch()
    options = {"loss_type": loss_type, "beta": beta, "temperature": 0.8, **LOSSES[loss_type]}
    old = {} if on_policy else {"old_per_token_logps": data.old}
    compare(theirs, options, data, ref_per_token_logps=data.ref, bias=data.bias, **old)


SEQUENCE = {"importance_sampling_level": "sequence"}
BY_SEQUENCE = [(name, beta) for name in ("grpo", "bnpo", "dr_grpo", "dapo") for beta in (0.0, 0.04)]


@pytest.mark.parametrize(("loss_type", "beta"), [*BY_SEQUENCE, ("luspo", 0.0)])
def test_sequence_level(theirs, loss_type, beta):
    data = batch()
    options = {"loss_type": loss_type, "beta": beta, "max_completion_length": 11, **SEQUENCE}
    options |= {"epsilon_low": 0.05, "epsilon_high": 0.05}
    given = {"ref_per_token_logps": data.ref, "old_per_token_logps": data.old}
    compare(theirs, options, data, bias=data.bias, **given)


#: options, and what else is given of a batch
OPTIONS = {
    "delta": ({"delta": 1.25}, {}),
    "bias-corrected KL": ({"use_bias_correction_kl": True}, {}),
    "bias-corrected KL of sequences": ({"use_bias_correction_kl": True, **SEQUENCE}, {}),
    "cispo capped below 1": ({"loss_type": "cispo"}, {}),
    "items in batch": ({}, {"num_items_in_batch": lambda data: 90}),
    "items in batch, a tensor": (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"num_items_in_batch": lambda data: torch.tensor(90)},
    ),
    "rollout weights": ({}, {"vllm_is_ratio": lambda data: data.ratio}),
    "rollout weights of sequences": (
        {"loss_type": "grpo"},
        {"vllm_is_ratio": lambda data: data.ratio[:, :1]},
    ),
    "rollout weights of sequences, [B]": (
        {"loss_type": "grpo"},
        {"vllm_is_ratio": lambda data: data.ratio[:, 0]},
    ),
    "rollout weights of vespo": (
        {"loss_type": "vespo"},
        # Liger also adds those of masked tokens; trainers set them to 1
        {"vllm_is_ratio": lambda data: data.ratio.where(data.mask > 0, 1.0)},
    ),
    "items in batch of vespo": ({"loss_type": "vespo"}, {"num_items_in_batch": lambda data: 90}),
    "no reference": ({"use_ref_model": False}, {}),
    "reference from hidden states": (
        {},
        {
            "ref_per_token_logps": lambda data: None,
            "old_per_token_logps": lambda data: None,
            "ref_input": lambda data: data.ref_tensors[0],
            "ref_weight": lambda data: data.ref_tensors[1],
        },
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(theirs, option):
    data = batch(seed=1)
    options, more = OPTIONS[option]
    arguments = {"ref_per_token_logps": data.ref, "old_per_token_logps": data.old}
    arguments |= {name: value(data) for name, value in more.items()}
    compare(theirs, options, data, **arguments)


@pytest.mark.parametrize("items", [None, 90])
def test_tokens_are_counted_over_all_ranks(items, monkeypatch):
    data = batch()
    distributed = {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 4,
        "all_reduce": lambda tokens: tokens.mul_(5),  # as if the other three had four times as many
    }
    alone = ours.LigerFusedLinearGRPOLoss(beta=0.0)
    expected, _ = alone(*data.tensors, data.ids, data.mask, data.advantages)
    for name, function in distributed.items():
        monkeypatch.setattr(torch.distributed, name, function)
    found, _ = alone(*data.tensors, data.ids, data.mask, data.advantages, num_items_in_batch=items)
    tokens = data.mask.sum()
    share = (5 * tokens if items is None else items) / 4
    torch.testing.assert_close(found, expected * tokens / share)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_masked_tokens_are_inert(loss_type):
    data, poisoned = batch(), batch()
    for x in (poisoned.old, poisoned.ref, poisoned.ratio, poisoned.tensors[0]):
        x[poisoned.mask == 0] = float("nan")
    loss_function = ours.LigerFusedLinearGRPOLoss(loss_type=loss_type)
    a, b = (
        outcome(
            loss_function,
            d,
            ref_per_token_logps=d.ref,
            old_per_token_logps=d.old,
            vllm_is_ratio=d.ratio,
        )
        for d in (data, poisoned)
    )
    equal(a, b)


@pytest.mark.parametrize("loss_type", NO_SEQUENCES)
def test_sequence_level_losses_that_liger_lacks_are_refused_with_its_message(theirs, loss_type):
    data, options = batch(), {"loss_type": loss_type, "importance_sampling_level": "sequence"}
    with pytest.raises(ValueError, match=SEQUENCES) as own:
        outcome(theirs(compiled=False, **options), data, ref_per_token_logps=data.ref)
    with pytest.raises(type(own.value), match=SEQUENCES) as found:
        ours.LigerFusedLinearGRPOLoss(**options)
    assert "importance_sampling_level must be 'token', got 'sequence'" in str(found.value)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_reference_given_twice_gives_a_warning(theirs, beta):
    data = batch()
    given = dict(zip(("ref_input", "ref_weight"), data.ref_tensors, strict=True))
    options = {"beta": beta, "compiled": False}
    found = []
    for kind in (ours.LigerFusedLinearGRPOLoss, theirs):
        with pytest.warns(UserWarning, match="Using ref_per_token_logps") as caught:
            found.append(outcome(kind(**options), data, ref_per_token_logps=data.ref, **given))
        assert len(caught) == 1
    close(*found, 1e-4, 1e-5)
    loss_function = ours.LigerFusedLinearGRPOLoss(**options)
    without = ours.LigerFusedLinearGRPOLoss(use_ref_model=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = outcome(loss_function, data, ref_per_token_logps=data.ref)
        outcome(without, data, ref_per_token_logps=data.ref, **given)  # as in Liger
    equal(found[0], once)


def test_with_as_many_sequences_as_tokens_a_ratio_is_per_sequence():
    data = batch(T=4)
    options = {"beta": 0.0, "loss_type": "grpo"}
    by_sequence, spread = (
        outcome(ours.LigerFusedLinearGRPOLoss(**options), data, vllm_is_ratio=ratio)
        for ratio in (data.ratio[:, 0], data.ratio[:, :1].expand(4, 4))
    )
    equal(by_sequence, spread)


@pytest.mark.skipif("installed" not in IMPLEMENTATIONS, reason="needs liger-kernel itself")
def test_the_parameters_are_those_of_liger():
    own = IMPLEMENTATIONS["installed"]
    assert_same_parameters(ours.LigerFusedLinearGRPOLoss, own, "__init__", "forward")
