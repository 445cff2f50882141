"""The policy that a run begins with: a model, new, given or resumed, with its adapter if any."""

from pathlib import Path
from typing import Any

import torch

from fastrl import command_start
from fastrl.train import checkpoint
from fastrl.train.config import RunConfig
from fastrl.train.loading import load
from fastrl.train.run_log import RunLog
from fastrl.train.warm_start import frozen_head, warm_start_steps

#: The directory of the run's initial model, which is the reference or is below an adapter.
INITIAL = "initial"


def load_policy(
    config: RunConfig, device: torch.device, log: RunLog, resumed_from: Path | None
) -> tuple[Any, Any]:
    """Return the model, new or from a checkpoint, with its adapter if any, and its tokenizer."""
    if resumed_from is not None:
        with checkpoint.reading(resumed_from):
            checkpoint.verify(resumed_from)
    if config.lora_rank is None:
        if resumed_from is None:
            model, tokenizer = load(config.model, device, config.dtype)
        else:
            with checkpoint.reading(resumed_from):
                model, tokenizer = load(str(resumed_from), device, config.dtype)
        for parameter in frozen_head(model, config):
            parameter.requires_grad_(False)
        return model, tokenizer
    try:
        with command_start.quiet():
            from fastrl.train.adapters import attach
    except ModuleNotFoundError as error:
        raise ValueError("lora_rank needs peft: pip install 'fastrl-kernels[lora]'") from error
    initial = log.directory / INITIAL
    base = str(initial) if begins_changed(config) else str(config.model)
    source = base if resumed_from is not None else config.model
    model, tokenizer = load(source, device, config.dtype, nf4=config.weights == "nf4")
    if not begins_changed(config):
        log.begun_with(base=checkpoint.fingerprint(model))
    adapted = attach(model, config, str(Path(base).resolve()) if Path(base).is_dir() else base)
    if resumed_from is not None:
        with checkpoint.reading(resumed_from):
            adapted.load_weights(resumed_from)
    return adapted, tokenizer


def save_base(model: Any, tokenizer: Any, directory: Path) -> None:
    """Save the weights below an adapter, and the tokenizer, as a model."""
    model.save_base(directory)
    tokenizer.save_pretrained(directory)


def begins_changed(config: RunConfig) -> bool:
    """Return whether the run needs a copy of the weights that it begins with.

    They are new, or change before the first step, or another run will delete its checkpoint.
    """
    of_run = config.model is not None and Path(config.model).parent.name == "checkpoints"
    return config.model is None or of_run or warm_start_steps(config) > 0
