"""Sample completions of a run, with their rewards: on the screen and in ``samples.jsonl``."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.train.config import LoopConfig
from fastrl.train.run.json_lines import append_rows, keep_until
from fastrl.train.run.terminal import printable, shortened

SAMPLES = "samples.jsonl"
#: Characters of a prompt and of a completion on the screen.
_PROMPT, _COMPLETION = 60, 160
_RECENT = 10  # how many steps `recent` keeps


class Samples:
    """Collects the completions of a step; of every ``config.sample_every``th step some are kept.

    Args:
        config: The settings of the run.
        directory: Its directory.
        say: Prints a line.

    Attributes:
        first: The samples of the first step that has any.
        recent: Those of the last steps that have any, by step.
    """

    def __init__(self, config: LoopConfig, directory: Path, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self.path = directory / SAMPLES
        self.first: list[dict[str, Any]] = []
        self.recent: dict[int, list[dict[str, Any]]] = {}
        self._collected: list[dict[str, Any]] = []

    def begin(self, step: int) -> None:
        """Remove the samples after ``step``."""
        if self.path.exists():
            for sample in keep_until(self.path, step):
                self._remember(sample)

    def due(self, step: int) -> bool:
        """Whether samples of the step ``step``, counted from 1, are kept."""
        return self._config.sample_every > 0 and step % self._config.sample_every == 0

    def collect(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        rewards: Mapping[str, Sequence[float]],
    ) -> None:
        """Add completions of the current step.

        Args:
            prompts: N prompts, a text or messages.
            completions: N texts.
            rewards: ``"reward"``, N numbers, and further ones by the name of their part.
        """
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            parts = {name: float(values[i]) for name, values in rewards.items()}
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            sample = {"prompt": text, "completion": completion, "reward": parts.pop("reward")}
            self._collected.append({**sample, **({"parts": parts} if parts else {})})

    def write(self, step: int) -> None:
        """Show and store samples of what was collected in ``step``, which is the number done.

        Raises:
            OSError: They could not be written.
        """
        collected, self._collected = self._collected, []
        if not collected:
            return
        chosen = [
            {"step": step, "chosen": why, **collected[i]}
            for i, why in _choose([one["reward"] for one in collected], self._config, step)
        ]
        for sample in chosen:
            self._say(_line(sample))
            self._remember(sample)
        append_rows(self.path, chosen)

    def _remember(self, sample: dict[str, Any]) -> None:
        if not self.first or self.first[0]["step"] == sample["step"]:
            self.first.append(sample)
        self.recent.setdefault(sample["step"], []).append(sample)
        while len(self.recent) > _RECENT:
            del self.recent[min(self.recent)]


def _choose(rewards: list[float], config: LoopConfig, step: int) -> list[tuple[int, str]]:
    """Indices with the reason: the best, the worst, then random ones.

    The random ones depend on seed and step alone, so that they change nothing of the run and are
    the same in a run that is resumed.
    """
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    chosen = [(order[0], "best"), (order[-1], "worst")]
    others = order[1:-1]
    random.Random(f"{config.seed} {step}").shuffle(others)
    chosen += [(i, "random") for i in others]
    return chosen[: min(config.samples, len(rewards))]


def _line(sample: Mapping[str, Any]) -> str:
    """A sample in a line for the screen."""
    parts = [f"{printable(name)} {value:.3g}" for name, value in sample.get("parts", {}).items()]
    prompt = shortened(repr(sample["prompt"]), _PROMPT)
    completion = shortened(repr(sample["completion"]), _COMPLETION)
    shown = f" ({', '.join(parts)})" if parts else ""
    return (
        f"step {sample['step']} {sample['chosen']} {sample['reward']:.3g}{shown}: "
        f"{prompt} -> {completion}"
    )
