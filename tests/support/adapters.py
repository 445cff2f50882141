"""Models with an adapter, and short completions for them."""

import torch

from fastrl.train.adapters import attach
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import load
from fastrl.train.prompts import encode
from fastrl.train.warm_start import demonstrated

LORA = {"lora_rank": 4}
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
    config = GrpoConfig(model=str(base), **{**LORA, **settings})
    model, tokenizer = load(
        str(base), torch.device("cpu"), config.dtype, nf4=config.weights == "nf4"
    )
    return attach(model, config, str(base)), tokenizer, config


def rollout_of(tokenizer):
    prompts = encode(RECORDS, tokenizer, GrpoConfig())
    return demonstrated(tokenizer, prompts, [record["answer"] for record in RECORDS], "cpu")
