"""A reward model: a sequence classification model of `transformers` with one label.

TRL's ``RewardTrainer`` trains such models: `docs/train_reward_model.py` does it for the arithmetic
task.
"""

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from fastrl.train.config import RunConfig
from fastrl.train.loading import WEIGHTS_ALONE, context_of, expecting, not_finite, tokenizer_of
from fastrl.train.prompts import Record
from fastrl.train.rollout import rows_by_length

_TOKENS = 16384  # most tokens that are scored together, including padding


class RewardModel:
    """A reward function that scores prompt and completion with a reward model.

    The model reads prompt and completion as text, in its own tokens, and the end token.
    Conversations, and with ``chat_template`` every prompt, go through its own chat template, which
    writes the end. It computes in the dtype of its files, without gradients. The head of a decoder
    reads the last token that is not padding, so its padding token must not be the end token.

    Raises:
        ValueError: There is no such model; it is damaged, has several labels or lacks trained
            weights; or its tokenizer has no end or padding token.
    """

    def __init__(self, path: str, device: torch.device, config: RunConfig) -> None:
        kind = "name a sequence classification model in safetensors with its tokenizer"
        with expecting(f"reward: model: must {kind}", path):
            self._tokenizer = tokenizer_of(path)
            options = {"dtype": "auto", "output_loading_info": True, **WEIGHTS_ALONE}
            model, loaded = AutoModelForSequenceClassification.from_pretrained(path, **options)
        self._chat, end = config.chat_template is not None, self._tokenizer.eos_token_id
        self._padding = model.config.get_text_config().pad_token_id
        wrong = None
        if missing := sorted(loaded["missing_keys"]):
            wrong = f"trained weights, but lacks {missing[0]}"
        elif model.config.num_labels != 1:
            wrong = f"one label, the reward, got {model.config.num_labels}"
        elif end is None or self._padding in (None, end):
            wrong = f"a padding token other than its end token, got {self._padding} and {end}"
        elif (name := not_finite(model)) is not None:
            wrong = f"finite weights, got a NaN or infinity in {name}"
        elif self._chat and self._tokenizer.chat_template is None:
            wrong = "a chat template"
        if wrong is not None:
            raise ValueError(f"reward: the model {path!r} must have {wrong}")
        self.model = model.to(device).requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(
        self, prompts: list[str], completions: list[str], records: list[Record]
    ) -> list[float]:
        """Return the score of each prompt with its completion.

        Raises:
            ValueError: A sequence is longer than the model's context.
        """
        sequences = [
            self._encode(record["prompt"], text)
            for record, text in zip(records, completions, strict=True)
        ]
        context = context_of(self.model)
        longest = max(map(len, sequences), default=0)
        if context is not None and longest > context:
            raise ValueError(f"must get at most {context} tokens, got {longest}")
        scores = [0.0] * len(sequences)
        for rows in rows_by_length([len(one) for one in sequences], _TOKENS):
            batch = [torch.tensor(sequences[row]) for row in rows]
            ids = torch.nn.utils.rnn.pad_sequence(batch, True, self._padding)
            mask = torch.arange(ids.shape[1]) < torch.tensor([[len(one)] for one in batch])
            out = self.model(
                input_ids=ids.to(self.model.device),
                attention_mask=mask.long().to(self.model.device),
                use_cache=False,
            )
            for row, score in zip(rows, out.logits[:, 0].tolist(), strict=True):
                scores[row] = score
        return scores

    def _encode(self, prompt: Any, completion: str) -> list[int]:
        """Tokenize; special tokens that a completion spells out are text and end nothing."""
        if self._chat or not isinstance(prompt, str):
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages = [*asked, {"role": "assistant", "content": completion}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        own = self._tokenizer(completion, add_special_tokens=False, split_special_tokens=True)
        return [
            *self._tokenizer(prompt)["input_ids"],
            *own["input_ids"],
            self._tokenizer.eos_token_id,
        ]
