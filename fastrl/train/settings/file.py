"""Files of settings: YAML by their name's ending, else JSON, each key at most once."""

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_BOOL, _FLOAT, _INT, _MERGE, _NULL = (
    f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "merge", "null")
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML with the numbers of version 1.2, where ``1e-3`` is one and ``010`` is 10.

    ``yes``, ``no``, ``on`` and ``off`` are booleans, as in version 1.1. A date is text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping, in which a key may not come twice."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.yaml_implicit_resolvers = {
    first: [(tag, shape) for tag, shape in resolvers if tag in (_BOOL, _MERGE, _NULL)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|nan)$"),
    list("-+.0123456789"),
)
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))


def read(path: Path) -> dict[str, Any]:
    """The settings in a file: YAML if its name ends in ``.yaml`` or ``.yml``, else JSON.

    Raises:
        ValueError: The file cannot be read, has a key twice, or holds something else than an
            object whose keys are text.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            settings = yaml.load(text, _Loader)
        else:
            settings = json.loads(text, object_pairs_hook=_object)
    except yaml.YAMLError as error:
        raise ValueError(f"config: {path} cannot be read: {_one_line(error)}") from error
    except (OSError, ValueError, RecursionError) as error:
        hint = "" if path.suffix == ".json" or isinstance(error, OSError) else " as JSON"
        raise ValueError(f"config: {path} cannot be read{hint}: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"config: {path} must hold an object, name: value for each setting")
    return settings


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _one_line(error: yaml.YAMLError) -> str:
    """What is wrong, and in which line."""
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    return problem if mark is None else f"line {mark.line + 1}: {problem}"
