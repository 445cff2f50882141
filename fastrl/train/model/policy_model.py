"""The model to train: its dtype, its adapter, what of it is frozen, and where its base is kept."""

from pathlib import Path
from typing import Any

import torch

from fastrl.train import extras
from fastrl.train.config import RunConfig
from fastrl.train.model import loading, stored_model
from fastrl.train.model.stored_model import BASE, FINGERPRINT, fingerprint, is_fingerprint
from fastrl.train.run import checkpoint, checksums
from fastrl.train.run.run_log import RunLog
from fastrl.train.warm_start import warm_start_steps


def load_policy(
    config: RunConfig, device: torch.device, log: RunLog, resumed_from: Path | None
) -> tuple[Any, Any]:
    """The model, new or of a checkpoint, and its tokenizer.

    With ``lora_rank`` it is an `AdaptedModel`, of which checkpoints hold the adapter.

    Args:
        config: Names the model, its dtype, the adapter and what is frozen.
        device: The device of the model.
        log: Names the directory of the run.
        resumed_from: The checkpoint to resume from, or None.

    Raises:
        ValueError: There is no such model, it is damaged, or nothing of it would be trained.
    """
    how = {
        "dtype": getattr(torch, config.weights),
        "trust_remote_code": config.trust_remote_code,
    }
    if resumed_from is None and _names_adapter(config):
        log.say(f"{config.model} is an adapter: the run starts from its base with it merged")
    if resumed_from is None and config.model is not None:
        _check_files(Path(config.model))
    if config.lora_rank is None:
        if resumed_from is None:
            model, tokenizer = loading.load(config.model, device, **how)
        else:
            with checkpoint.reading(resumed_from):
                model, tokenizer = loading.load(str(resumed_from), device, **how)
        for parameter in loading.frozen_head(model, config):
            parameter.requires_grad_(False)
    else:
        model, tokenizer = _adapted(config, device, log, resumed_from, how)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("freeze_head must leave a weight to train, but the model has no other")
    return model, tokenizer


def keep_base(model: Any, tokenizer: Any, config: RunConfig, run: Path) -> None:
    """Store the weights below an adapter with the run; if ``config.model`` has them, their sum."""
    if config.lora_rank is None:
        return
    if not _is_changed(config):
        (run / FINGERPRINT).write_text(fingerprint(model.base_weights().items()) + "\n")
        return

    def save(directory: Path) -> None:
        model.save_base(directory)
        tokenizer.save_pretrained(directory)

    stored_model.store(run / BASE, save)


def _adapted(
    config: RunConfig,
    device: torch.device,
    log: RunLog,
    resumed_from: Path | None,
    how: dict[str, Any],
) -> tuple[Any, Any]:
    extras.require("peft", extra="lora", setting="lora_rank")
    from fastrl.train.model import adapters

    source, kept = config.model, log.directory / BASE
    if source is None or (resumed_from is not None and kept.is_dir()) or _is_changed(config):
        base = str(kept.resolve())
        if resumed_from is not None:
            stored_model.verify(kept)
            source = base
    else:
        base = str(Path(source).resolve()) if Path(source).is_dir() else source
    model, tokenizer = loading.load(source, device, **how)
    began_with = log.directory / FINGERPRINT
    recorded = began_with.read_text().strip() if began_with.is_file() else ""
    if (
        resumed_from is not None
        and is_fingerprint(recorded)  # not one of an earlier version
        and recorded != fingerprint(model.named_parameters())
    ):
        raise ValueError(
            f"model must have the weights with which the run began, but {source} has changed"
        )
    adapted = adapters.attach(model, config, base)
    if resumed_from is not None:
        with checkpoint.reading(resumed_from):
            adapted.load_weights(resumed_from)
    return adapted, tokenizer


def _check_files(directory: Path) -> None:
    """Raise a `ValueError` if a directory has checksums and a file is damaged."""
    try:
        if directory.is_dir():
            checksums.verify(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {directory} is damaged: {error}") from error


def _is_changed(config: RunConfig) -> bool:
    """Whether the run starts from other weights than those that ``config.model`` names."""
    return config.model is None or warm_start_steps(config) > 0 or _names_adapter(config)


def _names_adapter(config: RunConfig) -> bool:
    try:
        return config.model is not None and loading.is_adapter(config.model)
    except (OSError, ValueError) as error:  # huggingface_hub's type depends on its version
        raise ValueError(
            f"model must be a causal LM with its tokenizer, got {config.model!r}: "
            f"{loading.reason(error, str(config.model))}"
        ) from error
