"""The settings of the rewards."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastrl.train.settings.options import option

#: The ready functions, by the names that ``--reward`` takes.
READY = (
    "exact_match",
    "number_equality",
    "regular_expression",
    "format",
    "length_penalty",
    "overlong",
)
#: The name of the reward model that ``--reward_model`` names.
REWARD_MODEL = "reward_model"
#: Reasoning, then an answer, and nothing else.
THINK_AND_ANSWER = (
    r"<think>((?!</?think>).)*</think>\s*<answer>((?!</?answer>).)*</answer>"  # each block once
)
# Settings that only one ready function reads.
_READ_BY = {
    "reward_pattern": "regular_expression",
    "reward_format": "format",
    "overlong_buffer": "overlong",
    "reward_model": REWARD_MODEL,
}


@dataclass
class RewardSettings:
    """What completions are rewarded for."""

    reward: tuple[str, ...] = option(
        ("exact_match",),
        f"Reward functions: {', '.join(READY)}, {REWARD_MODEL}, or module:function that takes "
        "(prompts, completions, records) and returns a number for each completion.",
        by_task={"long_addition": ("fastrl.train.data.long_addition:right_sum",)},
    )
    reward_weights: tuple[float, ...] = option(
        (),
        "Weights of the functions in their sum, by default 1 each; 0: the function is only logged.",
    )
    reward_model: str | None = option(
        None,
        f"{REWARD_MODEL}: a sequence classification model of one label, as a directory or hub "
        "name, or the directory of a run of fastrl.train.reward.",
    )
    reward_pattern: str | None = option(
        None,
        "regular_expression: what must be found in a completion whose record has no pattern.",
    )
    reward_format: str = option(
        THINK_AND_ANSWER, "format: the regular expression of a whole completion."
    )
    overlong_buffer: int | None = option(
        None,
        "overlong: the last tokens before max_new_tokens, over which the reward falls from 0 to "
        "-1; by default a fifth of max_new_tokens.",
        least=1,
    )
    reward_workers: int = option(
        0,
        "Processes that call each module:function, with one completion at a time; 0: it is called "
        "in the run's process, with all completions at once.",
        least=0,
        result=False,
    )
    # Whatever these two change was an error before, so a run that failed resumes with others.
    reward_timeout: float | None = option(
        None,
        "Seconds that a function may take for a completion; calls of a module:function are then "
        "made in a process of their own.",
        above=0,
        result=False,
    )
    reward_failed: float | None = option(
        None,
        "Reward of a function that hangs, raises or returns NaN for a completion, instead of "
        "ending the run.",
        result=False,
    )

    def check_rewards(self) -> None:
        """Raise a `ValueError` that names a setting of the rewards that cannot be used."""
        for name in self.reward:
            module, colon, function = name.partition(":")
            if name not in (*READY, REWARD_MODEL) and not (module and colon and function):
                raise ValueError(
                    f"reward must be one of {', '.join(READY)}, {REWARD_MODEL}, or look like "
                    f"module:function, got {name!r}"
                )
        if not self.reward or len(set(self.reward)) < len(self.reward):
            raise ValueError(f"reward must name different functions, got {list(self.reward)}")
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(
                f"reward_weights must have a number for each of {len(self.reward)} functions, got "
                f"{list(self.reward_weights)}"
            )
        if self.reward_weights and not any(self.reward_weights):
            raise ValueError("reward_weights must not all be 0")
        if REWARD_MODEL in self.reward and self.reward_model is None:
            raise ValueError("reward_model must name a model with reward reward_model, got null")
        for setting, function in _READ_BY.items():
            given = getattr(self, setting) != getattr(type(self), setting)
            if given and function not in self.reward:
                raise ValueError(f"{setting} must be used with reward {function}")


def reward_names(names: str | Iterable[Any]) -> tuple[Any, ...]:
    """The names of reward functions; of a ready one its short name.

    Settings of earlier versions have one string, ``"fastrl.train.rewards:exact_match"``.
    """
    listed = (names,) if isinstance(names, str) else tuple(names)
    shortened = {f"fastrl.train.rewards:{name}": name for name in READY}
    return tuple(shortened.get(n, n) if isinstance(n, str) else n for n in listed)
