"""Models that score a sequence: sequence classification of `transformers` with one label.

The head of a decoder reads the last token that is not padding. So the padding must not be the end
token, or the end would not count.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from fastrl.train.model.loading import is_adapter, pretrained_config, reason
from fastrl.train.model.small_model import character_tokenizer, small_model
from fastrl.train.run import checksums

PADDING = "<|pad|>"


class Scorer(NamedTuple):
    """A model of one score per sequence, and its tokenizer."""

    model: Any
    tokenizer: Any
    new_head: bool  # whether the head has no trained weights yet


def load_scorer(
    path: str | None,
    device: str | torch.device,
    *,
    setting: str,
    dtype: torch.dtype | None = None,
    new_head: bool = False,
    trust_remote_code: bool = False,
) -> Scorer:
    """The model and its tokenizer, in evaluation mode.

    Args:
        path: A directory or hub name; None for a small new model.
        device: The device of the model.
        setting: The setting that ``path`` comes from, which messages name.
        dtype: The dtype of the weights; by default the one they are stored in.
        new_head: Whether a language model gets a new head. If not, it is refused.
        trust_remote_code: Whether code of the directory or of the hub may run.

    Raises:
        ValueError: There is no such model; it is damaged, an adapter or not in safetensors; it has
            several labels or lacks weights; its tokenizer has no end token.
    """
    if path is None:
        model, tokenizer = _small(dtype or torch.float32)
        return Scorer(model.to(device).eval(), tokenizer, new_head=True)
    try:
        _check_files(path)
        config = pretrained_config(path, trust_remote_code=trust_remote_code)
        if new_head and not _classifies(config):
            config.num_labels = 1
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{setting} must be a sequence classification model in safetensors with its "
            f"tokenizer, got {path!r}: {reason(error, path)}"
        ) from error
    missing = sorted(loaded["missing_keys"])
    _check_weights(model, missing, f"{setting} {path!r}", new_head=new_head)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{setting} must have a tokenizer with an end token, got none in {path!r}")
    _set_padding(model, tokenizer, new_head=bool(missing))
    return Scorer(model.to(device).eval(), tokenizer, new_head=bool(missing))


def score_sequences(model: Any, sequences: list[list[int]]) -> Tensor:
    """The scores ``[N]``, float32, of N sequences of token ids, padded on the right."""
    ids, mask = padded(sequences, model.config.get_text_config().pad_token_id, model.device)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False)
    return out.logits[:, 0].float()  # type: ignore[no-any-return]


def padded(sequences: list[list[int]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 ``[N, T]`` each, of N sequences padded on the right."""
    longest = max(map(len, sequences))
    ids = [sequence + [padding] * (longest - len(sequence)) for sequence in sequences]
    mask = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def check_context(model: Any, longest: int, setting: str) -> None:
    """Raise a `ValueError` that names ``setting`` if a sequence exceeds the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ValueError(
            f"{setting} must be at most {context} tokens for this model, got a prompt and "
            f"completion of {longest}"
        )


def _small(dtype: torch.dtype) -> tuple[Any, Any]:
    """A new model of the size of the small policy, and its tokenizer."""
    tokenizer: Any = character_tokenizer()
    config = small_model(tokenizer).config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    for parameter in model.parameters():  # not the buffers, some of which must be float32
        parameter.data = parameter.data.to(dtype)
    return model, tokenizer


def _check_files(path: str) -> None:
    """Raise a `ValueError` if ``path`` is an adapter, or its files differ from their checksums."""
    if is_adapter(path):
        raise ValueError("it is an adapter, which must be merged into its base first")
    if Path(path).is_dir():
        checksums.verify(Path(path))


def _classifies(config: Any) -> bool:
    return any("ForSequenceClassification" in name for name in config.architectures or ())


def _check_weights(model: Any, missing: list[str], name: str, *, new_head: bool) -> None:
    """Raise a `ValueError` if there are several labels, or weights have no trained values."""
    prefix = f"{model.base_model_prefix}."
    if lost := [key for key in missing if key.startswith(prefix)]:
        raise ValueError(f"{name} must have all weights of its layers, but lacks {lost[0]}")
    if missing and not new_head:
        raise ValueError(
            f"{name} must be a reward model, but has no trained head ({missing[0]}); "
            "python -m fastrl.train.reward --model trains one on a language model"
        )
    if model.config.num_labels != 1:
        raise ValueError(f"{name} must have one label, the reward, got {model.config.num_labels}")


def _set_padding(model: Any, tokenizer: Any, *, new_head: bool) -> None:
    """Choose the head's padding token: the model's own, or one that never ends a sequence.

    A trained head keeps its own, with which it was trained. A new one must see the end.
    """
    text = model.config.get_text_config()
    own = tokenizer.pad_token_id if text.pad_token_id is None and new_head else text.pad_token_id
    if own is None or (new_head and own == tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": PADDING})
        own = tokenizer.pad_token_id
        if own >= model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    elif tokenizer.pad_token_id != own:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(own)
    for part in (model.config, text):
        part.pad_token_id = own
    model.get_input_embeddings().padding_idx = own  # it gets no gradient; the end token must
