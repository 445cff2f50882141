"""The settings of the optimization."""

from dataclasses import dataclass
from typing import Literal, get_args

from fastrl.train.settings.options import option

Schedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
#: Schedules whose rate depends on how many steps the run has.
_ENDING = {*get_args(Schedule)} - {"constant", "inverse_sqrt"}


@dataclass
class LearningSettings:
    """How the model learns from the samples."""

    steps: int = option(
        100,
        "Rounds of sampling and learning.",
        least=1,
        result=False,
        by_task={"long_addition": 60},
    )
    epochs: int = option(1, "Passes over the samples of a step.", least=1)
    minibatches: int = option(4, "Optimizer steps per pass.", least=1, by_task={"long_addition": 1})
    learning_rate: float = option(
        2e-4,
        "Learning rate of AdamW, after the warm-up.",
        above=0,
        by_task={"long_addition": 1e-4},
    )
    warmup_steps: int = option(5, "Steps over which the learning rate rises from 0.", least=0)
    schedule: Schedule = option(
        "constant", "The learning rate after the warm-up, by a schedule of transformers."
    )
    schedule_options: tuple[str, ...] = option(
        (), "What the schedule needs, as name=value: min_lr=1e-5, num_decay_steps=20, ..."
    )
    weight_decay: float = option(0.0, "Weight decay of AdamW.", least=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.", above=0)

    def check_learning(self) -> None:
        """Raise a `ValueError` if options of the schedule are not pairs, or have no use."""
        names = [pair.partition("=")[0] for pair in self.schedule_options]
        for pair, name in zip(self.schedule_options, names, strict=True):
            if not name.isidentifier() or pair == name:
                raise ValueError(f"schedule_options must be like min_lr=1e-5, got {pair!r}")
            if names.count(name) > 1:
                raise ValueError(f"schedule_options must have each name once, got {name} twice")
        if self.schedule == "constant" and names:
            raise ValueError(
                f"schedule_options must be used with another schedule than constant, got {names[0]}"
            )

    @property
    def ends(self) -> bool:
        """Whether the learning rate depends on ``steps``, which then cannot change."""
        return self.schedule in _ENDING
