"""Hooks that act on modules when these are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """A hook that calls a function with the name of each module after its import, until `stop()`.

    An error in the function is an error of the import. Executing a copy of a module that is not in
    `sys.modules` under its name does not count as an import.

    Examples:
        >>> import sys
        >>> from fastrl.integrations.importing import AfterImport
        >>> watch = AfterImport({"colorsys"}, print)
        >>> _ = sys.modules.pop("colorsys", None)
        >>> import colorsys
        colorsys
        >>> watch.stop()
    """

    def __init__(self, names: Iterable[str], action: Callable[[str], None]) -> None:
        self._names, self._action = frozenset(names), action
        if self._names:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop watching imports; a second call does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the finders after this one, with a loader that calls the function."""
        if fullname not in self._names or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)  # `import` also skips finders without it
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if hasattr(loader, "exec_module"):  # a namespace package has no loader yet
                    spec.loader = _Loader(loader, self._action)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """The module's own loader, which calls the function at the end of `exec_module`."""

    def __init__(self, loader: Any, action: Callable[[str], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def exec_module(self, module: ModuleType) -> None:
        imported = sys.modules.get(module.__name__) is module
        # the module looks as if its own loader had imported it
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if imported:
            self._action(module.__name__)
