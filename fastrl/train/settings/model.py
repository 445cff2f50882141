"""The settings that name the model."""

from dataclasses import dataclass

from fastrl.train.settings.options import option


@dataclass
class ModelSettings:
    """The model."""

    model: str | None = option(
        None, "A causal LM, as a directory or hub name; by default, a small new model."
    )
    trust_remote_code: bool = option(
        False, "Run code that the model or its tokenizer brings along; it can do anything."
    )
