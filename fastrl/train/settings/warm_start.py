"""The settings of the supervised steps before the first one."""

from dataclasses import dataclass

from fastrl.train.settings.options import option


@dataclass
class WarmStartSettings:
    """Supervised steps before the first step."""

    warm_start_steps: int | None = option(
        None,
        "Supervised steps on training prompts first; by default only for a new model.",
        least=0,
    )
    warm_start_batch: int = option(
        128, "Prompts per supervised step.", least=1, by_task={"long_addition": 16}
    )
    warm_start_learning_rate: float = option(
        3e-3, "Learning rate of the supervised steps.", above=0
    )
