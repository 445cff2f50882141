"""The settings of what a person watches; none changes a result."""

from dataclasses import dataclass

from fastrl.train.settings.options import option

TRACKERS = ("tensorboard", "wandb")


@dataclass
class TrackingSettings:
    """Where metrics go besides metrics.jsonl, and how many completions are shown."""

    track: tuple[str, ...] = option(
        (),
        "tensorboard: RUN/tensorboard; wandb: Weights & Biases. Each needs the extra of its name.",
        result=False,
    )
    wandb_project: str = option("fastrl", "Project of the run at W&B.", result=False)
    sample_every: int = option(
        10,
        "Steps between sample completions on screen and in samples.jsonl; 0: never.",
        least=0,
        result=False,
    )
    samples: int = option(
        3, "How many completions: the best, the worst, then random ones.", least=1, result=False
    )

    def check_tracking(self) -> None:
        """Raise a `ValueError` if a tracker does not exist or the project has no name."""
        for name in self.track:
            if name not in TRACKERS:
                raise ValueError(f"track must be any of {', '.join(TRACKERS)}, got {name!r}")
        if len(set(self.track)) < len(self.track):
            raise ValueError(f"track must name each tracker once, got {' '.join(self.track)}")
        if not self.wandb_project.strip():
            raise ValueError(f"wandb_project must be a name, got {self.wandb_project!r}")
