"""The model and its tokenizer: any causal LM from `transformers`, or a small new one."""

import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

logging.disable_progress_bar()  # the loops have their own

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per printable ASCII character, a padding and an end token."""
    tokens = ["<pad>", "<eos>", *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def small_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama of half a million parameters, initialized from torch's generator."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU if there is one.

    Raises:
        ValueError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device must be available, got {name!r}: {reason}") from error


def load(path: str | None, device: str | torch.device) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer.

    Dropout is always off (``eval``). With dropout, the loss would see other probabilities than the
    sampling, and the ratio would not start at 1.

    Args:
        path: A directory or hub name; None for the small new model.
        device: The device of the model.

    Raises:
        ValueError: There is no such model, or its tokenizer has no end token.
    """
    if path is None:
        tokenizer: Any = character_tokenizer()
        model: Any = small_model(tokenizer)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model must be a causal LM with its tokenizer, got {path!r}: {error}"
            ) from error
    ends = model.generation_config.eos_token_id or tokenizer.eos_token_id
    if ends is None:
        raise ValueError(f"model must have an end token, got none in {path!r}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A model's own sampling defaults would change the distribution of the samples.
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    return model.to(device).eval(), tokenizer
