"""Log-probabilities from the LM head equal the ones from the model's logits."""

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.runs import VOCABULARY, make_model

transformers = needed("transformers")
from fastrl.integrations.transformers import last_hidden_states, lm_head  # noqa: E402

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3 tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3TextConfig", {"final_logit_softcapping": 20.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.0625}),
    "granite": ("GraniteConfig", {"logits_scaling": 16.0}),
    "llama4 without images": ("Llama4TextConfig", EXPERTS),
}


def tiny(name):
    kind, changes = MODELS[name]
    return make_model(kind, **changes)


def through_the_head(model, input_ids, **options):
    hidden = last_hidden_states(model, input_ids=input_ids)[:, :-1]
    head = lm_head(model).arguments()
    return fastrl.linear_token_logprobs(hidden, token_ids=input_ids[:, 1:], **head, **options)


def through_the_logits(model, input_ids, temperature=1.0):
    logits = model(input_ids=input_ids).logits[:, :-1].double() / temperature
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_equal_the_ones_through_the_logits(name):
    model = tiny(name)
    input_ids = torch.randint(3, VOCABULARY, (2, 11))
    grads = []
    for function in (through_the_head, through_the_logits):
        model.zero_grad()
        logprobs = function(model, input_ids, temperature=0.8)
        logprobs.sum().backward()
        grads.append((logprobs.detach(), model.get_input_embeddings().weight.grad.clone()))
    assert (grads[0][0] - grads[1][0]).abs().amax() <= 1e-4
    torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-3, atol=1e-3)


def test_what_is_no_causal_language_model_is_refused_by_name():
    with pytest.raises(ValueError, match="causal language model of transformers, got Linear"):
        lm_head(torch.nn.Linear(2, 2))
    config = transformers.T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1)
    model = transformers.T5ForConditionalGeneration(config)
    sentence = "got the encoder and decoder T5ForConditional.*`fastrl.logits_policy_loss`"
    with pytest.raises(ValueError, match=sentence):
        lm_head(model)
    with pytest.raises(ValueError, match=r"must have an LM head.* with `AutoModelForCausalLM`"):
        lm_head(tiny("llama").model)


def adapted(**options):
    peft = needed("peft")
    config = peft.LoraConfig(r=4, lora_alpha=12, **options)
    model = peft.get_peft_model(tiny("llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
)
def test_adapters_on_the_head(options):
    model = adapted(**options)
    input_ids = torch.randint(3, VOCABULARY, (2, 9))
    grads = []
    for function in (through_the_head, through_the_logits):
        model.zero_grad()
        function(model, input_ids).sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-3)
    model.merge_adapter()
    merged = through_the_head(model, input_ids) - through_the_logits(model, input_ids)
    assert merged.abs().amax() <= 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("Lora", {"lora_dropout": 0.1}, r"lora_dropout on the LM head must be 0 .*got 0.1"),
        ("Lora", {"use_dora": True}, "must be plain LoRA, got a variant"),
        ("AdaLora", {"init_r": 2, "target_r": 1, "total_step": 9}, "must be plain LoRA, got"),
    ],
)
def test_unsupported_adapters_are_refused(kind, options, sentence):
    peft = needed("peft")
    config = getattr(peft, f"{kind}Config")(target_modules=["lm_head"], **options)
    with pytest.raises(ValueError, match=sentence):
        lm_head(peft.get_peft_model(tiny("llama"), config).train())


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_needs_its_wrapper_is_refused():
    if "alora_invocation_tokens" not in needed("peft").LoraConfig.__dataclass_fields__:
        pytest.skip("needs a PEFT with activated LoRA")
    model = adapted(
        target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8]
    )
    with pytest.raises(ValueError, match="must not use an activated LoRA"):
        last_hidden_states(model)
