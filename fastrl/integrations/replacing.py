"""Replace functions of another package wherever it has loaded them, and restore them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastrl.integrations.undoing import Undoable


class Replacement(NamedTuple):
    """A function of a package and what replaces it.

    Attributes:
        module: the module that defines it, `package.some.module`.
        name: its name there.
        function: ours, with the same parameters and defaults.
        optional: True if some versions of the package do not have it.
    """

    module: str
    name: str
    function: Callable[..., Any]
    optional: bool = False


#: our functions that are in use at the moment -> the package's functions that they replace
_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {}


def original(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the package's function that ours replaces at the moment, or None."""
    return _REPLACED.get(function)


class Replaced(Undoable):
    """Functions of a package that run on fastrl until `undo()` or the end of a `with` block.

    Attributes:
        names: `module.name` of what was replaced.
    """

    def __init__(
        self,
        package: str,
        replacements: Sequence[Replacement],
        *,
        registries: tuple[str, ...] = (),
    ) -> None:
        self._package, self._registries = package, registries
        found = [(item, _theirs(package, item)) for item in replacements]
        self._pairs = [(theirs, item.function) for item, theirs in found if theirs is not None]
        self.names = tuple(f"{item.module}.{item.name}" for item, theirs in found if theirs)
        self._swap(self._pairs)
        _REPLACED.update((ours, theirs) for theirs, ours in self._pairs)

    def undo(self) -> None:
        """Restore the package's functions; a second call does nothing."""
        self._swap([(ours, theirs) for theirs, ours in self._pairs])
        for _, ours in self._pairs:
            _REPLACED.pop(ours, None)
        self._pairs = []

    def _swap(self, pairs: list[tuple[Any, Any]]) -> None:
        # other modules hold the function too: `from core_algos import agg_loss`
        new = {id(old): value for old, value in pairs}
        for name, module in list(sys.modules.items()):
            if module is None or f"{name}.".partition(".")[0] != self._package:
                continue
            for namespace in (vars(module), *self._tables(module)):
                for key, value in list(namespace.items()):
                    if id(value) in new:
                        namespace[key] = new[id(value)]

    def _tables(self, module: object) -> list[dict[str, Any]]:
        return [vars(module)[name] for name in self._registries if name in vars(module)]


def _theirs(package: str, item: Replacement) -> Callable[..., Any] | None:
    """Return the package's function if ours can replace it; None if the package has none."""
    where = f"{item.module}.{item.name}"
    try:
        theirs = vars(importlib.import_module(item.module)).get(item.name)
    except ImportError as error:
        raise ImportError(f"{where} cannot be replaced: {package} is not importable") from error
    version = getattr(sys.modules[package], "__version__", "of unknown version")
    if theirs is None:
        if item.optional:
            return None
        raise NotImplementedError(f"{package} {version} has no {where}, which fastrl replaces")
    if theirs is item.function:
        raise RuntimeError(f"{where} runs on fastrl already: undo the first use_fastrl() first")
    if theirs.__module__ != item.module:
        raise NotImplementedError(f"{where} was already replaced by {theirs.__module__}")
    known, found = parameters(item.function), parameters(theirs)
    if known != found:
        raise NotImplementedError(
            f"{where} of {package} {version} takes ({', '.join(found)}), "
            f"fastrl expects ({', '.join(known)})"
        )
    return theirs  # type: ignore[no-any-return]


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function as written, without annotations."""
    return [
        str(parameter.replace(annotation=inspect.Parameter.empty))
        for parameter in inspect.signature(function).parameters.values()
    ]
