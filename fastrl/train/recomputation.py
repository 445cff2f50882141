"""Activations that are recomputed, tiled or moved to the host instead of being kept."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fastrl.train.attention import BY_SEQUENCE, Span, make_layout
from fastrl.train.memory_settings import MemorySettings


def save_memory(model: Any, config: MemorySettings) -> None:
    """Set up gradient checkpointing, MLP tiles and attention, as the settings say.

    The model is in training mode afterwards, since `transformers` checkpoints only then; all
    dropout is 0, or the loss would see other probabilities than the sampling.

    Raises:
        ValueError: A setting would have no effect on this model, or is not available.
    """
    without_dropout(model)
    if config.offload_checkpoints and not config.gradient_checkpointing:
        raise ValueError("offload_checkpoints must be off without gradient_checkpointing")
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
        # transformers 5 has renamed the method
        enable = getattr(model, "activation_checkpointing_enable", None)
        try:
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"gradient_checkpointing is not supported by this model: {error}"
            ) from error
        if not _recomputes(model, config):
            raise ValueError(
                "gradient_checkpointing has no effect on this model: no layer is recomputed"
            )


def without_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0, in modules, attributes and configuration."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "hidden_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.train()


def tile_mlps(model: nn.Module, tokens: int) -> None:
    """Run the MLP of each layer on ``tokens`` tokens at a time, and recompute it by tiles.

    So are the RMS norms: those of `transformers` keep what they normalized, and a float32 copy of a
    bfloat16 input.

    Raises:
        ValueError: No MLP of the model works on each token by itself.
    """
    tiled = [module for name, module in model.named_modules() if _is_mlp(name, module)]
    if not tiled:
        raise ValueError("mlp_tile must be null for this model: no layer has a plain MLP")
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for module in tiled + norms:
        module.forward = partial(_in_tiles, module.forward, tokens)


def offloaded(config: MemorySettings) -> AbstractContextManager[Any]:
    """Where the model's forward moves what autograd keeps to pinned host memory, if it does.

    With gradient checkpointing that is the input of each layer.
    """
    return save_on_cpu(pin_memory=True) if config.offload_checkpoints else nullcontext()


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Whether a module is a layer's MLP of linear layers, which treats each token alone."""
    if name.rpartition(".")[2] != "mlp":
        return False
    inside = module.modules()  # an adapter's layers hold the linear ones
    return any(isinstance(part, nn.Linear) for part in inside) and not any(
        hasattr(module, part) for part in ("experts", "gate", "router")
    )


def _in_tiles(forward: Callable[[Tensor], Tensor], tokens: int, states: Tensor) -> Tensor:
    """Call ``forward`` on ``tokens`` tokens of states ``[B, T, ...]`` at a time."""
    if states.shape[1] <= tokens:
        return forward(states)
    tiles = states.split(tokens, dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([forward(tile) for tile in tiles], 1)
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], 1)


def _recomputes(model: Any, config: MemorySettings) -> bool:
    """Whether any layer runs again in a backward through a few tokens."""
    calls: dict[nn.Module, int] = {}

    def count(module: nn.Module, *_: Any) -> None:
        calls[module] = calls.get(module, 0) + 1

    layers = [m for m in model.modules() if next(m.children(), None) is None]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    try:
        ids = torch.zeros(1, 4, dtype=torch.long, device=model.device)
        extra = {}
        if config.attention == BY_SEQUENCE:
            extra["sequences"] = make_layout([Span(0, 4)], model.device)
        model(input_ids=ids, use_cache=False, **extra).logits.float().sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    return any(times > 1 for times in calls.values())
