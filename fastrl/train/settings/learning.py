"""The settings of the optimization."""

from dataclasses import dataclass

from fastrl.train.settings.options import option


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
    weight_decay: float = option(0.0, "Weight decay of AdamW.", least=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.", above=0)
