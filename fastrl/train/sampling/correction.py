"""The importance weights of tokens whose sampler is not exactly the trainer's policy."""

from fastrl import RolloutCorrection
from fastrl.train.config import RunConfig


def rollout_correction(config: RunConfig) -> RolloutCorrection | None:
    """The importance weights that ``config.rollout_correction`` asks for.

    ``"auto"`` is ``"truncate"`` where the sampler's log-probabilities can differ from the
    trainer's: in bfloat16, whose rounding depends on the shapes, and with another engine.
    """
    kind = config.rollout_correction
    if kind == "auto":
        bfloat16 = "bfloat16" in (config.precision, config.weights)
        kind = "truncate" if bfloat16 or config.sampler != "transformers" else "none"
    if kind == "none":
        return None
    return RolloutCorrection(kind=kind, level="token", high=2.0)
