"""The model and its tokenizer: any causal LM from `transformers`, or a small new one."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from fastrl.train import extras
from fastrl.train.config import LoopConfig
from fastrl.train.model.small_model import character_tokenizer, small_model

logging.disable_progress_bar()  # the loops have their own


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


def load(
    path: str | None,
    device: str | torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """The model and its tokenizer. Weights are read from safetensors files alone.

    Args:
        path: A directory or hub name, of a model or of a LoRA adapter, which is merged into its
            base; None for the small new model.
        device: The device of the model.
        dtype: The dtype of its weights.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ValueError: There is no such model, or no base of such an adapter, or its tokenizer has no
            end token; or it cannot be loaded without running its code or unpickling its weights.
    """
    if path is None:
        tokenizer: Any = character_tokenizer()
        model: Any = small_model(tokenizer)
        for parameter in model.parameters():  # not the buffers, some of which must be float32
            parameter.data = parameter.data.to(dtype)
    else:
        try:
            model, tokenizer = _pretrained(path, dtype, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"model must be a causal LM with its tokenizer, got {path!r}: {reason(error, path)}"
            ) from error
    ends = model.generation_config.eos_token_id
    if ends is None or ends == []:
        ends = tokenizer.eos_token_id
    if ends is None:
        raise ValueError(f"model must have an end token, got none in {path!r}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A model's own sampling defaults would change the distribution of the samples.
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    return model.to(device).eval(), tokenizer


def is_adapter(path: str) -> bool:
    """Whether a directory or hub name holds an adapter, not a model.

    Raises:
        OSError: It cannot be found.
    """
    return find_adapter_config_file(path) is not None


def frozen_head(model: Any, config: LoopConfig) -> list[nn.Parameter]:
    """The weights of the embeddings and of the LM head if ``freeze_head`` is on."""
    if not config.freeze_head:
        return []
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [parameter for layer in ends for parameter in layer.parameters()]


def pretrained_config(path: str, *, trust_remote_code: bool) -> Any:
    """The configuration of a model.

    Raises:
        ValueError: Code must run that comes with the model, or that it names: an attention kernel
            of the hub.
        OSError: There is no such model.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    named = [str(getattr(part, "_attn_implementation", None)) for part in parts]
    if not trust_remote_code and any("/" in name for name in named):
        raise ValueError(f"trust_remote_code: it names a kernel, {named}")
    return config


def reason(error: Exception, path: str) -> str:
    """Why the model at ``path`` cannot be loaded, with what can be done about it."""
    text = str(error)
    if "--trust_remote_code" in text:  # of the base of an adapter
        return text
    if "trust_remote_code" in text:
        return "it brings or names code, which only runs with --trust_remote_code"
    if isinstance(error, OSError) and "model.safetensors" in text:
        return (
            "it has no model.safetensors, and pickled weights are not loaded, since they can run "
            "code; store it with save_pretrained where you trust it"
        )
    found = os.path.exists(path)
    return text if found else f"there is no such directory, and on the hub: {text}"


def _pretrained(path: str, dtype: torch.dtype, *, trust_remote_code: bool) -> tuple[Any, Any]:
    trusted = {"trust_remote_code": trust_remote_code}  # None would ask on the terminal
    stored = {"dtype": dtype, "use_safetensors": True, **trusted}
    if not is_adapter(path):
        pretrained_config(path, **trusted)
        model = AutoModelForCausalLM.from_pretrained(path, **stored)
        return model, AutoTokenizer.from_pretrained(path, **trusted)
    extras.require("peft", extra="lora", setting="an adapter as model")
    from fastrl.train.model.adapters import base_of, merge

    base = base_of(path)
    try:
        pretrained_config(base, **trusted)
        model = AutoModelForCausalLM.from_pretrained(base, **stored)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"it is an adapter of {base!r}, which cannot be loaded: {reason(error, base)}"
        ) from error
    own = (Path(path) / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(path if own else base, **trusted)
    return merge(model, path), tokenizer
