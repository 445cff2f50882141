"""Put functions in the place of another package's, wherever it has loaded them, and back again."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """A function of a package and what takes its place.

    Attributes:
        module: the module that defines it, `package.some.module`.
        name: its name there.
        function: ours, with the same parameters and defaults.
        optional: True where some versions of the package do not have it.
    """

    module: str
    name: str
    function: Callable[..., Any]
    optional: bool = False


#: our functions that stand for another package's at the moment, and what they stand for
_STANDING_FOR: dict[Callable[..., Any], Callable[..., Any]] = {}


def original(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the package's own function that ours stands for at the moment, or None."""
    return _STANDING_FOR.get(function)


class Replaced:
    """Functions of a package that run on fastrl until `undo`, or until the `with` block ends.

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
        _STANDING_FOR.update((ours, theirs) for theirs, ours in self._pairs)

    def undo(self) -> None:
        """Put the package's own functions back; a second time does nothing."""
        self._swap([(ours, theirs) for theirs, ours in self._pairs])
        for _, ours in self._pairs:
            _STANDING_FOR.pop(ours, None)
        self._pairs = []

    def __enter__(self) -> Replaced:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def _swap(self, pairs: list[tuple[Any, Any]]) -> None:
        # modules hold functions under names of their own: `from core_algos import agg_loss`
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
    """Return the package's own function if ours can stand for it; None if it has none."""
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
        raise RuntimeError(f"{where} runs on fastrl already: undo the first use before another")
    if theirs.__module__ != item.module:
        raise NotImplementedError(f"{where} was replaced by {theirs.__module__} before")
    known, found = parameters(item.function), parameters(theirs)
    if known != found:
        raise NotImplementedError(
            f"{where} of {package} {version} takes ({', '.join(found)}), "
            f"fastrl knows it with ({', '.join(known)})"
        )
    return theirs  # type: ignore[no-any-return]


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function as written, without annotations."""
    return [
        str(parameter.replace(annotation=inspect.Parameter.empty))
        for parameter in inspect.signature(function).parameters.values()
    ]
