"""A small model and tokenizer, and a short run of one of TRL's trainers."""

import contextlib
import sys

import pytest
import torch

VOCABULARY = 61
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
#: What TRL logs of the clock.
TIMES = {"step_time", "epoch"}


def make_tokenizer():
    import tokenizers
    import transformers

    words = [*SPECIAL.values(), *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL)))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return fast


#: Of any model.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.3,
}

SOFTCAP = {"final_logit_softcapping": 3.0}
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
#: type of the configuration -> what it needs beyond `make_model`
MODELS = {
    "LlamaConfig": {},
    "MistralConfig": {},
    "Olmo2Config": {},
    "Qwen2Config": {},
    "Qwen3Config": {"tie_word_embeddings": True},
    "Gemma2Config": SOFTCAP,
    "Gemma3TextConfig": SOFTCAP,
    "CohereConfig": {"logit_scale": 0.25},
    "Cohere2Config": {"logit_scale": 0.25},
    "GraniteConfig": {"logits_scaling": 4.0},
    "Phi3Config": {},
    "PhiConfig": {},  # its head has a bias
    "GPTNeoXConfig": {},
    "GPT2Config": {},
    "Olmo3Config": {},
    "SmolLM3Config": {},
    "GemmaConfig": {},
    "Starcoder2Config": {},
    "OPTConfig": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Glm4Config": {},
    "Gemma4TextConfig": SOFTCAP,
    "HyperCLOVAXConfig": {"logits_scaling": 0.25},
    "MixtralConfig": {"num_local_experts": 4, **EXPERTS},
    "Qwen3MoeConfig": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **EXPERTS,
    },
    "GptOssConfig": {"num_local_experts": 4, **EXPERTS},
}


def make_model(kind="LlamaConfig", **changes):
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).float()


#: Of any trainer.
OPTIONS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.5,
    "optim": "sgd",  # Adam would amplify gradients that are only rounding errors
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
}


def save_model(path, *arguments, **options):
    """Save model and tokenizer where TRL can load them, also as the reference model."""
    make_model(*arguments, **options).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def reward_even(completion_ids, **_):
    """Share of even tokens and a little for length, so that completions rarely tie."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def words(first, count):
    return " ".join(f"w{(7 * first + i) % 50}" for i in range(count))


def prompts():
    return [words(i, 2 + i % 3) for i in range(12)]


ADAPTERS = ("fastrl.integrations.trl.", "fastrl.integrations.transformers.")


def operators():
    """Where fastrl's adapters find its operators: modules and names."""
    names = ("linear_policy_loss", "linear_token_stats", "linear_token_logprobs")
    homes = [m for name, m in sys.modules.items() if f"{name}.".startswith(ADAPTERS)]
    return [(home, name) for home in homes for name in names if name in vars(home)]


def batch_of(ids, prompt, *, mask=None, advantages, **more):
    """A batch as TRL gives it to its loss; of each row of ``ids``, ``prompt`` are the prompt."""
    mask = torch.ones_like(ids) if mask is None else mask
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": torch.as_tensor(advantages),
        "num_items_in_batch": mask[:, prompt:].sum(),
        **more,
    }


def run(trainer, use=contextlib.nullcontext):
    """Train; return the log of each step, the loss of each micro-batch and the handle."""
    losses = []
    with use(trainer) as handle:
        own = trainer.compute_loss

        def recorded(*arguments, **options):
            loss = own(*arguments, **options)
            losses.append(loss.item())
            return loss

        trainer.compute_loss = recorded
        trainer.train()
        del trainer.compute_loss
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return steps, losses, handle


def on(event, function):
    """A callback of a trainer that calls a function of its state, and of what it is given."""
    import transformers

    def called(self, args, state, control, **given):
        function(state, **given)

    return type("Callback", (transformers.TrainerCallback,), {event: called})()


def check_equal(ours, theirs):
    """Compare all numbers of all steps; fastrl adds one, the share of saturated ratios: none."""
    from fastrl.integrations.trl.saturation import METRIC

    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.keys() - {METRIC} == b.keys()
        assert a.get(METRIC, 0) == 0
        for name in b.keys() - TIMES:
            assert a[name] == pytest.approx(b[name], abs=1e-4, nan_ok=True), (step, name)
