"""Hooks on modules, of the user and of the libraries that shard and wrap models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Packages whose hooks are part of a forward; weight normalization is in torch.nn.utils.
_RUNTIMES = (
    "torch.distributed.",
    "torch.nn.utils.",
    "torch.utils.",  # FlopCounterMode and such
    "accelerate.",
    "deepspeed.",
    "trl.",
)


def has_own_hooks(module: nn.Module | None) -> bool:
    """Return whether a module has hooks of the user's, not of torch.distributed, DeepSpeed, ...

    Args:
        module: A module, or None for hooks on all modules (`register_module_forward_hook`).
    """
    return any(_is_the_users(hook) for hooks in _hooks(module) for hook in hooks.values())


def has_row_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that may depend on the rows of a batch.

    Those of transformers are of single tokens, except NEFTune's.
    """
    found = (hook for hooks in _hooks(module) for hook in hooks.values() if _is_the_users(hook))
    return any(
        getattr(hook, "__name__", "").startswith("neftune")
        or not str(getattr(hook, "__module__", "")).startswith("transformers.")
        for hook in found
    )


@contextlib.contextmanager
def runtime_hooks_only(module: nn.Module | None) -> Iterator[None]:
    """Take the user's hooks off a module, or those on all modules."""
    if not has_own_hooks(module):
        yield
        return
    saved = [(hooks, dict(hooks)) for hooks in _hooks(module)]
    try:
        for hooks, all_hooks in saved:
            for key, hook in all_hooks.items():
                if _is_the_users(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, all_hooks in saved:
            added = {key: hook for key, hook in hooks.items() if key not in all_hooks}
            hooks.clear()
            hooks.update(all_hooks | added)


def _hooks(module: nn.Module | None) -> list[dict[int, Any]]:
    if module is None:
        return [getattr(nn.modules.module, f"_global{kind}") for kind in _KINDS]
    return [module.__dict__[kind] for kind in _KINDS if kind in module.__dict__]


def _is_the_users(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    home = f"{getattr(function, '__module__', None) or type(function).__module__}."
    return not home.startswith(_RUNTIMES)
