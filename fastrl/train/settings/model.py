"""The settings that name the model."""

from dataclasses import dataclass

from fastrl.train.settings.options import option


@dataclass
class ModelSettings:
    """The model."""

    model: str | None = option(
        None, "A causal LM, as a directory or hub name; by default, a small new model."
    )
