"""TRL's GRPOTrainer with fastrl and without, for many types of models."""

import pytest

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both, check_autocast
from tests.integrations.trl.runs import save_model

needed("trl")

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
    "OPTConfig": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
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


@pytest.mark.parametrize("kind", FAMILIES)
def test_steps_are_equal(kind, tmp_path):
    path = save_model(tmp_path / "model", kind, **FAMILIES[kind])
    assert both(path, output_dir=tmp_path, **TWO_STEPS)[0].fused
    check_autocast(path, output_dir=tmp_path, beta=0.04)


@pytest.mark.parametrize("kind", EXPERTS)
def test_steps_of_a_mixture_of_experts_are_equal(kind, tmp_path):
    path = save_model(tmp_path / "model", kind, **EXPERTS[kind], router_aux_loss_coef=0.5)
    options = {"output_dir": tmp_path, "gradient_accumulation_steps": 2, **TWO_STEPS}
    handle, steps = both(path, **options)
    assert handle.fused
    assert all(step["aux_loss"] > 1 for step in steps)
    check_autocast(path, output_dir=tmp_path, beta=0.04)
