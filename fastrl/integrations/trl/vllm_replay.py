"""What the vLLM engine of a TRL trainer kept, as vLLM 0.28 returns it, or held most likely."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.top_k_logprobs import TopKLogprobs

if TYPE_CHECKING:
    from fastrl.integrations.trl.handle import Choices

#: The arguments of `use_fastrl` where the sampler cannot be recorded.
UNRECORDED = "replay_kept_tokens must be False and score_centering None"

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

#: The `generation_kwargs` that change no logits but those of the tokens that are taken out.
_ALLOWED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "detokenize",
        "skip_special_tokens",
    }
)


@contextlib.contextmanager
def vllm_returns_kept_tokens() -> Iterator[None]:
    """Let trainers that are made in this block start vLLM with `return_sampling_mask=True`.

    TRL starts a colocated engine when the trainer is made, and cannot pass this flag. Such an
    engine runs on GPUs alone, and needs a `top_k` above 0.

    Returns:
        A context manager.

    Raises:
        ValueError: vLLM is missing, or older than 0.28.

    Examples:
        >>> from fastrl.integrations.trl import use_fastrl, vllm_returns_kept_tokens
        >>> with vllm_returns_kept_tokens():  # doctest: +SKIP
        ...     trainer = GRPOTrainer(model=model, args=config, ...)
        >>> use_fastrl(trainer, replay_kept_tokens=True)  # doctest: +SKIP
    """
    from trl.generation import vllm_generation

    needed = "vllm_returns_kept_tokens needs vLLM 0.28 or later"
    try:
        import vllm
    except ModuleNotFoundError as error:
        raise ValueError(f"{needed}, which is not installed") from error
    if "return_sampling_mask" not in {field.name for field in fields(vllm.EngineArgs)}:
        raise ValueError(f"{needed}, got {vllm.__version__}: its engine has no such flag")
    own, before = vllm_generation.LLM, os.environ.get(_RUNNER)
    vllm_generation.LLM = functools.partial(own, return_sampling_mask=True)
    os.environ[_RUNNER] = "1"  # the one that returns the sets
    try:
        yield
    finally:
        vllm_generation.LLM = own
        if before is None:
            os.environ.pop(_RUNNER, None)
        else:
            os.environ[_RUNNER] = before


def lacks_sets(trainer: Any) -> bool:
    """Return whether a trainer's colocated engine was started without the flag."""
    config = trainer.vllm_generation.llm.llm_engine.model_config
    return not getattr(config, "return_sampling_mask", False)


class VllmRecorder:
    """The completions of one call of TRL's vLLM engine, with what it returns of each token."""

    def __init__(self, generation: Any, temperature: float, choices: Choices) -> None:
        """Refuse options with which the sampler's distribution does not follow from the record.

        Args:
            generation: TRL's `VLLMGeneration`.
            temperature: the temperature of the trainer's log-probabilities.
            choices: which say what is recorded.

        Raises:
            ValueError: an option has a value that cannot be recorded.
        """
        self._llm, self._done, self._choices = generation.llm, list[Any](), choices
        options, top_k = generation.generation_kwargs, choices.score_centering
        own = options.get("temperature", generation.temperature)
        if own < 0.01:  # vLLM raises lower ones to it, or takes the likeliest token
            raise ValueError(f"{UNRECORDED} with a temperature below 0.01 in vLLM, got {own}")
        if top_k is not None:
            most = self._llm.llm_engine.model_config.max_logprobs
            if 0 <= most < top_k:
                raise ValueError(
                    f"score_centering must be at most {most}, the max_logprobs of vLLM, got "
                    f"{top_k}: make the trainer while `trl.generation.vllm_generation.LLM` is "
                    f"`functools.partial(LLM, max_logprobs={top_k})`"
                )
        if not choices.replay_kept_tokens:
            return
        for name, neutral in (("repetition_penalty", 1.0), ("structured_outputs_regex", None)):
            if (value := getattr(generation, name)) != neutral:
                raise ValueError(
                    f"{name} must be {neutral} with replay_kept_tokens, got {value!r}: it changes "
                    "the logits of the tokens that vLLM keeps"
                )
        if others := sorted(options.keys() - _ALLOWED):
            raise ValueError(
                f"generation_kwargs must not have {', '.join(others)} with replay_kept_tokens and "
                "vLLM: only options that leave the logits of kept tokens are allowed, "
                f"{', '.join(sorted(_ALLOWED))}"
            )
        if own != temperature:
            raise ValueError(
                f"generation_kwargs must have the trainer's temperature {temperature} with "
                f"replay_kept_tokens, got {own}"
            )
        if (top_k := options.get("top_k", generation.top_k) or 0) <= 0:
            raise ValueError(
                f"top_k must be above 0 with replay_kept_tokens and vLLM, got {top_k}: vLLM "
                "returns at most top_k tokens, and 1000 hardly changes what top_p keeps"
            )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the engine returns, and return what TRL asks for."""
        own, before = self._llm.generate, self._llm.__dict__.get("generate")
        top_k = self._choices.score_centering

        def generate(*arguments: Any, sampling_params: Any, **options: Any) -> Any:
            if top_k is not None:
                sampling_params.logprobs = top_k
            outputs = own(*arguments, sampling_params=sampling_params, **options)
            done = [one for output in outputs for one in output.outputs]
            self._done += map(copy.copy, done)
            for one in done if top_k is not None else ():  # TRL takes the likeliest of a place
                places = zip(one.token_ids, one.logprobs, strict=True)
                one.logprobs = [{token: found[token]} for token, found in places]
            return outputs

        self._llm.generate = generate
        try:
            yield
        finally:
            del self._llm.generate
            if before is not None:
                self._llm.generate = before

    def check(self, completions: Sequence[Sequence[int]]) -> None:
        """Raise a `RuntimeError` if the completions are not those of the engine."""
        if [list(one.token_ids) for one in self._done] != [list(ids) for ids in completions]:
            raise RuntimeError(
                f"{UNRECORDED} with these {len(completions)} completions, and the "
                f"{len(self._done)} that vLLM generated are others, or in another order"
            )

    def top_k(self) -> TopKLogprobs:
        """Return the most likely tokens of completions, `[B, C, K]`."""
        count = self._choices.score_centering or 0
        found = TopKLogprobs.from_vllm(self._done, top_k=count)
        return TopKLogprobs(*(x.reshape(len(self._done), -1, count) for x in found))

    def sets(self, _: Sequence[Sequence[int]]) -> list[KeptTokens]:
        """Return the sets of each completion.

        Raises:
            RuntimeError: the engine returned no sets.
        """
        for one in self._done:
            if one.token_ids and getattr(one, "sampling_mask", None) is None:
                raise RuntimeError("vLLM returned a completion without the tokens that it kept")
        return [KeptTokens.from_vllm([one]) for one in self._done]
