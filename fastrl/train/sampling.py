"""Sampling completions by `generate` of `transformers`, by vLLM, or by the user's own rollout."""

import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastrl import RolloutCorrection
from fastrl.train import transformers_sampler, vllm_sampler
from fastrl.train.config import RunConfig
from fastrl.train.endings import Endings
from fastrl.train.own_completions import checked_completion
from fastrl.train.prompts import Prompt
from fastrl.train.rollout import Completion, Rollout, rollout_of

#: Completes token ids.
Complete = Callable[[list[list[int]]], list[Completion]]
#: A rollout: takes prompts, completions per prompt, a function that completes ids, the tokenizer.
#: It returns None in place of a completion that failed, which is left out.
RolloutFunction = Callable[[list[Prompt], int, Complete, Any], list[Completion | None]]


class Sampler:
    """A sampler of completions, by the engine or the function that the settings name.

    Raises:
        ValueError: A setting does not fit the model, its tokenizer or the engine, or the engine is
            not installed.
    """

    def __init__(self, model: Any, tokenizer: Any, config: RunConfig) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self.endings = Endings(model, tokenizer, config)
        by_vllm = config.sampler == "vllm"
        engine = vllm_sampler.VllmEngine if by_vllm else transformers_sampler.TransformersEngine
        self.engine = engine(model, tokenizer, config, self.endings)
        self._own: RolloutFunction | None = None  # the user's, in place of one completion each
        if config.sampler not in ("vllm", "transformers"):
            self._own = import_function(config.sampler, "sampler")

    def sample(self, prompts: list[Prompt], group_size: int) -> tuple[Rollout, list[str | None]]:
        """Sample ``group_size`` completions of each prompt.

        Returns:
            The rollout and the completions as strings, with special tokens, but without the end
            token; completions of a prompt are consecutive. None is a completion that
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
