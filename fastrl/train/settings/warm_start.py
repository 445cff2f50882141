"""The settings of the supervised steps before the first one."""

from dataclasses import dataclass

from fastrl.train.settings.options import option

#: Supervised steps for a new model, by the embedded task.
NEW_MODEL_STEPS = {"arithmetic": 700, "long_addition": 1600}


@dataclass
class WarmStartSettings:
    """Supervised steps before the first step."""

    warm_start_steps: int | None = option(
        None,
        "Supervised steps on training prompts first; by default "
        + ", ".join(f"{steps} ({task})" for task, steps in NEW_MODEL_STEPS.items())
        + " for a new model, else none.",
        least=0,
    )
    warm_start_batch: int = option(
        128, "Prompts per supervised step.", least=1, by_task={"long_addition": 16}
    )
    warm_start_learning_rate: float = option(
        3e-3, "Learning rate of the supervised steps.", above=0
    )
