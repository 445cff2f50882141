"""What a TRL trainer's sampler kept or held most likely, from generation to the loss.

`transformers` samples from the tokens that its logits processors leave. One more processor at the
end records these sets, or the most likely tokens with their log-probabilities; vLLM returns them
(`vllm_replay.py`). TRL shuffles and splits them with the rest of a batch. Log-probabilities are
computed over the sets, and score centering takes the most likely tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastrl.integrations.transformers.wrappers import causal_model
from fastrl.integrations.trl.handle import Choices
from fastrl.integrations.trl.rules import NOT_REPLAYED, WITHOUT_SETS, refuse
from fastrl.integrations.trl.vllm_replay import UNRECORDED, VllmRecorder
from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.top_k_logprobs import TopKLogprobs

#: The key of the sets in a batch: a list of `KeptTokens`, one for each sequence.
KEPT = "kept_tokens"
#: Those of the sampler's most likely tokens, ids and log-probabilities `[B, C, K]`, if the loss of
#: a batch is centered.
TOP_K = ("rollout_top_k_ids", "rollout_top_k_logprobs")

_GENERATE = "_generate_single_turn"
_BATCH = "_generate_and_score_completions"
_PROCESSORS = "_get_logits_processor"

#: Processors of `transformers` that remove tokens without changing the logits of the others.
_TAKING_OUT = frozenset(
    {
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "LogitNormalization",
    }
)


class Replay:
    """A record of the sampler of a trainer's completions, and of the batch that is scored.

    Attributes:
        methods: the replaced methods of the trainer, by name.
    """

    def __init__(self, trainer: Any, choices: Choices) -> None:
        """Refuse a trainer whose sampler cannot be recorded; nothing is changed yet.

        Raises:
            ValueError: TRL or `transformers` cannot keep what the choices need of the samples.
        """
        refuse(trainer, *NOT_REPLAYED)
        if choices.replay_kept_tokens:
            refuse(trainer, WITHOUT_SETS)
        self._trainer, self._choices = trainer, choices
        kept = [KEPT] if choices.replay_kept_tokens else []
        self._keys = {*kept, *(TOP_K if choices.score_centering else ())}
        self._temperature = trainer.temperature  # TRL also reads it once
        self._sets: Sequence[KeptTokens] | None = None
        self._top_k: TopKLogprobs | None = None
        self._completions: list[list[int]] = []  # those of the last generation
        self._undone = False
        used = [(trainer, _GENERATE), (trainer, _BATCH)]
        if not trainer.use_vllm:
            used.append((causal_model(trainer.model), _PROCESSORS))
        for owner, name in used:
            if not hasattr(owner, name):
                raise ValueError(
                    f"{UNRECORDED} with these versions of TRL and transformers: "
                    f"{type(owner).__name__} has no {name}"
                )
        self._recorder()
        replaced = {_GENERATE: self._recorded, _BATCH: self._with_sets}
        self.methods = {
            name: functools.partial(method, getattr(trainer, name))
            for name, method in replaced.items()
        }

    def undo(self) -> None:
        """Let the replaced methods call TRL's from now on, wherever they are still called.

        TRL then generates anew, because the batches have old log-probabilities over their sets.
        """
        if not self._undone:
            self._undone, self._trainer._buffered_inputs = True, None

    @contextlib.contextmanager
    def of_batch(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Score the sequences of a batch over its sets, if there are any."""
        if missing := self._keys - inputs.keys():
            raise ValueError(
                f"inputs must have {', '.join(sorted(missing))}, got {', '.join(inputs)}: "
                "replay_kept_tokens and score_centering must be set before the completions are "
                "generated"
            )
        self._sets = inputs.get(KEPT)
        try:
            yield
        finally:
            self._sets = None

    def sets(self, sequences: int) -> Sequence[KeptTokens] | None:
        """Return the sets of the sequences that are scored, if they are wanted."""
        if KEPT not in self._keys:
            return None
        found = -1 if self._sets is None else len(self._sets)
        if self._sets is None or found != sequences:
            raise ValueError(
                "replay_kept_tokens must be False where log-probabilities are computed outside of "
                f"TRL's {_BATCH} and _compute_loss: {sequences} sequences without their sets"
            )
        return self._sets

    def _recorded(self, generate: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._undone:
            return generate(*arguments, **options)
        recorder = self._recorder()
        with recorder.recording():
            generated = generate(*arguments, **options)
        completions = generated[0] if isinstance(generated, tuple) else generated
        recorder.check(completions)
        self._completions = [list(ids) for ids in completions]
        if self._choices.score_centering:
            self._top_k = recorder.top_k()
        if KEPT in self._keys:
            self._sets = recorder.sets(completions)
            for sets, ids in zip(self._sets, self._completions, strict=True):
                _check_members(sets, ids)
        return generated

    def _recorder(self) -> _Recorder | VllmRecorder:
        if self._trainer.use_vllm:
            return VllmRecorder(self._trainer.vllm_generation, self._temperature, self._choices)
        return _Recorder(causal_model(self._trainer.model), self._temperature, self._choices)

    def _with_sets(self, generate: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._undone:
            return generate(*arguments, **options)
        try:
            batch = generate(*arguments, **options)
            rows = batch["completion_ids"].tolist()
            if len(rows) != len(self._completions) or any(
                row[: len(ids)] != ids for row, ids in zip(rows, self._completions, strict=True)
            ):
                raise ValueError(
                    f"{UNRECORDED} with this {type(self._trainer).__name__}, "
                    f"whose {_BATCH} does not return the completions of its last generation in "
                    "their order"
                )
            found: dict[str, Any] = {} if KEPT not in self._keys else {KEPT: self.sets(len(rows))}
            if self._top_k is not None:
                ids = batch["completion_ids"]
                after = (0, 0, 0, ids.shape[1] - self._top_k.token_ids.shape[1])
                padded = (pad(x, after, value=-1) for x in self._top_k.to(ids.device))
                found |= zip(TOP_K, padded, strict=True)
            return {**batch, **found}
        finally:
            self._sets = self._top_k = None


def kept_of(sets: Sequence[KeptTokens], token_ids: Tensor) -> KeptTokens:
    """Return the sets of tokens `[B, T]`, which are empty behind the end of a sequence."""
    length = token_ids.shape[1]
    counts = [pad(one.counts(), (0, length - one.offsets.shape[0] + 1)) for one in sets]
    offsets = pad(torch.cat(counts).cumsum(0), (1, 0))
    return KeptTokens(torch.cat([one.token_ids for one in sets]), offsets).to(token_ids.device)


class _Recorder:
    """The last logits processor of a generation, which records what it is given."""

    def __init__(self, causal: Any, temperature: float, choices: Choices) -> None:
        self._causal, self._temperature, self._choices = causal, temperature, choices
        self._steps: list[KeptTokens] = []
        self._top_k: list[tuple[Tensor, Tensor]] = []
        self._rows: list[int] = []  # the number of sequences of each step

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Put the recorder behind all processors of the model's `generate`."""
        causal = self._causal
        own = getattr(causal, _PROCESSORS)

        def processors(generation_config: Any, *arguments: Any, **options: Any) -> Any:
            made = own(generation_config, *arguments, **options)
            self._check(generation_config, made)
            made.append(self)
            return made

        causal.__dict__[_PROCESSORS] = processors
        try:
            yield
        finally:
            del causal.__dict__[_PROCESSORS]

    def _check(self, config: Any, processors: Sequence[Any]) -> None:
        """Refuse options with which the sampler's distribution does not follow from the record."""
        mode = config.get_generation_mode()
        if mode != "sample":
            raise ValueError(f"{UNRECORDED} for a generation by {mode.value}")
        if not self._choices.replay_kept_tokens:
            return
        temperature = 1.0
        for processor in processors:
            kind = type(processor).__name__
            if kind == "TemperatureLogitsWarper":
                temperature = processor.temperature
            elif kind not in _TAKING_OUT:
                raise ValueError(
                    f"replay_kept_tokens must be False with a {kind}, which changes the logits of "
                    "the tokens that it leaves: set none of repetition_penalty, generation_kwargs, "
                    "... that make one"
                )
        if temperature != self._temperature:
            raise ValueError(
                f"generation_kwargs must have the trainer's temperature {self._temperature} with "
                f"replay_kept_tokens, got {temperature}"
            )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record what is wanted of logits `[B, V]`."""
        self._rows.append(len(scores))
        if top_k := self._choices.score_centering:
            logprobs = scores.float().log_softmax(-1)
            found = logprobs.topk(min(top_k, scores.shape[1]))
            self._top_k.append((found.indices, found.values))
        if not self._choices.replay_kept_tokens:
            return scores
        left = scores != -torch.inf
        left &= ~left.all(1, keepdim=True)  # all of them are an empty set
        offsets = pad(left.sum(1).cumsum(0), (1, 0))
        self._steps.append(KeptTokens(left.nonzero()[:, 1].int(), offsets).to("cpu"))
        return scores

    def check(self, completions: Sequence[Sequence[int]]) -> None:
        """Refuse completions that are not those of the steps."""
        count, steps, longest = len(completions), len(self._rows), max(map(len, completions))
        if {*self._rows} != {count} or longest > steps:
            raise RuntimeError(
                f"{UNRECORDED} with {count} completions of up to {longest} tokens "
                f"where transformers sampled {steps} for {sorted({*self._rows})} sequences"
            )

    def top_k(self) -> TopKLogprobs:
        """Return the most likely tokens of completions, `[B, C, K]`."""
        fields = zip(*self._top_k, strict=True)
        return TopKLogprobs(*(torch.stack(field, 1) for field in fields))

    def sets(self, completions: Sequence[Sequence[int]]) -> list[KeptTokens]:
        """Return the sets of each completion."""
        count, every = len(completions), KeptTokens.concatenate(self._steps)
        return [
            every.take(torch.arange(len(ids)) * count + row) for row, ids in enumerate(completions)
        ]


def _check_members(sets: KeptTokens, ids: list[int]) -> None:
    """Raise a `RuntimeError` if the set of a token of a completion lacks this token."""
    lacking = sets.lacking(torch.tensor(ids, dtype=torch.int64)).nonzero()
    if lacking.numel():
        place = int(lacking[0])
        raise RuntimeError(
            f"replay_kept_tokens found a token that its set lacks, {ids[place]} at place {place} "
            "of a completion: generation_kwargs must have no eos_token_id, and completions must be "
            "those that were sampled"
        )
