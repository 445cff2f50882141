"""TRL's trainers log the same numbers at every step with fastrl and without."""

import inspect

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.runs import both, make_trainer

trl = needed("trl")
transformers = needed("transformers")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TWICE = {"num_iterations": 2, "epsilon": 0.05}
CISPO = {"loss_type": "cispo", **TWICE, "epsilon_high": 1.02}
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", **TWICE}
#: Every loss on new and old completions, with KL and without, in one and several micro-batches.
LOSSES = {
    "grpo": {"beta": 0.04, "gradient_accumulation_steps": 4},
    "grpo, twice": {"loss_type": "grpo", **TWICE},
    "bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 4, **TWICE},
    "bnpo and KL": {"loss_type": "bnpo", "beta": 0.04, **TWICE},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.04, "gradient_accumulation_steps": 2, **TWICE},
    "dapo": {"loss_type": "dapo"},
    "dapo, twice": {"loss_type": "dapo", "gradient_accumulation_steps": 4, **TWICE},
    "cispo": {**CISPO, "gradient_accumulation_steps": 4},
    "cispo and KL": {**CISPO, "beta": 0.04},
    "sapo": {"loss_type": "sapo", "beta": 0.04, "gradient_accumulation_steps": 2, **TWICE},
    "gspo": GSPO,
    "gspo and KL": {**GSPO, "beta": 0.04, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, tiny_path, tmp_path):
    options = LOSSES[name]
    handle, steps = both(tiny_path, output_dir=tmp_path, **options)
    assert handle.fused
    clipped = [step.get("clip_ratio/region_mean", step.get("cispo_clip_ratio")) for step in steps]
    if options.get("num_iterations") == 2 and name != "sapo":
        assert max(clipped) > 0
    two_policies = "num_iterations" in options or options.get("beta", 0) > 0
    assert (METRIC in steps[0]) == two_policies


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_rloo(beta, tiny_path, tmp_path):
    options = {"num_iterations": 2, "learning_rate": 0.02, "epsilon": 0.1}
    assert both(tiny_path, "RLOO", output_dir=tmp_path, beta=beta, **options)[0].fused


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 3.5, "entropy_coef_delta": 0.02}
OTHERS = {
    "luspo": ({"loss_type": "luspo"}, True),
    "delta": ({"delta": 1.1}, True),
    "a temperature": ({"temperature": 0.7}, True),
    "masked truncation": ({"mask_truncated_completions": True, "max_completion_length": 9}, True),
    "vespo": ({"loss_type": "vespo"}, False),
    "a low cispo cap": ({"loss_type": "cispo", "epsilon_high": 0.9}, True),
    "a negative beta": ({"beta": -0.01}, False),
    "plain KL": ({"use_bias_correction_kl": False}, True),
    "off-policy mask": ({"off_policy_mask_threshold": 0.01}, True),
    "top entropy": ({"top_entropy_quantile": 0.4}, True),
    "top entropy and a bonus": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.02}, False),
    "GSPO and an off-policy mask": (
        {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.01},
        True,
    ),
    "entropy bonus": ({"entropy_coef": 0.02, "gradient_accumulation_steps": 2}, True),
    "adaptive bonus": ({**ADAPTIVE, "gradient_accumulation_steps": 2, "max_steps": 10}, True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options(name, tiny_path, tmp_path):
    options, fused = OTHERS[name]
    options = {"loss_type": "dapo", "beta": 0.04, **TWICE, **options}
    handle, _ = both(tiny_path, output_dir=tmp_path, **options)
    assert handle.fused == fused
    assert (handle.reason is None) == fused


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
def test_options_that_a_callback_changes(name, tiny_path, tmp_path):
    def prepared(trainer):
        def change():
            for option, value in CHANGES[name].items():
                setattr(trainer.args if option == "delta" else trainer, option, value)

        trainer.add_callback(After(change))

    options = {"output_dir": tmp_path, "max_steps": 4, "beta": 0.04, **TWICE}
    assert both(tiny_path, prepared=prepared, **options)[0].fused


def rollout(prompts, trainer):
    """Completions as an engine would return them, whose log-probabilities are not the policy's."""
    completions = [[4 + (7 * i + 5 * j) % 50 for j in range(3 + i)] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-3.5 for _ in ids] for ids in completions],
    }


@pytest.mark.parametrize("times", [1, 2])
def test_the_off_policy_mask_measures_the_distance_from_the_engine(times, tiny_path, tmp_path):
    """TRL sends old log-probabilities with two iterations, and none with one."""
    options = {"num_iterations": times, "off_policy_mask_threshold": 0.2, "beta": 0.04}
    handle, _ = both(tiny_path, output_dir=tmp_path, rollout_func=rollout, epsilon=0.05, **options)
    assert handle.fused


@pytest.mark.parametrize("adapter", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_prompt_learning(adapter, beta, tiny_path, tmp_path):
    peft = needed("peft")
    torch.manual_seed(1)
    config = getattr(peft, adapter)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    options = {"peft_config": config, "learning_rate": 0.05, "beta": beta, **TWICE}
    assert both(tiny_path, output_dir=tmp_path, **options)[0].fused


@pytest.mark.parametrize("fused", [None, False])
def test_evaluation(fused, tiny_path, tmp_path):
    found = []
    for use in (False, True):
        trainer = make_trainer(tiny_path, output_dir=tmp_path, loss_type="dapo", beta=0.04)
        if use:
            use_fastrl(trainer, fused=fused)
        trainer.eval_dataset = trainer.train_dataset
        torch.manual_seed(0)
        values = trainer.evaluate()
        found.append({k: v for k, v in values.items() if "runtime" not in k and "per_sec" not in k})
    assert found[1].pop(f"eval_{METRIC}", 0) == 0
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_a_trl_with_another_loss_stops_the_run(tiny_path, tmp_path, monkeypatch):
    own = trl.GRPOTrainer._compute_loss

    def changed(self, model, inputs):
        return own(self, model, inputs) * 2 + 1

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", changed)
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    use_fastrl(trainer)
    with pytest.raises(RuntimeError, match=r"this version of TRL computes .*fused=False"):
        trainer.train()


def with_logits(self, model, input_ids, attention_mask, logits_to_keep, **_):
    return model(input_ids=input_ids, attention_mask=attention_mask).logits, None, None


def without_model(self, *_, **__):
    return torch.zeros(1), None, None


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (with_logits, "calls its model 0 times"),
        (without_model, "calls its model 0 times"),
    ],
)
def test_a_trl_that_calls_its_model_otherwise(scores, sentence, tiny_path, tmp_path, monkeypatch):
    name = "_get_per_token_logps_and_entropies"
    signature = inspect.signature(getattr(trl.GRPOTrainer, name))
    monkeypatch.setattr(scores, "__signature__", signature, raising=False)
    monkeypatch.setattr(trl.GRPOTrainer, name, scores)
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    use_fastrl(trainer)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(RuntimeError, match=sentence):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 1)
