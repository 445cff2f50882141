"""Sampling with ``generate`` of `transformers`, in micro-batches that bound its cache."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from fastrl.train.config import RunConfig
from fastrl.train.data.prompts import Prompt
from fastrl.train.distributed import ranks
from fastrl.train.rollout import Rollout
from fastrl.train.sampling.completion import Completion, check_finite, rollout_of, texts_of
from fastrl.train.sampling.endings import Endings
from fastrl.train.sampling.generation_mode import generation_mode
from fastrl.train.sampling.sampler import TokenCount
from fastrl.train.sampling.token_choice import TokenChoice


class TransformersSampler:
    """The default engine, for every model and device.

    The samples do not depend on the split into micro-batches and ranks, up to rounding of the
    logits: each completion has its own random numbers, which are drawn before.

    Args:
        model: A causal LM, or one that PEFT wraps.
        tokenizer: The model's.
        config: The settings of the run.

    Raises:
        ValueError: A setting does not fit the model or its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        self.tokens = TokenCount(0, 0)
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._endings = Endings(model, tokenizer, config)

    def sample(self, prompts: list[Prompt], group_size: int) -> tuple[Rollout, list[str]]:
        """See `Sampler.sample`."""
        repeated = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
        shape = (len(repeated), self._config.max_new_tokens)
        completions = self._complete(repeated, torch.rand(shape, dtype=torch.float64))
        rollout = rollout_of(prompts, completions, self._tokenizer, self._model.device)
        return rollout, texts_of(completions, self._tokenizer)

    def greedy(self, prompts: list[Prompt]) -> tuple[list[str], list[int]]:
        """See `Sampler.greedy`."""
        completions = self._complete([prompt.token_ids for prompt in prompts], None)
        check_finite(completions)
        lengths = [len(completion.token_ids) for completion in completions]
        return texts_of(completions, self._tokenizer), lengths

    def _complete(self, prompts: list[list[int]], uniforms: Tensor | None) -> list[Completion]:
        """Complete each prompt with its row of ``uniforms`` [N, max_new_tokens].

        Each rank completes its share, and all ranks get all completions.
        """
        with generation_mode(self._model, self._config):
            parts = ranks.together(lambda: self._complete_share(prompts, uniforms))
        completed = {row: one for part, _ in parts for row, one in part.items()}
        real, padded = (sum(each) for each in zip(*(count for _, count in parts), strict=True))
        self.tokens = TokenCount(real, padded)
        return [completed[row] for row in range(len(prompts))]

    def _complete_share(
        self, prompts: list[list[int]], uniforms: Tensor | None
    ) -> tuple[dict[int, Completion], TokenCount]:
        """The completions of this rank's rows, and what was computed for them."""
        completed: dict[int, Completion] = {}
        real = padded = 0
        for rows in self._micro_batches(prompts):
            some = [prompts[row] for row in rows]
            drawn = None if uniforms is None else uniforms[rows].to(self._model.device)
            generated = self._generate(some, drawn)
            completed |= dict(zip(rows, generated, strict=True))
            lengths = [len(completion.token_ids) for completion in generated]
            real += sum(map(len, some)) + sum(lengths)
            padded += len(rows) * (max(map(len, some)) + max(lengths))
        return completed, TokenCount(real, padded)

    def _micro_batches(self, prompts: list[list[int]]) -> Iterator[list[int]]:
        """This rank's rows: prompts of similar lengths that fit ``tokens_per_generation``."""
        limit, new = self._config.tokens_per_generation, self._config.max_new_tokens
        rows: list[int] = []
        by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for row in by_length[ranks.index() :: ranks.count()]:
            if rows and (len(rows) + 1) * (len(prompts[row]) + new) > limit:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _generate(self, prompts: list[list[int]], uniforms: Tensor | None) -> list[Completion]:
        """Complete the prompts of a micro-batch, padded on the left."""
        longest = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id
        input_ids = [[pad] * (longest - len(ids)) + ids for ids in prompts]
        attention_mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        choice = TokenChoice(self._config.temperature, uniforms)
        out = self._model.generate(
            input_ids=torch.tensor(input_ids, device=self._model.device),
            attention_mask=torch.tensor(attention_mask, device=self._model.device),
            generation_config=GenerationConfig(
                max_new_tokens=self._config.max_new_tokens,
                eos_token_id=self._endings.token_ids,
                pad_token_id=pad,
                do_sample=False,
                use_cache=True,
            ),
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([_CompletionEnds(self._endings, longest)]),
            synced_gpus=False,  # no rank needs another to generate
        )
        token_ids = out[:, longest:].cpu()
        steps = token_ids.shape[1]
        chosen = torch.stack(choice.token_ids[:steps], 1).cpu()
        logprobs = torch.stack(choice.logprobs[:steps], 1).cpu()
        completions = []
        for row in range(len(prompts)):
            length, ended = self._endings.length(token_ids[row])
            if not torch.equal(token_ids[row, :length], chosen[row, :length]):
                raise RuntimeError("generate did not take the tokens that were chosen for it")
            completions.append(
                Completion(token_ids[row, :length].clone(), logprobs[row, :length].clone(), ended)
            )
        return completions


class _CompletionEnds(StoppingCriteria):
    """Looks for the end of a completion behind its prompt, never across both."""

    def __init__(self, endings: Endings, prompt_length: int) -> None:
        self._endings, self._prompt_length = endings, prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self._endings.reached(input_ids[:, self._prompt_length :])
