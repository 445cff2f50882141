"""Replace functions of another package wherever it has loaded them, and restore them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fastrl.integrations.importing import AfterImport

Handle = TypeVar("Handle", bound="Undoable")
Result = TypeVar("Result")


class Undoable:
    """A change with an `undo()`; as a context manager it undoes itself at the end."""

    def undo(self) -> None:
        """Undo the change; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self: Handle) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class Replacement(NamedTuple):
    """A function of a package, and the function that replaces it.

    Attributes:
        module: the module that defines the function, `package.some.module`.
        name: the name of a function in the module, of a method (`Class.method`), or of the `apply`
            of an autograd function, which has the parameters of its `forward` without `ctx`.
        function: fastrl's function, with the same parameters and defaults.
        optional: whether some versions of the package do not have the function.
        when_imported: whether `module` needs packages that not every process has. It is then not
            imported for this; the function is replaced as soon as something imports the module.
    """

    module: str
    name: str
    function: Callable[..., Any]
    optional: bool = False
    when_imported: bool = False


def described_by(
    source: Callable[..., Any], function: Callable[..., Result]
) -> Callable[..., Result]:
    """Give a function another's name and docstring, but not its parameters, as `wraps` would."""
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(function, name, getattr(source, name))
    return function


def named(module: str, *functions: Callable[..., Any], **options: bool) -> tuple[Replacement, ...]:
    """Return replacements by functions with the names of those of the package."""
    return tuple(Replacement(module, one.__name__, one, **options) for one in functions)


#: Our functions that are currently in use, and the package's functions that they replace.
_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {}


def original(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the package's function that fastrl's function replaces at present, or None."""
    return _REPLACED.get(function)


class _Found(NamedTuple):
    """A function of the package, and its class if it is a method."""

    where: str
    owner: type | None
    theirs: Callable[..., Any]
    ours: Callable[..., Any]


class Replaced(Undoable):
    """Functions of a package that run on fastrl until `undo()` or the end of a `with` block."""

    def __init__(
        self,
        package: str,
        replacements: Sequence[Replacement],
        *,
        registries: tuple[str, ...] = (),
    ) -> None:
        self._package, self._registries = package, registries
        self._found: list[_Found] = []
        now = [x for x in replacements if not x.when_imported or x.module in sys.modules]
        self._replace(now)
        self._later = [x for x in replacements if x not in now]
        self._watch = AfterImport([x.module for x in self._later], self._imported)

    @property
    def names(self) -> tuple[str, ...]:
        """The `module.name` of each function replaced so far."""
        return tuple(dict.fromkeys(found.where for found in self._found))

    def undo(self) -> None:
        """Restore the package's functions; a second call does nothing."""
        self._watch.stop()
        self._swap([(found.owner, found.ours, found.theirs) for found in self._found])
        for found in self._found:
            _REPLACED.pop(found.ours, None)
        self._found, self._later = [], []

    def _imported(self, module: str) -> None:
        self._replace([item for item in self._later if item.module == module])

    def _replace(self, items: Sequence[Replacement]) -> None:
        found = [x for x in (_theirs(self._package, item) for item in items) if x is not None]
        self._swap([(x.owner, x.theirs, x.ours) for x in found])
        _REPLACED.update((x.ours, x.theirs) for x in found)
        self._found += found

    def _swap(self, changes: list[tuple[type | None, Any, Any]]) -> None:
        # other modules hold the function too: `from core_algos import agg_loss`
        new = {id(old): value for owner, old, value in changes if owner is None}
        for name, module in list(sys.modules.items()):
            if module is None or f"{name}.".partition(".")[0] != self._package:
                continue
            for namespace in (vars(module), *self._tables(module)):
                for key, value in list(namespace.items()):
                    if id(value) in new:
                        namespace[key] = new[id(value)]
        for owner, old, value in changes:
            for key, held in list(vars(owner).items()) if owner else ():
                if held is old:
                    setattr(owner, key, value)

    def _tables(self, module: object) -> list[dict[str, Any]]:
        return [vars(module)[name] for name in self._registries if name in vars(module)]


def _theirs(package: str, item: Replacement) -> _Found | None:
    """Return the package's function if fastrl's can replace it; None if the package has none."""
    where = f"{item.module}.{item.name}"
    try:
        module = importlib.import_module(item.module)
    except ImportError as error:
        raise ImportError(f"{where} cannot be replaced: {package} is not importable") from error
    version = getattr(sys.modules[package], "__version__", "of unknown version")
    holder, _, name = item.name.rpartition(".")
    owner = vars(module).get(holder) if holder else None
    place = module if not holder else owner
    theirs = None if place is None else vars(place).get(name)
    if theirs is None:
        if item.optional:
            return None
        raise NotImplementedError(f"{package} {version} has no {where}, which fastrl replaces")
    if theirs is item.function:
        raise RuntimeError(f"{where} runs on fastrl already: undo the first use_fastrl() first")
    home, found = _as_written(theirs)
    if home != item.module:
        raise NotImplementedError(f"{where} was already replaced by {home}")
    known = parameters(item.function)
    if known != found:
        raise NotImplementedError(
            f"{where} of {package} {version} takes ({', '.join(found)}), "
            f"fastrl expects ({', '.join(known)})"
        )
    return _Found(where, owner, theirs, item.function)


def _as_written(function: Any) -> tuple[str, list[str]]:
    """Return module and parameters of a function, or of the autograd function that it applies."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.__module__, parameters(owner.forward)[1:]
    return function.__module__, parameters(function)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function as written, without annotations."""
    return [
        str(parameter.replace(annotation=inspect.Parameter.empty))
        for parameter in inspect.signature(function).parameters.values()
    ]
