"""The tokens of a model and its tokenizer: ends, padding, and the rows of embedding and head.

Embedding and head may have more rows than the tokenizer has tokens, for speed. Such padding rows
are never sampled. The loss includes them: a trained model gives them no probability.
"""

from collections.abc import Iterable
from typing import Any

from fastrl.integrations.transformers import LmHead
from fastrl.train.prompts import Prompt

_ROWS = "fastrl_head_rows"  # an attribute of models


def token_count(tokenizer: Any) -> int:
    """Return the number of rows up to the last token of the tokenizer."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens that the generation settings or the tokenizer name.

    `transformers` makes missing generation settings from the model's configuration. That may also
    have its class's default end, so it counts only if nothing else names one.
    """

    def listed(ends: int | list[int] | None) -> list[int]:
        return [ends] if isinstance(ends, int) else list(ends or ())

    ends = {*listed(model.generation_config.eos_token_id), *listed(tokenizer.eos_token_id)}
    ends = ends or {*listed(getattr(model.config.get_text_config(), "eos_token_id", None))}
    if any(end < 0 for end in ends):
        raise ValueError(f"model must have end tokens of at least 0, got {sorted(ends)}")
    return sorted(ends)


def set_padding(tokenizer: Any, ends: list[int]) -> None:
    """Give a tokenizer without padding an end token for it, which attention masks out."""
    if tokenizer.pad_token_id is not None:
        return
    named = (tokenizer.eos_token, *map(tokenizer.convert_ids_to_tokens, ends))
    tokenizer.pad_token = next(filter(None, named), None)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"model must have a padding token, or an end among its tokens, got {ends}")


def check_tokens(model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    """Raise a `ValueError` if the padding or a token of a prompt has no row in the embedding."""
    check_rows(model, tokenizer, "padding", [tokenizer.pad_token_id])
    for prompt in prompts:
        check_rows(model, tokenizer, f"the prompt {prompt.text[:80]!r}", prompt.token_ids)


def check_rows(model: Any, tokenizer: Any, where: str, token_ids: Iterable[int]) -> None:
    """Raise a `ValueError` that names a token without a row in the embedding."""
    rows, token = len(model.get_input_embeddings().weight), max(token_ids)
    if token >= rows:
        raise ValueError(
            f"model must have a row in its embedding for every token of {where}, got "
            f"{tokenizer.convert_ids_to_tokens(token)!r} (token {token}) and {rows} rows: call "
            "resize_token_embeddings when tokens are added"
        )


def limit_rows(model: Any, rows: int) -> None:
    """Leave the rows of the head behind ``rows`` out of losses and log-probabilities.

    They must be padding. Autograd then copies the gradient of the head, so only a policy with more
    padding than its teacher is limited.
    """
    setattr(model, _ROWS, rows)


def row_limit(model: Any) -> int | None:
    """Return the rows of `limit_rows`, or None."""
    return getattr(model, _ROWS, None)


def row_count(model: Any) -> int:
    """Return the number of tokens that the model reads and predicts, with padding rows."""
    rows = len(model.get_input_embeddings().weight)
    return min(rows, row_limit(model) or rows)


def limited(head: LmHead, model: Any) -> LmHead:
    """Return the head without the rows that `limit_rows` leaves out."""
    rows = row_limit(model)
    if rows is None:
        return head
    lora = head.lora and (head.lora[0], head.lora[1][:rows], head.lora[2])
    bias = None if head.bias is None else head.bias[:rows]
    return head._replace(weight=head.weight[:rows], bias=bias, lora=lora)
