"""Modules of optional packages."""

import importlib


def importable(name):
    """Import a module; None if it or one of its dependencies is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
