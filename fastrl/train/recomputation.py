"""Activations that are recomputed, tiled or moved to the host instead of kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE, Span, make_layout
from fastrl.train.config import RunConfig
from fastrl.train.loading import autocast


def save_memory(model: Any, config: RunConfig) -> None:
    """Set up gradient checkpointing, MLP tiles and attention according to the settings.

    Afterwards the model is in training mode, because `transformers` checkpoints only then, and all
    dropout is 0, because the loss must see the probabilities of the sampling.

    Raises:
        ValueError: A setting has no effect on this model or is not available, or the model stays
            random.
    """
    without_dropout(model)
    if config.offload_checkpoints and model.device.type == "cpu":
        raise ValueError("offload_checkpoints must be off on the CPU: there is no other memory")
    if config.mlp_tile is not None:
        tile_mlps(model, config.mlp_tile)
    try:
        model.set_attn_implementation(config.attention)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"attention {config.attention!r} is not available for this model: {error}"
        ) from error
    if config.gradient_checkpointing:
        try:
            checkpoint_layers(model)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"gradient_checkpointing is not supported by this model: {error}"
            ) from error
    try:
        recomputed = _recomputes(model, config)
    except (NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"attention {config.attention!r} cannot train this model on {model.device}: {reason}"
        ) from error
    if config.gradient_checkpointing and not recomputed:
        raise ValueError(
            "gradient_checkpointing has no effect on this model: no layer is recomputed"
        )


def checkpoint_layers(model: Any) -> None:
    """Let autograd keep only the inputs of the layers, and recompute the layers."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def without_dropout(model: Any) -> None:
    """Set every dropout probability to 0, in modules and configuration, and the training mode."""
    for owner in (*model.modules(), model.config, model.config.get_text_config()):
        if isinstance(owner, nn.modules.dropout._DropoutNd):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(owner, name, 0.0)
    model.train()


def tile_mlps(model: Any, tokens: int) -> None:
    """Run the MLP of each layer on ``tokens`` tokens at a time, and recompute it by tiles.

    RMS norms are recomputed, too, because `transformers` keeps their normalized input, and a
    float32 copy of a bfloat16 input.

    Raises:
        ValueError: No MLP of the model works on each token by itself.
    """
    tiled = [module for name, module in model.named_modules() if _is_mlp(name, module)]
    if not tiled:
        raise ValueError("mlp_tile must be null for this model: no layer has a plain MLP")
    for module in tiled:
        module.forward = partial(_in_tiles, module.forward, tokens=tokens)
    hidden = model.config.get_text_config().hidden_size
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # over whole states, or over heads
            module.forward = partial(_in_tiles, module.forward, tokens=tokens, width=hidden)


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Return whether a module is a layer's MLP of linear layers, which treats tokens one by one."""
    if name.rpartition(".")[2] != "mlp":
        return False
    inside = module.modules()  # an adapter's layers contain the linear ones
    return any(isinstance(part, nn.Linear) for part in inside) and not any(
        hasattr(module, part) for part in ("experts", "gate", "router")
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # of GPT-2


def _in_tiles(
    forward: Callable[[Tensor], Tensor], states: Tensor, *, tokens: int, width: int | None = None
) -> Tensor:
    """Call ``forward`` on states ``[..., H]`` of at most ``tokens`` tokens at a time.

    A token has one row, or with ``width`` as many rows (its heads) as fill that width.
    """
    rows = max(1, tokens * (states.shape[-1] if width is None else width) // states.shape[-1])
    if states[..., 0].numel() <= rows:
        return forward(states)
    tiles = states.flatten(0, -2).split(rows)
    if torch.is_grad_enabled():
        parts = [checkpoint(forward, tile, use_reentrant=False) for tile in tiles]
    else:
        parts = [forward(tile) for tile in tiles]
    return torch.cat(parts).view(*states.shape[:-1], -1)


def _recomputes(model: Any, config: RunConfig) -> bool:
    """Return whether any layer runs again in the backward through a few tokens.

    Raises:
        ValueError: Two passes over the same tokens differ.
    """
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    # tiles are recomputed whether their layer is or not
    layers = [m for name, m in model.named_modules() if ".mlp" not in name and _is_linear(m)]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(1, 4, dtype=torch.long, device=model.device),
        "use_cache": False,
    }
    if config.attention == BY_SEQUENCE:
        inputs["sequences"] = make_layout([Span(0, 4)], model.device)
    try:
        with autocast(config, model.device):
            logits, again = (model(**inputs).logits for _ in range(2))
        if not torch.allclose(logits, again, rtol=1e-3, atol=1e-3):
            raise ValueError("model must compute the same twice, but some dropout cannot be off")
        before = calls
        logits.float().sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    return calls > before
