"""The model and its tokenizer: any causal LM from `transformers`, or a small new one."""

import string
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from fastrl.train.checkpoint import latest, verify
from fastrl.train.config import RunConfig
from fastrl.train.prompts import Prompt
from fastrl.train.vocabulary import end_tokens, set_padding

logging.disable_progress_bar()  # the loops have their own

#: Arguments of ``from_pretrained``: no code of the model's is run, and no weights are unpickled.
WEIGHTS_ALONE = {"use_safetensors": True, "trust_remote_code": False}
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def find_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU if there is one.

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


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that sets the precision of forward and backward."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def model_path(name: str) -> str:
    """Return the directory or hub name of a model; of a run it is the last checkpoint."""
    return str(latest(Path(name, "checkpoints")) or name)


def load(
    path: str | None, device: torch.device, dtype: str = "float32", *, nf4: bool = False
) -> tuple[Any, Any]:
    """Load a model, in evaluation mode, and its tokenizer, only from safetensors files.

    The model's ``generation_config`` gets the end tokens of model and tokenizer, and no setting
    that changes the samples. A tokenizer without padding gets an end token for it.

    Raises:
        ValueError: There is no such model, it is damaged, or it has no end token; or it cannot be
            loaded without running its code or unpickling its weights.
    """
    if path is None:
        tokenizer: Any = character_tokenizer()
        model: Any = small_model(tokenizer)
        for parameter in model.parameters():  # but not buffers: some of them must be float32
            parameter.data = parameter.data.to(getattr(torch, dtype))
    else:
        with expecting("model must be a causal LM with its tokenizer", path):
            options = {"dtype": getattr(torch, dtype), **WEIGHTS_ALONE}
            quantized = _four_bits(device, options["dtype"]) if nf4 else {}
            model = AutoModelForCausalLM.from_pretrained(path, **options, **quantized)
            _check_quantized(model, nf4=nf4)
            tokenizer = tokenizer_of(path)
    ends = end_tokens(model, tokenizer)
    set_padding(tokenizer, ends)
    # A model's own sampling defaults would change the distribution of the samples.
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=tokenizer.pad_token_id
    )
    if (name := not_finite(model)) is not None:
        raise ValueError(f"model must have finite weights, got a NaN or infinity in {name!r}")
    return model.to(device).eval(), tokenizer


@contextmanager
def expecting(kind: str, path: str) -> Iterator[None]:
    """Turn an error in reading the model at ``path`` into one that says what it must be.

    Raises:
        ValueError: The model is damaged, needs code, or cannot be read.
    """
    try:
        verify(Path(path), as_model=True)
        pretrained_config(path)
        yield
    # ImportError: a package has quantized it
    except (OSError, ImportError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{kind}, got {path!r}: {reason(error, path)}") from error


def tokenizer_of(path: str) -> Any:
    """Return the tokenizer in the directory of a model."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def pretrained_config(path: str) -> Any:
    """Return the configuration of a model.

    Raises:
        ValueError: The model is an adapter, or it needs code that comes with it, or that it names:
            an attention kernel of the hub.
        OSError: There is no such model.
    """
    if find_adapter_config_file(path) is not None:
        raise ValueError(
            "it is an adapter: merge it into its base with peft's merge_and_unload, and store the "
            "result and the tokenizer with save_pretrained"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    named = [str(getattr(part, "_attn_implementation", None)) for part in parts]
    if any("/" in name for name in named):
        raise ValueError(f"trust_remote_code: it names a kernel, {named}")
    return config


def reason(error: Exception, path: str) -> str:
    """Return why the model at ``path`` cannot be loaded, and what to do about it."""
    text = str(error)
    if "trust_remote_code" in text:
        return "it brings or names code, which the loops do not run"
    if isinstance(error, OSError) and "model.safetensors" in text:
        return (
            "it has no model.safetensors, and pickled weights are not loaded, since they can run "
            "code; store it with save_pretrained where you trust it"
        )
    return text if Path(path).exists() else f"there is no such directory, and on the hub: {text}"


def not_finite(model: Any) -> str | None:
    """Return the name of the first tensor with a value that is not finite, or None."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if (scales := getattr(parameter, "quant_state", None)) is not None:  # nf4
            weight = scales.absmax if scales.offset is None else scales.offset
        if not weight.is_floating_point() or weight.itemsize == 1 or weight.numel() == 0:
            continue  # quantized weights have no NaN, or no minimum
        if not all(end.isfinite() for end in weight.aminmax()):
            return str(name)
    return None


def context_of(model: Any) -> int | None:
    """Return the length limit of a model's sequences in tokens, or None."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_length(model: Any, prompts: list[Prompt], max_new_tokens: int) -> None:
    """Raise a `ValueError` if the longest prompt and completion exceed the model's context."""
    context = context_of(model)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(longest.token_ids)
    if context is not None and length + max_new_tokens > context:
        raise ValueError(
            f"max_new_tokens must be at most {context - length} for this model, with a context of "
            f"{context} tokens and a longest prompt of {length} ({longest.text[:80]!r}); got "
            f"{max_new_tokens}"
        )


def _four_bits(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` for NF4 with arithmetic in ``dtype`` (QLoRA)."""
    try:
        from bitsandbytes.nn import LinearNF4
    except ModuleNotFoundError as error:
        raise ValueError(
            "weights=nf4 needs bitsandbytes: pip install 'fastrl-kernels[qlora]'"
        ) from error
    try:
        LinearNF4(64, 64).to(device)(torch.ones(1, 64, device=device))
    except Exception as error:  # the type depends on the device
        cause = str(error).partition("\n")[0]
        raise ValueError(f"weights must not be nf4 on {device}: bitsandbytes: {cause}") from error
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _check_quantized(model: Any, *, nf4: bool) -> None:
    """Check that there are 4-bit layers if and only if requested; make them trainable."""
    if not nf4:
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError("it is quantized; only --weights nf4 quantizes, from whole weights")
        return
    layers = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    if not any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
        raise ValueError("weights must not be nf4: the model has no linear layers but its head")
    for layer in layers:
        # on a CPU with AVX512-BF16, a forward in eval would repack the weight permanently, for a
        # bfloat16 product that has no gradient
        layer.support_avx512bf16_for_cpu = False


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token per printable ASCII character, a padding and an end token.

    Returns:
        The tokenizer, which pads on the left.

    Examples:
        >>> from fastrl.train.loading import character_tokenizer
        >>> tokenizer = character_tokenizer()
        >>> tokenizer.decode(tokenizer("1 + 2 =").input_ids)
        '1 + 2 ='
    """
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
    """Make a new Llama of half a million parameters, initialized from torch's generator.

    Args:
        tokenizer: determines the size of the vocabulary, and the padding and end tokens.

    Returns:
        The model, in float32 on the CPU, with a context of 512 tokens.

    Examples:
        >>> from fastrl.train.loading import character_tokenizer, small_model
        >>> model = small_model(character_tokenizer())
        >>> tuple(model.lm_head.weight.shape)
        (98, 128)
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,  # with 0.02 it learned less in as many steps
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
