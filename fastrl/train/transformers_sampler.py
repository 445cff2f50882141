"""Sampling by `generate` of `transformers`, with the trainer's own choice of tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fastrl import KeptTokens, TopKLogprobs
from fastrl.integrations.transformers import backbone
from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE
from fastrl.train.config import RunConfig
from fastrl.train.endings import Endings
from fastrl.train.loading import autocast
from fastrl.train.rollout import Completion, TokenCount, rows_by_length
from fastrl.train.vocabulary import token_count

#: Layers of a cache that are keys and values by token, and nothing that depends on all tokens.
_BY_TOKEN = (DynamicLayer, DynamicSlidingWindowLayer)
_BLOCK = 256  # tokens, the root of a vocabulary's size
_AT_ONCE = 2**24  # scores at a time, which bounds the memory of their probabilities


class TransformersEngine:
    """`generate`, for every model and device, in micro-batches that bound its cache.

    It samples from softmax(logits / temperature), or from the tokens that are kept. Up to rounding
    of the logits, the samples do not depend on the split into micro-batches: each completion has
    its own random numbers, which are drawn before. Rows of the head that belong to no token of the
    tokenizer are left out of the distribution.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig, endings: Endings) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._endings = endings
        self._token_count = max(token_count(tokenizer), 1 + max(endings.token_ids))
        self._tokens = TokenCount(0, 0)

    def complete(self, prompts: list[list[int]], *, greedy: bool) -> list[Completion]:
        """Complete each prompt; ``greedy`` takes the most likely tokens, without random numbers.

        Equal states of torch's generator on the CPU give equal samples.
        """
        shape = (len(prompts), self._config.max_new_tokens)
        uniforms = None if greedy else torch.rand(shape, dtype=torch.float64)
        completed: dict[int, Completion] = {}
        with generation_mode(self._model, self._config):
            lengths = [len(ids) + shape[1] for ids in prompts]
            for rows in rows_by_length(lengths, self._config.tokens_per_generation):
                some = [prompts[row] for row in rows]
                drawn = None if uniforms is None else uniforms[rows].to(self._model.device)
                completions = self._generate(some, drawn)
                completed |= dict(zip(rows, completions, strict=True))
        return [completed[row] for row in range(len(prompts))]

    def computed(self) -> TokenCount:
        """Return the number of tokens computed since the last call."""
        tokens, self._tokens = self._tokens, TokenCount(0, 0)
        return tokens

    def _generate(self, prompts: list[list[int]], uniforms: Tensor | None) -> list[Completion]:
        """Complete the prompts of a micro-batch, padded on the left."""
        longest, pad = max(map(len, prompts)), self._tokenizer.pad_token_id
        padded = [[pad] * (longest - len(ids)) + ids for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        input_ids = torch.tensor(padded, device=self._model.device)
        attention_mask = torch.tensor(mask, device=self._model.device)
        choice = _TokenChoice(self._config, uniforms, self._token_count)
        out = self._model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **self._prefilled(prompts, input_ids, attention_mask),
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
        tops = [torch.stack(each[:steps], 1) for each in zip(*choice.top, strict=True)]
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
                    top_logprobs=TopKLogprobs(*(x[row, :length] for x in tops)) if tops else None,
                )
            )
        self._count(sum(len(one.token_ids) for one in completions), len(prompts) * steps)
        return completions

    def _prefilled(
        self, prompts: list[list[int]], input_ids: Tensor, attention_mask: Tensor
    ) -> dict[str, DynamicCache]:
        """Return the cache of all prompts without their last tokens, if some prompts are equal.

        Each different prompt is computed once. `generate` computes the last tokens, and everything
        if there is no cache.
        """
        first = {tuple(ids): row for row, ids in reversed([*enumerate(prompts)])}
        cache = DynamicCache(config=self._model.config)
        rows, length = sorted(first.values()), input_ids.shape[1] - 1
        whole = self._model._supports_default_dynamic_cache() and all(
            type(layer) in _BY_TOKEN for layer in cache.layers
        )
        if len(rows) == len(prompts) or length == 0 or not whole:
            self._count(sum(map(len, prompts)), input_ids.numel())
            return {}
        mask, body = attention_mask[rows], backbone(self._model)
        name = "cache" if "cache" in signature(body.forward).parameters else "past_key_values"
        body(
            input_ids=input_ids[rows, :-1],
            attention_mask=mask[:, :-1],
            position_ids=(mask[:, :-1].cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            **{name: cache},
        )
        place = {row: i for i, row in enumerate(rows)}
        of_row = [place[first[tuple(ids)]] for ids in prompts]
        cache.batch_select_indices(torch.tensor(of_row, device=input_ids.device))
        of_prompts = sum(len(prompts[row]) - 1 for row in rows)
        self._count(of_prompts + len(prompts), len(rows) * length + len(prompts))
        return {name: cache}

    def _count(self, real: int, padded: int) -> None:
        self._tokens = TokenCount(self._tokens.real + real, self._tokens.padded + padded)


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
        Token ids [N], their log-probabilities, float32 [N], and those of all tokens, float32
        [N, V], which are -inf for tokens that were removed. They are NaN if the row has no
        distribution because a logit is NaN or infinite, or all are -inf. Otherwise the token has a
        positive probability.
    """
    scaled = scores.float() / temperature
    for processor in keeps:
        scaled = processor(None, scaled)
    logprobs = scaled.log_softmax(-1)
    if uniforms is None:
        token_ids = logprobs.argmax(-1, keepdim=True)
    else:
        token_ids = _drawn(logprobs.exp(), uniforms[:, None])
        # Sums need not agree to the last bit, so check the result.
        possible = logprobs.gather(-1, token_ids).exp() > 0
        if not possible.all():
            token_ids = torch.where(possible, token_ids, logprobs.argmax(-1, keepdim=True))
    return token_ids.squeeze(-1), logprobs.gather(-1, token_ids).squeeze(-1), logprobs


def _drawn(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return where the cumulative sum passes ``uniforms`` [N, 1] times the sum: int64 [N, 1].

    It looks for the block of tokens first: sums of blocks take a tenth of the time of a float64
    sum up to every token.
    """
    tokens = probabilities.shape[-1]
    whole = tokens // _BLOCK * _BLOCK
    sums = probabilities[:, :whole].unflatten(-1, (tokens // _BLOCK, _BLOCK)).sum(-1)
    sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], -1).double()
    cumulative = sums.cumsum(-1)
    target = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp(max=sums.shape[-1] - 1)
    target = target - (cumulative - sums).gather(-1, block)
    token_ids = _BLOCK * block + torch.arange(_BLOCK, device=block.device)
    inside = probabilities.gather(-1, token_ids.clamp(max=tokens - 1))
    inside = torch.where(token_ids < tokens, inside, 0).double().cumsum(-1)
    place = torch.searchsorted(inside, target, right=True)
    return (_BLOCK * block + place).clamp(max=tokens - 1)


class _TokenChoice(LogitsProcessor):
    """The choice of tokens in ``generate(do_sample=False)``, with their log-probabilities.

    If it samples from a part of the vocabulary, it records that part, too, and for score centering
    the most likely tokens. It is the last processor: `transformers` adds its own processors before
    it, but none for sampling.
    """

    def __init__(self, config: RunConfig, uniforms: Tensor | None, token_count: int) -> None:
        self.token_ids: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.kept: list[KeptTokens] = []  # of each step
        self.top: list[TopKLogprobs] = []
        self._temperature, self._uniforms = config.temperature, uniforms
        self._token_count = token_count  # rows of the head behind them are padding
        self._keeps = [] if uniforms is None else keeps(config)
        self._top = 0 if uniforms is None else min(config.score_centering or 0, token_count)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose a token for each row of ``scores`` [N, V], and forbid all others in place."""
        parts = []
        step = len(self.token_ids)
        for rows in torch.arange(len(scores)).split(max(1, _AT_ONCE // scores.shape[-1])):
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            uniforms = None if self._uniforms is None else self._uniforms[span, step]
            of_tokens = scores[span, : self._token_count]
            chosen = choose(of_tokens, self._temperature, uniforms, self._keeps)
            parts.append((*chosen[:2], *self._recorded(chosen[2])))
        token_ids, logprobs, kept, *top = map(torch.cat, zip(*parts, strict=True))
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        if self._keeps:
            offsets = pad(kept.sum(1).cumsum(0), (1, 0))
            self.kept.append(KeptTokens(kept.nonzero()[:, 1].int(), offsets).to("cpu"))
        if self._top:
            self.top.append(TopKLogprobs(*top).to("cpu"))
        return scores.fill_(-torch.inf).scatter_(1, token_ids[:, None], 0.0)

    def _recorded(self, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which tokens [N, V] were kept, and the most likely; [N, 0] what nobody needs."""
        top = logprobs.topk(self._top)
        ids = top.indices.int().where(top.values > -torch.inf, -1)
        whole = None if self._keeps else 0
        return logprobs[:, :whole] != -torch.inf, ids, top.values


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
