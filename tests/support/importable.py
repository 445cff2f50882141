"""Modules of optional packages."""

import importlib
import sys


def importable(name):
    """Import a module; None if it or one of its dependencies is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def without_modules(monkeypatch, *packages):
    """Remove the modules of these packages until the end of the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
