"""The tokens that a TRL trainer's sampler kept, from generation to the loss.

`transformers` samples from the tokens that its logits processors leave. One more processor at the
end records these sets; vLLM returns them (`vllm_replay.py`). TRL shuffles and splits them with the
rest of a batch, and log-probabilities are computed over them.
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
from fastrl.integrations.trl.rules import NOT_REPLAYED
from fastrl.integrations.trl.vllm_replay import VllmRecorder
from fastrl.ops.kept_tokens import KeptTokens

#: The key of the sets in a batch: a list of `KeptTokens`, one for each sequence.
KEPT = "kept_tokens"

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
    """A record of the sets of a trainer's completions, and of the batch that is scored.

    Attributes:
        methods: the replaced methods of the trainer, by name.
    """

    def __init__(self, trainer: Any) -> None:
        """Refuse a trainer whose sets cannot be recorded; nothing is changed yet.

        Raises:
            ValueError: TRL or `transformers` cannot keep the sets of this trainer's samples.
        """
        for rule in NOT_REPLAYED:
            if rule.applies is not None and rule.applies(trainer):
                raise ValueError(f"replay_kept_tokens does not support {rule.option}: {rule.note}")
        self._trainer = trainer
        self._temperature = trainer.temperature  # TRL also reads it once
        self._sets: Sequence[KeptTokens] | None = None
        self._completions: list[list[int]] = []  # those of the last generation
        self._undone = False
        used = [(trainer, _GENERATE), (trainer, _BATCH)]
        if not trainer.use_vllm:
            used.append((causal_model(trainer.model), _PROCESSORS))
        for owner, name in used:
            if not hasattr(owner, name):
                raise ValueError(
                    "replay_kept_tokens must be False with these versions of TRL and transformers: "
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
        """Score the sequences of a batch over its sets."""
        if KEPT not in inputs:
            raise ValueError(
                f"inputs must have {KEPT}, got {', '.join(inputs)}: replay_kept_tokens must be set "
                "before the completions are generated"
            )
        self._sets = inputs[KEPT]
        try:
            yield
        finally:
            self._sets = None

    def sets(self, sequences: int) -> Sequence[KeptTokens]:
        """Return the sets of the sequences that are scored."""
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
        self._sets = recorder.sets(completions)
        self._completions = [list(ids) for ids in completions]
        for sets, ids in zip(self._sets, self._completions, strict=True):
            _check_members(sets, ids)
        return generated

    def _recorder(self) -> _Recorder | VllmRecorder:
        if self._trainer.use_vllm:
            return VllmRecorder(self._trainer.vllm_generation, self._temperature)
        return _Recorder(causal_model(self._trainer.model), self._temperature)

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
                    f"replay_kept_tokens must be False with this {type(self._trainer).__name__}, "
                    f"whose {_BATCH} does not return the completions of its last generation in "
                    "their order"
                )
            return {**batch, KEPT: self.sets(len(rows))}
        finally:
            self._sets = None


def kept_of(sets: Sequence[KeptTokens], token_ids: Tensor) -> KeptTokens:
    """Return the sets of tokens `[B, T]`, which are empty behind the end of a sequence."""
    length = token_ids.shape[1]
    counts = [pad(one.counts(), (0, length - one.offsets.shape[0] + 1)) for one in sets]
    offsets = pad(torch.cat(counts).cumsum(0), (1, 0))
    return KeptTokens(torch.cat([one.token_ids for one in sets]), offsets).to(token_ids.device)


class _Recorder:
    """The last logits processor of a generation, which records the tokens that are left."""

    def __init__(self, causal: Any, temperature: float) -> None:
        self._causal, self._temperature = causal, temperature
        self._steps: list[KeptTokens] = []

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
        """Refuse options with which the sampler's distribution does not follow from the sets."""
        mode = config.get_generation_mode()
        if mode != "sample":
            raise ValueError(f"replay_kept_tokens must be False for a generation by {mode.value}")
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
        """Record the tokens that are left in logits `[B, V]`."""
        left = scores != -torch.inf
        left &= ~left.all(1, keepdim=True)  # all of them are an empty set
        offsets = pad(left.sum(1).cumsum(0), (1, 0))
        self._steps.append(KeptTokens(left.nonzero()[:, 1].int(), offsets).to("cpu"))
        return scores

    def sets(self, completions: Sequence[Sequence[int]]) -> list[KeptTokens]:
        """Return the sets of each completion."""
        count, steps = len(completions), len(self._steps)
        longest = max(map(len, completions))
        rows = {len(step.offsets) - 1 for step in self._steps}
        if rows != {count} or longest > steps:
            raise RuntimeError(
                f"replay_kept_tokens needs the sets of {count} completions of up to {longest} "
                f"tokens, and transformers sampled {steps} for {sorted(rows)} sequences"
            )
        every = KeptTokens.concatenate(self._steps)
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
