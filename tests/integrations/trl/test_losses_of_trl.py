"""Every loss of GRPO: in runs, while callbacks change options, and of batches that are given."""

import inspect

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both, compare, make_trainer, scores
from tests.integrations.trl.runs import VOCABULARY, batch_of, operators, run

trl, transformers = needed("trl"), needed("transformers")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402


def rollout(prompts, trainer):
    """Completions as an engine would return them, whose log-probabilities are not the policy's."""
    completions = [[4 + (7 * i + 5 * j) % 50 for j in range(3 + i)] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-3.5 for _ in ids] for ids in completions],
    }


TWICE = {"num_iterations": 2, "epsilon": 0.05}
IN_2 = {"gradient_accumulation_steps": 2}
IN_4 = {"gradient_accumulation_steps": 4}
KL = {"beta": 0.04}
CISPO = {"loss_type": "cispo", **TWICE, "epsilon_high": 1.02}
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", **TWICE}
OTHER = {"loss_type": "dapo", **KL, **TWICE}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 3.5, "entropy_coef_delta": 0.02}
OF_ENGINE = {"rollout_func": rollout, "off_policy_mask_threshold": 0.2, "epsilon": 0.05, **KL}
MASKED = {"off_policy_mask_threshold": 0.01}
#: Every loss on new and old completions, with KL and without, in one and several micro-batches.
LOSSES = {
    "grpo": {**KL, **IN_4},
    "grpo, twice": {"loss_type": "grpo", **TWICE},
    "bnpo": {"loss_type": "bnpo", **IN_4, **TWICE},
    "bnpo and KL": {"loss_type": "bnpo", **KL, **TWICE},
    "dr_grpo": {"loss_type": "dr_grpo", **KL, **IN_2, **TWICE},
    "dapo": {"loss_type": "dapo"},
    "dapo, twice": {"loss_type": "dapo", **IN_4, **TWICE},
    "cispo": {**CISPO, **IN_4},
    "cispo and KL": {**CISPO, **KL},
    "gspo": GSPO,
    "gspo and KL": {**GSPO, **KL, **IN_2},
}
#: Those that may clip nothing.
UNCLIPPED = {
    "sapo": {"loss_type": "sapo", **KL, **IN_2, **TWICE},
    "luspo": {**OTHER, "loss_type": "luspo"},
    "delta": {**OTHER, "delta": 1.1},
    "a temperature": {**OTHER, "temperature": 0.7},
    "truncation": {**OTHER, "mask_truncated_completions": True, "max_completion_length": 9},
    "a low cispo cap": {**OTHER, "loss_type": "cispo", "epsilon_high": 0.9},
    "plain KL": {**OTHER, "use_bias_correction_kl": False},
    "off-policy mask": {**OTHER, **MASKED},
    "GSPO, off-policy mask": {**OTHER, **MASKED, "importance_sampling_level": "sequence"},
    "top entropy": {**OTHER, "top_entropy_quantile": 0.4},
    "entropy bonus": {**OTHER, "entropy_coef": 0.02, **IN_2},
    "adaptive bonus": {**OTHER, **ADAPTIVE, **IN_2, "max_steps": 10},
    # the mask measures the distance from the engine; TRL sends old log-probabilities the second
    # time alone
    "an engine": OF_ENGINE,
    "an engine, twice": {**OF_ENGINE, "num_iterations": 2},
}
#: Those that TRL computes, from log-probabilities.
UNFUSED = {
    "vespo": {**OTHER, "loss_type": "vespo"},
    "a negative beta": {**OTHER, "beta": -0.01},
    "top entropy and a bonus": {**OTHER, "top_entropy_quantile": 0.4, "entropy_coef": 0.02},
}


@pytest.mark.parametrize("name", [*LOSSES, *UNCLIPPED, *UNFUSED])
def test_steps_are_equal(name, tiny_path):
    """Two policies have ratios, whose saturation is logged; some ratios are clipped."""
    options = {**LOSSES, **UNCLIPPED, **UNFUSED}[name]
    handle, steps = both(tiny_path, **options)
    assert handle.fused == (handle.reason is None) == (name not in UNFUSED)
    two_policies = options.get("num_iterations") == 2 or options.get("beta", 0) > 0
    assert (METRIC in steps[0]) == (two_policies and handle.fused)
    if options.get("num_iterations") == 2 and name in LOSSES:
        metrics = ("clip_ratio/region_mean", "cispo_clip_ratio")
        assert max(step.get(metric, 0) for step in steps for metric in metrics) > 0


class After(transformers.TrainerCallback):
    """Calls a function when two steps are done."""

    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            self.function()


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
        def change():
            for option, value in CHANGES[name].items():
                setattr(trainer.args if option == "delta" else trainer, option, value)

        trainer.add_callback(After(change))

    options = {"max_steps": 4, **KL, **TWICE}
    assert both(tiny_path, prepared=prepared, **options)[0].fused


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


ADAPTERS = {
    "LoRA on the backbone": {"target_modules": ["q_proj", "v_proj"]},
    "a copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("fused", [True, False])
def test_adapters(adapter, fused, tiny_path):
    """The policy has an adapter; the reference is the same model with its adapter off."""
    config = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, **ADAPTERS[adapter]}
    trainer = make_trainer(tiny_path, peft_config=config, **KL)
    inputs = batch()
    _, _, grads = compare(trainer, inputs, use={"fused": fused}, tolerance=1e-4)
    assert any("lora" in name for name in grads)

    found = []
    for use in (False, True):
        if use:
            use_fastrl(trainer)
        with trainer.model.disable_adapter():
            found.append(scores(trainer, inputs["completion_ids"], inputs["completion_mask"], 5))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (4, 1)])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "sapo"])
def test_the_vllm_correction_applies_to_the_policy_term(shape, loss_type, tiny_path):
    trainer = make_trainer(tiny_path, loss_type=loss_type, epsilon_high=1.2, **KL)
    trainer.use_vllm = True  # after construction; the batch holds what vLLM would have added
    ratio = torch.rand(shape) + 0.5
    assert trainer.vllm_importance_sampling_correction
    more = {"importance_sampling_ratio": ratio, "sampling_per_token_logps": None}
    compare(trainer, batch(**more), tolerance=1e-4)


TOOLS = {"tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1]] + 3 * [[1] * 6])}
BATCHES = {
    "tools, dapo": ({"loss_type": "dapo"}, TOOLS),
    "tools, bnpo": ({"loss_type": "bnpo"}, TOOLS),
    "tools, entropy bonus": ({"entropy_coef": 0.3}, TOOLS),
    "advantages of tokens": (
        {"loss_type": "dapo"},
        {"advantages": torch.linspace(-2, 2, 24).view(4, 6)},
    ),
    "on policy": ({"loss_type": "dapo", **KL}, {"old_per_token_logps": None}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, tiny_path):
    options, changes = BATCHES[name]
    trainer = make_trainer(tiny_path, **options)
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
