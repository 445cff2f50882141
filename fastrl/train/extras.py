"""Packages that only some settings need."""

from importlib.util import find_spec


def require(package: str, *, extra: str, setting: str) -> None:
    """Raise a `ValueError` that names the setting and the extra if ``package`` is missing."""
    if find_spec(package) is None:
        raise ValueError(
            f"{setting} needs {package}; install it with: pip install 'fastrl-kernels[{extra}]'"
        )
