"""TRL's GRPOTrainer with fastrl and without, for many types of models."""

import math

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.runs import both, make_trainer, run, save_model

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: type of the configuration -> what it needs beyond `make_model`
FAMILIES = {
    "LlamaConfig": {},
    "MistralConfig": {},
    "Olmo2Config": {},
    "Qwen2Config": {},
    "Qwen3Config": {"tie_word_embeddings": True},
    "Gemma2Config": {"final_logit_softcapping": 3.0},
    "Gemma3TextConfig": {"final_logit_softcapping": 3.0},
    "CohereConfig": {"logit_scale": 0.25},
    "Cohere2Config": {"logit_scale": 0.25},
    "GraniteConfig": {"logits_scaling": 4.0},
    "Phi3Config": {},
    "GPTNeoXConfig": {},
    "GPT2Config": {},
    "Olmo3Config": {},
    "SmolLM3Config": {},
    "GemmaConfig": {},
    "Starcoder2Config": {},
    "OPTConfig": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "Glm4Config": {},
    "Gemma4TextConfig": {"final_logit_softcapping": 3.0},
    "HyperCLOVAXConfig": {"logits_scaling": 0.25},
}
EXPERTS = {
    "MixtralConfig": {"num_local_experts": 4},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GptOssConfig": {"num_local_experts": 4},
}
TWO_STEPS = {
    "max_steps": 2,
    "beta": 0.04,
    "num_iterations": 2,
    "epsilon": 0.05,
    "learning_rate": 0.05,
}
#: TRL rounds the logits to bfloat16 under autocast and fastrl does not: 2^-9 of logits of about 4,
#: hence about 1e-2 in a log-probability, as much relative in a gradient, and a token more or less
#: that is clipped.
BFLOAT16 = {"loss": 2e-2, "kl": 2e-2, "entropy": 1e-2, "aux_loss": 1e-2}


def check_under_autocast(path, **options):
    """A step under bfloat16 autocast is equal to rounding."""
    found = []
    for use in ((), (use_fastrl,)):
        trainer = make_trainer(path, bf16=True, beta=0.04, max_steps=1, **options)
        found.append(run(trainer, *use)[0][0])
    theirs, ours = found
    for name, tolerance in BFLOAT16.items():
        if name in theirs:
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), name
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    assert math.isfinite(ours["grad_norm"])
    assert ours["grad_norm"] > 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_steps_are_equal(kind, tmp_path):
    path = save_model(tmp_path / "model", kind, **FAMILIES[kind])
    assert both(path, output_dir=tmp_path, **TWO_STEPS)[0].fused
    check_under_autocast(path, output_dir=tmp_path)


@pytest.mark.parametrize("kind", EXPERTS)
def test_steps_of_a_mixture_of_experts_are_equal(kind, tmp_path):
    path = save_model(tmp_path / "model", kind, **EXPERTS[kind], router_aux_loss_coef=0.5)
    options = {"output_dir": tmp_path, "gradient_accumulation_steps": 2, **TWO_STEPS}
    handle, steps = both(path, **options)
    assert handle.fused
    assert all(step["aux_loss"] > 1 for step in steps)
    check_under_autocast(path, output_dir=tmp_path)
