"""Losses of GRPO while callbacks change options, and of batches that are given."""

import inspect

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both, compare, make_trainer, scores
from tests.integrations.trl.runs import VOCABULARY, batch_of, on, operators, run

trl = needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

TWICE = {"num_iterations": 2, "epsilon": 0.05}
KL = {"beta": 0.04}


CHANGES = {
    "a loss type that TRL computes": {"loss_type": "vespo"},
    "a value that no objective has": {"delta": 1.01},
    "another clipping range": {"epsilon_low": 0.4},
    "a temperature, which TRL reads once": {"temperature": 0.3},
    "no KL": {"beta": 0.0},
    "sequences": {"importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_that_a_callback_changes(name, tiny_path):
    """Every step has the options of its time."""

    def prepared(trainer):
        def change(state, **_):
            for option, value in CHANGES[name].items() if state.global_step == 2 else ():
                setattr(trainer.args if option == "delta" else trainer, option, value)

        trainer.add_callback(on("on_step_end", change))

    assert both(tiny_path, prepared=prepared, max_steps=4, **KL, **TWICE)[0].fused


def test_a_trl_with_another_loss_stops_the_run(tiny_path, monkeypatch):
    """The first fused loss is compared with TRL's."""
    own = trl.GRPOTrainer._compute_loss

    def changed(self, model, inputs):
        return own(self, model, inputs) * 2 + 1

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", changed)
    trainer = make_trainer(tiny_path)
    use_fastrl(trainer)
    with pytest.raises(RuntimeError, match=r"this version of TRL computes .*fused=False"):
        trainer.train()


def with_logits(self, model, input_ids, attention_mask, logits_to_keep, **_):
    return model(input_ids=input_ids, attention_mask=attention_mask).logits, None, None


def without_model(self, *_, **__):
    return torch.zeros(1), None, None


@pytest.mark.parametrize("method", [with_logits, without_model])
def test_a_trl_that_calls_its_model_otherwise(method, tiny_path, monkeypatch):
    """Log-probabilities that are not fastrl's stop the run."""
    name = "_get_per_token_logps_and_entropies"
    signature = inspect.signature(getattr(trl.GRPOTrainer, name))
    monkeypatch.setattr(method, "__signature__", signature, raising=False)
    monkeypatch.setattr(trl.GRPOTrainer, name, method)
    trainer = make_trainer(tiny_path)
    use_fastrl(trainer)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(RuntimeError, match="calls its model 0 times"):
        scores(trainer, ids, torch.ones_like(ids), 1)


def batch(**more):
    """Four sequences, one of them without a valid token, some far off policy."""
    ids, mask = torch.randint(4, VOCABULARY, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[0, 0] = mask[1, 7:] = mask[2, 3:] = 0
    logprobs = -3 * torch.rand(4, 6) - 3
    options = {
        "advantages": [1.2, -0.7, 0.4, -1.1],
        "old_per_token_logps": logprobs,
        "ref_per_token_logps": logprobs + 0.3 * torch.randn(4, 6),
        "num_items_in_batch": torch.tensor(31),
        **more,
    }
    return batch_of(ids, 3, mask=mask, **options)


TOOLS = {"tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1]] + 3 * [[1] * 6])}
NO_LOGPROBS = {"sampling_per_token_logps": None}
BATCHES = {
    "tools, dapo": ({"loss_type": "dapo"}, TOOLS),
    "tools, bnpo": ({"loss_type": "bnpo"}, TOOLS),
    "tools, entropy bonus": ({"entropy_coef": 0.3}, TOOLS),
    "advantages of tokens": (
        {"loss_type": "dapo"},
        {"advantages": torch.linspace(-2, 2, 24).view(4, 6)},
    ),
    "on policy": ({"loss_type": "dapo", **KL}, {"old_per_token_logps": None}),
    # the factor is of the policy term alone
    **{
        f"vLLM's correction, {loss_type} {shape}": (
            {"loss_type": loss_type, "epsilon_high": 1.2, **KL},
            {
                "importance_sampling_ratio": torch.rand(shape) + 0.5,
                "sampling_per_token_logps": None,
            },
        )
        for loss_type in ("dapo", "grpo", "cispo", "sapo")
        for shape in ((4, 6), (4, 1))
    },
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, tiny_path):
    options, changes = BATCHES[name]
    trainer = make_trainer(tiny_path, **options)
    if "vLLM" in name:  # after construction; the batch has what vLLM would have added
        trainer.use_vllm = True
        assert trainer.vllm_importance_sampling_correction
    compare(trainer, batch(**changes), tolerance=1e-4)


#: options, the autocast under which the head is called, and how bfloat16 rounds
PRECISIONS = {
    "float32": ({}, None, 1e-4),
    "mixed": ({"bf16": True}, torch.bfloat16, 5e-2),
    "mixed, a head in float32": ({"bf16": True, "cast_lm_head_to_fp32": True}, None, 5e-2),
    "bfloat16, a head in float32": (
        {"cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"}},
        None,
        2e-2,
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions(name, tiny_path, monkeypatch):
    """On a GPU the head's GEMMs follow the autocast; a CPU multiplies in float32 all the same."""
    options, autocast, tolerance = PRECISIONS[name]
    seen = []

    def watched(function):
        def called(hidden, *arguments, **given):
            cast = torch.is_autocast_enabled("cpu")
            if hidden.numel() > 1:  # else it is the check of the backend
                seen.append(torch.get_autocast_dtype("cpu") if cast else None)
            return function(hidden, *arguments, **given)

        return called

    for home, called in [(fastrl, "linear_policy_loss"), *operators()]:
        monkeypatch.setattr(home, called, watched(getattr(home, called)))
    trainer = make_trainer(tiny_path, max_steps=1, **KL, **options)
    if "model_init_kwargs" in options:
        assert trainer.model.lm_head.weight.dtype == torch.float32
        assert trainer.model.model.norm.weight.dtype == torch.bfloat16
    compare(trainer, batch(), tolerance=tolerance)
    run(trainer, use_fastrl)
    assert len(seen) >= 3  # that loss, the reference's log-probabilities, and the loss of a step
    assert set(seen) == {autocast}
