"""Modules of the packages that the drop-ins are for, where these are installed."""

import importlib


def importable(name):
    """Import a module; None if it or something that it needs is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
