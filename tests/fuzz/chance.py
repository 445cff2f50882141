"""Drawing options: quick random choices from a seed that is a line of text."""

import random
from collections.abc import Sequence
from typing import Any


class Chance:
    """Random choices of one case."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def of(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, values: Sequence[Any]) -> Any:
        return self._random.choice(values)

    def weighed(self, values: dict[Any, float]) -> Any:
        return self._random.choices(list(values), list(values.values()))[0]

    def whole(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def some(self, table: dict[str, tuple[float, Sequence[Any]]]) -> dict[str, Any]:
        """Return options, each with its probability and one of its values."""
        return {name: self.pick(values) for name, (p, values) in table.items() if self.of(p)}
