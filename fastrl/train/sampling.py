"""Sampling completions by `generate` of `transformers`, by vLLM, or by the user's own rollout."""

import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastrl import KeptTokens, RolloutCorrection
from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE
from fastrl.train.config import RunConfig
from fastrl.train.endings import Endings
from fastrl.train.loading import autocast
from fastrl.train.own_completions import checked_completion
from fastrl.train.prompts import Prompt
from fastrl.train.rollout import Completion, Rollout, rollout_of
from fastrl.train.vocabulary import token_count

_AT_ONCE = 2**24  # scores at a time, which bounds the memory of their probabilities

#: Completes token ids.
Complete = Callable[[list[list[int]]], list[Completion]]
#: A rollout: takes prompts, completions per prompt, a function that completes ids, the tokenizer.
#: It returns None in place of a completion that failed, which is left out.
RolloutFunction = Callable[[list[Prompt], int, Complete, Any], list[Completion | None]]


class TokenCount(NamedTuple):
    """Tokens of prompts and completions that an engine computed."""

    real: int
    padded: int  # with padding


class Engine(Protocol):
    """A sampler from softmax(logits / temperature), or from the tokens that are kept."""

    def complete(self, prompts: list[list[int]], *, greedy: bool) -> list[Completion]:
        """Complete each prompt; ``greedy`` takes the most likely tokens, without random numbers.

        Equal states of torch's generator on the CPU give equal samples.

        Raises:
            RuntimeError: The engine failed.
        """

    def computed(self) -> TokenCount:
        """Return the number of tokens computed since the last call."""


class Sampler:
    """A sampler of completions, by the engine or the function that the settings name.

    Raises:
        ValueError: A setting does not fit the model, its tokenizer or the engine, or the engine is
            not installed.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self.endings = Endings(model, tokenizer, config)
        self._own: RolloutFunction | None = None  # the user's, in place of one completion each
        self.engine: Engine
        if config.sampler == "vllm":
            from fastrl.train.vllm_sampler import VllmEngine

            self.engine = VllmEngine(model, tokenizer, config, self.endings)
            return
        self.engine = TransformersEngine(model, tokenizer, config, self.endings)
        if config.sampler != "transformers":
            self._own = import_function(config.sampler, "sampler")

    def sample(self, prompts: list[Prompt], group_size: int) -> tuple[Rollout, list[str | None]]:
        """Sample ``group_size`` completions of each prompt.

        Returns:
            The rollout and the completions as strings, with special tokens, but without the end
            token and padding; completions of a prompt are consecutive. None is a completion that
            the user's function could not make.

        Raises:
            FloatingPointError: The logits are not finite.
            RuntimeError: The engine failed.
        """
        return self._complete(prompts, group_size, greedy=False)

    def greedy(self, prompts: list[Prompt]) -> tuple[Rollout, list[str | None]]:
        """Complete each prompt with the most likely tokens, without random numbers."""
        return self._complete(prompts, 1, greedy=True)

    def _complete(
        self, prompts: list[Prompt], group_size: int, *, greedy: bool
    ) -> tuple[Rollout, list[str | None]]:
        completions: Sequence[Completion | None]

        def complete(token_ids: list[list[int]]) -> list[Completion]:
            return self.engine.complete(token_ids, greedy=greedy)

        asked = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
        if self._own is None:
            completions = complete(asked)
        else:
            try:
                completions = list(self._own(prompts, group_size, complete, self._tokenizer))
            except (FloatingPointError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a user's function may raise anything
                failure: Any = ValueError(f"sampler: raised {type(error).__name__}: {error}")
                failure.__notes__ = ["".join(traceback.format_exception(error)).rstrip()]
                raise failure from error
        if len(completions) != len(prompts) * group_size:
            raise ValueError(
                f"sampler must return {group_size} completions for each of {len(prompts)} "
                f"prompts, got {len(completions)}"
            )
        if self._own is not None:
            completions = [
                None
                if one is None
                else checked_completion(one, prompt, self._model, self._config, greedy=greedy)
                for one, prompt in zip(completions, asked, strict=True)
            ]
        texts = [None if one is None else self.endings.text(one) for one in completions]
        return rollout_of(prompts, completions, self._model.device), texts


class TransformersEngine:
    """`generate`, for every model and device, in micro-batches that bound its cache.

    Up to rounding of the logits, the samples do not depend on the split into micro-batches: each
    completion has its own random numbers, which are drawn before. Rows of the head that belong to
    no token of the tokenizer are left out of the distribution.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig, endings: Endings) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._endings, self._token_count = endings, token_count(tokenizer)
        self._tokens = TokenCount(0, 0)

    def complete(self, prompts: list[list[int]], *, greedy: bool) -> list[Completion]:
        """See `Engine.complete`."""
        shape = (len(prompts), self._config.max_new_tokens)
        uniforms = None if greedy else torch.rand(shape, dtype=torch.float64)
        completed: dict[int, Completion] = {}
        with generation_mode(self._model, self._config):
            for rows in self._micro_batches(prompts):
                some = [prompts[row] for row in rows]
                drawn = None if uniforms is None else uniforms[rows].to(self._model.device)
                completions = self._generate(some, drawn)
                completed |= dict(zip(rows, completions, strict=True))
                new = [len(completion.token_ids) for completion in completions]
                real, padded = self._tokens
                real += sum(map(len, some)) + sum(new)
                padded += len(rows) * (max(map(len, some)) + max(new))
                self._tokens = TokenCount(real, padded)
        return [completed[row] for row in range(len(prompts))]

    def computed(self) -> TokenCount:
        """See `Engine.computed`."""
        tokens, self._tokens = self._tokens, TokenCount(0, 0)
        return tokens

    def _micro_batches(self, prompts: list[list[int]]) -> Iterator[list[int]]:
        """Yield rows of prompts of similar lengths that fit ``tokens_per_generation``."""
        limit, new = self._config.tokens_per_generation, self._config.max_new_tokens
        rows: list[int] = []
        for row in sorted(range(len(prompts)), key=lambda row: len(prompts[row])):
            if rows and (len(rows) + 1) * (len(prompts[row]) + new) > limit:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _generate(self, prompts: list[list[int]], uniforms: Tensor | None) -> list[Completion]:
        """Complete the prompts of a micro-batch, padded on the left."""
        longest, pad = max(map(len, prompts)), self._tokenizer.pad_token_id
        input_ids = [[pad] * (longest - len(ids)) + ids for ids in prompts]
        attention_mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        choice = _TokenChoice(self._config, uniforms, self._token_count)
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
        )
        token_ids = out[:, longest:].cpu()
        steps = token_ids.shape[1]
        chosen = torch.stack(choice.token_ids[:steps], 1).cpu()
        logprobs = torch.stack(choice.logprobs[:steps], 1).cpu()
        kept = KeptTokens.concatenate(choice.kept[:steps]) if choice.kept else None
        completions = []
        for row in range(len(prompts)):
            length, ended = self._endings.length(token_ids[row])
            if not torch.equal(token_ids[row, :length], chosen[row, :length]):
                raise RuntimeError("generate did not take the tokens that were chosen for it")
            of_row = torch.arange(length) * len(prompts) + row
            completions.append(
                Completion(
                    token_ids[row, :length].clone(),
                    logprobs[row, :length].clone(),
                    ended,
                    kept=None if kept is None else kept.take(of_row),
                )
            )
        return completions


def rollout_correction(config: RunConfig) -> RolloutCorrection | None:
    """Return the importance weights for tokens of a sampler that differs from the policy.

    ``"auto"`` is ``"truncate"`` if the sampler's log-probabilities can differ from the trainer's:
    in bfloat16, whose rounding depends on the shapes, and with another sampler.
    """
    kind = config.rollout_correction
    if kind == "auto":
        half = (config.precision, config.weights) != ("float32", "float32")
        kind = "truncate" if half or config.sampler != "transformers" else "none"
    if kind == "none":
        return None
    return RolloutCorrection(kind=kind, level="token", high=2.0)


def import_function(path: str, option: str) -> Any:
    """Import the function ``module:function``.

    Raises:
        ValueError: The module cannot be imported, or has no such function; the message names the
            option.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{option} must be a known name or module:function, got {path!r}")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{option}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ValueError(f"{option}: {module_name} has no function {name!r}")  # noqa: TRY004
    return function


def keeps(config: RunConfig) -> list[LogitsProcessor]:
    """Return the processors that remove tokens from the logits, in the order of `transformers`."""
    processors: list[LogitsProcessor] = []
    if config.top_k is not None:
        processors.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        processors.append(TopPLogitsWarper(config.top_p))
    if config.min_p > 0:
        processors.append(MinPLogitsWarper(config.min_p))
    return processors


def choose(
    scores: Tensor,
    temperature: float,
    uniforms: Tensor | None,
    keeps: Sequence[LogitsProcessor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from softmax(scores / temperature) for each row, by the inverse of its CDF.

    Args:
        scores: Logits, float32 [N, V].
        temperature: Positive.
        uniforms: Numbers in [0, 1), float64 [N]; None chooses the most likely tokens.
        keeps: Processors that remove tokens from the distribution.

    Returns:
        Token ids [N], their log-probabilities, float32 [N], and which tokens were kept, bool
        [N, V]. A log-probability is NaN if the row has no distribution because a logit is NaN or
        infinite, or all are -inf. Otherwise the token has a positive probability.
    """
    scaled = scores.float() / temperature
    for processor in keeps:
        scaled = processor(None, scaled)
    logprobs = scaled.log_softmax(-1)
    token_ids = logprobs.argmax(-1, keepdim=True)
    if uniforms is not None:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = uniforms[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True)
        drawn = drawn.clamp(max=scores.shape[-1] - 1)
        # A parallel sum need not be monotonic to the last bit, so check the result.
        possible = logprobs.gather(-1, drawn).exp() > 0
        token_ids = torch.where(possible, drawn, token_ids)
    of_tokens = logprobs.gather(-1, token_ids).squeeze(-1)
    return token_ids.squeeze(-1), of_tokens, logprobs != -torch.inf


class _TokenChoice(LogitsProcessor):
    """The choice of tokens in ``generate(do_sample=False)``, with their log-probabilities.

    If it samples from a part of the vocabulary, it records that part, too. It is the last
    processor: `transformers` adds its own processors before it, but none for sampling.
    """

    def __init__(self, config: RunConfig, uniforms: Tensor | None, token_count: int) -> None:
        self.token_ids: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.kept: list[KeptTokens] = []  # of each step
        self._temperature, self._uniforms = config.temperature, uniforms
        self._token_count = token_count  # rows of the head behind them are padding
        self._keeps = [] if uniforms is None else keeps(config)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose a token for each row of ``scores`` [N, V], and forbid all others in place."""
        parts = []
        step = len(self.token_ids)
        for rows in torch.arange(len(scores)).split(max(1, _AT_ONCE // scores.shape[-1])):
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            uniforms = None if self._uniforms is None else self._uniforms[span, step]
            of_tokens = scores[span, : self._token_count]
            parts.append(choose(of_tokens, self._temperature, uniforms, self._keeps))
        token_ids, logprobs, kept = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        if self._keeps:
            offsets = pad(kept.sum(1).cumsum(0), (1, 0))
            self.kept.append(KeptTokens(kept.nonzero()[:, 1].int(), offsets).to("cpu"))
        return scores.fill_(-torch.inf).scatter_(1, token_ids[:, None], 0.0)


class _CompletionEnds(StoppingCriteria):
    """A search for the end of a completion after its prompt, never across both."""

    def __init__(self, endings: Endings, prompt_length: int) -> None:
        self._endings, self._prompt_length = endings, prompt_length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self._endings.reached(input_ids[:, self._prompt_length :])


@contextmanager
def generation_mode(model: Any, config: RunConfig) -> Iterator[None]:
    """Set no gradients, ``eval``, the run's precision, and an attention that supports padding.

    In ``eval``, gradient checkpointing does not disable the cache. At the end, all is restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    attention = model.config._attn_implementation
    switched = config.attention == BY_SEQUENCE and attention != "sdpa"
    try:
        model.eval()
        if switched:
            model.set_attn_implementation("sdpa")
        with torch.no_grad(), autocast(config, model.device):
            yield
    finally:
        if switched:
            model.set_attn_implementation(attention)
        for module, training in modes:
            module.training = training
