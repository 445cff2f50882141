"""The ends of a completion: one of several tokens, or a stop string."""

from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from fastrl.train.config import RunConfig
from fastrl.train.rollout import Completion
from fastrl.train.vocabulary import check_rows

_NO_TOKEN = 2**62  # above every vocabulary, so that no stop string matches it


class Endings:
    """The end tokens of the model, and the tokens and texts that ``stop`` names.

    Raises:
        ValueError: A text can never appear, the model has no end token, or no row for one, or it
            has generation settings that would change the distribution of the samples.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        _check_generation_config(model)
        ends = model.generation_config.eos_token_id
        of_model = [ends] if isinstance(ends, int) else list(ends or ())
        vocabulary = tokenizer.get_vocab()
        named = [vocabulary[text] for text in config.stop if text in vocabulary]
        self.token_ids = sorted({*of_model, *named})
        if not self.token_ids:
            raise ValueError("stop must name at least one token, since the model has no end token")
        check_rows(model, tokenizer, "the ends of a completion", self.token_ids)
        self._tokenizer, self._ends = tokenizer, torch.tensor(self.token_ids)
        # One criterion per text, so that each fails by itself if no token can complete it. A text
        # that is a token may also be spelled by other tokens.
        self.texts = [text for text in config.stop if text not in tokenizer.all_special_tokens]
        self._strings = [_stop_string(text, tokenizer) for text in self.texts]
        self._span = max([1, *(criterion.maximum_token_len for criterion in self._strings)])

    def __str__(self) -> str:
        """Return the end tokens and texts, quoted."""
        named = zip(
            self.token_ids, self._tokenizer.convert_ids_to_tokens(self.token_ids), strict=True
        )
        tokens = [token or f"token {number}" for number, token in named]
        return ", ".join(map(repr, dict.fromkeys([*tokens, *self.texts])))

    def text(self, completion: Completion) -> str:
        """Return a completion as text with special tokens, but without its end token."""
        ids = completion.token_ids.tolist()
        if completion.ended and ids[-1:] and ids[-1] in self.token_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids))

    def reached(self, token_ids: Tensor) -> Tensor:
        """Return whether the last token of each completion [N, T] ends it, bool [N]."""
        ended = torch.isin(token_ids[:, -1], self._ends.to(token_ids.device))
        for criterion in self._strings:
            ended |= criterion(token_ids, None)
        return ended

    def length(self, token_ids: Tensor) -> tuple[int, bool]:
        """Return the length of a completion [T] including its end, and whether it has an end."""
        before = token_ids.new_full((self._span - 1,), _NO_TOKEN)
        ended = self.reached(torch.cat([before, token_ids]).unfold(0, self._span, 1))
        if not ended.any():
            return len(token_ids), False
        return int(ended.int().argmax()) + 1, True


def _check_generation_config(model: Any) -> None:
    """Refuse penalties, forced tokens and the like, which apply before the temperature."""
    harmless = ("eos_token_id", "pad_token_id", "bos_token_id", "transformers_version")
    other = {
        name: value
        for name, value in model.generation_config.to_diff_dict().items()
        if name not in harmless and not name.startswith("_")
    }
    if other:
        raise ValueError(
            f"model must have no generation settings besides its end and padding tokens, got "
            f"{other}"
        )


def _stop_string(text: str, tokenizer: Any) -> StopStringCriteria:
    if not text:
        raise ValueError("stop must not name an empty text")
    try:
        return StopStringCriteria(tokenizer, [text])
    except ValueError as error:
        raise ValueError(f"stop: no token can complete {text!r}: {error}") from error
