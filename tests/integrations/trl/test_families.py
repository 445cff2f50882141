"""TRL's trainers with fastrl and without, for many types of models."""

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both, check_autocast
from tests.integrations.trl.runs import MODELS, make_model, save_model

needed("trl")

#: The models of the other trainers.
OTHERS = {
    "SFT": ("CohereConfig", "MixtralConfig"),
    "DPO": ("Gemma2Config", "PhiConfig", "MixtralConfig"),
    "CPO": ("Gemma2Config", "MixtralConfig"),
    "ORPO": ("Gemma2Config", "MixtralConfig"),
    "TPO": ("Gemma2Config", "MixtralConfig"),
    "Distillation": ("Gemma2Config", "CohereConfig", "GraniteConfig"),
}
ROWS = [pytest.param("GRPO", name, marks=pytest.mark.slow) for name in MODELS]
ROWS += [(kind, name) for kind, names in OTHERS.items() for name in names]
TWICE = {"max_steps": 2, "beta": 0.04, "num_iterations": 2, "epsilon": 0.05}
PAIRS = {"per_device_train_batch_size": 2}
#: Of those that log the loss of experts, which they do in accumulated steps.
OPTIONS = {"GRPO": TWICE, "SFT": PAIRS, "DPO": PAIRS}


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_steps_are_equal(kind, name, tmp_path):
    """Of GRPO also under autocast."""
    changes = dict(MODELS[name])
    if kind == "GRPO":  # which asks for the loss of experts itself; generation cannot compute it
        changes.pop("output_router_logits", None)
    path = save_model(tmp_path / "model", name, **changes)
    options = {"max_steps": 1, "learning_rate": 0.05, **OPTIONS.get(kind, {})}
    logged = "router_aux_loss_coef" in MODELS[name] and kind in OPTIONS
    options |= {"gradient_accumulation_steps": 2} if logged else {}
    handle, steps = both(path, kind, **options)
    for step in steps:
        assert step.get("aux_loss", 0) > 1 if logged else "aux_loss" not in step
    if kind == "GRPO":
        assert handle.fused
        check_autocast(path, beta=0.04)


@pytest.mark.parametrize("name", OTHERS["Distillation"])
def test_teachers(name, tiny_path):
    teacher = make_model(name, **MODELS[name])
    both(tiny_path, "Distillation", max_steps=2, beta=0.5, teacher_model=teacher)
