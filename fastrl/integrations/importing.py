"""Act on modules when they are imported, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls a function with the name of each of these modules after its import, until `stop()`.

    An error that the function raises is an error of the import.

    Example:
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
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no further imports; a second call does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the finders after this one find, with a loader that calls the function."""
        if fullname not in self._names or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._action)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Loader, action: Callable[[str], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # the module looks as if it had been imported by its own loader
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module.__name__)
