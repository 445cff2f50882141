"""Modules of optional packages."""

import importlib
import os
import sys
import types

import pytest


def needed(package):
    """Import an optional package; without it the test is skipped, in CI it fails."""
    if os.environ.get("CI"):
        return importlib.import_module(package)
    return pytest.importorskip(package)


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


def stand_ins(monkeypatch, held):
    """Put modules with these names, and copies of what they hold, where installed ones may be."""
    without_modules(monkeypatch, *(home.partition(".")[0] for home in held))
    for home, names in held.items():
        for name in [home[:i] for i, letter in enumerate(f"{home}.") if letter == "."]:
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
                above, _, last = name.rpartition(".")
                if above:
                    setattr(sys.modules[above], last, sys.modules[name])
        for name, value in names.items():
            setattr(sys.modules[home], name, value)
            if isinstance(value, types.FunctionType):
                rest = (value.__globals__, name, value.__defaults__, value.__closure__)
                copy = types.FunctionType(value.__code__, *rest)
                copy.__kwdefaults__, copy.__module__ = value.__kwdefaults__, home
                setattr(sys.modules[home], name, copy)
