"""Models with an adapter, and short completions for them."""

import torch

from fastrl.train.config import GrpoConfig
from fastrl.train.data.prompts import encode
from fastrl.train.model.adapters import attach
from fastrl.train.model.loading import load
from fastrl.train.warm_start import answered

LORA = {"lora_rank": 4}
DORA = {**LORA, "dora": True}
KINDS = {
    "lora": LORA,
    "dora": DORA,
    "lora_of_head": {**LORA, "lora_targets": ["q_proj", "lm_head"]},
}
BF16 = {"weights": "bfloat16"}
RECORDS = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(6)]


def logits(model):
    """Of a fixed sequence."""
    with torch.no_grad():
        return model.eval()(torch.arange(2, 22)[None]).logits.float()


def move_adapter(model):
    """Give the adapter some effect."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def adapted(base, **settings):
    """A model with an adapter, its tokenizer and configuration."""
    model, tokenizer = load(str(base), "cpu")
    config = GrpoConfig(model=str(base), **settings)
    return attach(model, config, str(base)), tokenizer, config


def rollout_of(tokenizer):
    prompts = encode(RECORDS, tokenizer, chat_template=False, max_tokens=32)
    return answered(tokenizer, prompts, [r["answer"] for r in RECORDS], "cpu")
