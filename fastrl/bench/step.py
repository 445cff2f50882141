"""``fastrl bench step``: where the time and memory of a GRPO step go, with and without fastrl.

    fastrl bench step --model Qwen/Qwen3-0.6B --prompts 4 --group-size 8 --completion-tokens 512

`grpo_step` has the step. Each variant is a process of its own, which makes a step that is not
counted, one whose memory is measured, and those that are timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastrl import command_start
from fastrl.bench import child, grpo_step
from fastrl.bench.grpo_step import MEMORY, PARTS, SHAPES, TIMED, VARIANTS, Settings, model_config
from fastrl.bench.machine import machine
from fastrl.bench.plots import draw_or_say
from fastrl.bench.report import Row, head, show, spread

#: Default, least value, and meaning.
NUMBERS: dict[str, tuple[int, int, str]] = {
    "prompts": (4, 1, "prompts of a step"),
    "group-size": (4, 2, "completions of each prompt"),
    "prompt-tokens": (64, 1, "tokens of each prompt"),
    "completion-tokens": (128, 1, "tokens of each completion"),
    "micro-batch": (4, 1, "sequences in a forward"),
    "steps": (3, 1, "steps that are timed"),
}
INTERRUPTED = "interrupted"
NOTES = """\
Seconds are medians over the timed steps, with the 20th and 80th percentile. MB (1e6 bytes) is what
is in use in a part at its worst moment, beyond weights and optimizer state. `loss` has the LM head;
fastrl computes the gradient of the logits there, too. Predicted without fastrl: N V values in
float32 for the N tokens of a micro-batch, twice in the loss (logits, log-softmax) and three times
in the backward (log-softmax, and the gradients of both)."""


def main(arguments: Sequence[str]) -> int:
    """Measure, write ``step.json`` and ``step.md``, print the tables; return the exit status."""
    settings, vocabulary, folder = _options(arguments)
    found: Row = {
        "command": shlex.join(["fastrl", "bench", "step", *arguments]),
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": machine(torch.device(settings.device)),
        "model": settings.model,
        "settings": settings._asdict(),
        "predicted": _predicted(settings, vocabulary),
        "variants": [],
    }
    for variant in VARIANTS:
        row = _measure(variant, settings, folder)
        found["variants"].append(row)
        (folder / "step.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "step.md").write_text(markdown(found))
        if row["failure"].startswith(INTERRUPTED):
            break
    show("", kept=False)
    print(f"{markdown(found)}\nwritten: {folder / 'step.json'}, step.md")
    if row["failure"].startswith(INTERRUPTED):
        return 130
    if any(row["parts"] for row in found["variants"]):
        draw_or_say(found, folder)
    return 0 if any(row["parts"] for row in found["variants"]) else 1


def _options(arguments: Sequence[str]) -> tuple[Settings, int, Path]:
    """Return the settings, the vocabulary of the model and the folder of the results."""
    parser = argparse.ArgumentParser(
        prog="fastrl bench step",
        description="Measure where the time and memory of a GRPO step go, with and without fastrl.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shapes = ", ".join(SHAPES)
    text = f"a model of the Hugging Face Hub, a folder, or one with random weights: {shapes}"
    parser.add_argument("--model", default="small", help=text)
    parser.add_argument("--random", action="store_true", help="random weights of the model's shape")
    for name, (default, least, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=text)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="dtype of the weights")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help="device")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--out", type=Path, default=Path("fastrl-bench"), help="folder of results")
    given = vars(parser.parse_args(arguments))
    folder: Path = given.pop("out")
    settings = Settings(**given)
    if find_spec("transformers") is None:
        parser.error("transformers is missing: pip install 'fastrl-kernels[train]'")
    if settings.micro_batch > settings.prompts * settings.group_size:
        parser.error("argument --micro-batch: must be at most --prompts times --group-size")

    def check(option: str, value: object, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            parser.error(f"argument --{option}: cannot use {str(value)!r}: {reason}")

    check("device", settings.device, lambda: torch.empty(0, device=settings.device))
    check("out", folder, lambda: folder.mkdir(parents=True, exist_ok=True))
    with command_start.quiet():
        config = check(
            "model", settings.model, lambda: model_config(settings.model).get_text_config()
        )
    context = getattr(config, "max_position_embeddings", None) or math.inf
    if settings.prompt_tokens + settings.completion_tokens > context:
        parser.error(f"argument --completion-tokens: the model has a context of {context} tokens")
    return settings, int(config.vocab_size), folder


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text!r}")
        return int(text)

    return number


def _predicted(settings: Settings, vocabulary: int) -> dict[str, int]:
    """Return the bytes of logits, and of what is computed from them, without fastrl."""
    once = 4 * vocabulary * settings.micro_batch * settings.completion_tokens
    return {"loss": 2 * once, "backward": 3 * once}


def _measure(variant: str, settings: Settings, folder: Path) -> Row:
    """Return a variant as a row of ``step.json``; if it ended early, ``failure`` says why."""
    steps: list[Row] = []
    part, failure = "loading", ""
    call = functools.partial(grpo_step.main, variant, settings)
    with child.Process(call, folder / "step.log") as running:
        try:
            show(f"{variant}: {part}")
            while (entry := running.heard()) is not None:
                if "step" in entry:
                    steps.append(entry)
                part = entry.get("part", part)
                show(f"{variant}: {part}")
            if running.status < 0:
                why = f"killed by signal {-running.status}, as Linux does when memory runs out"
            else:
                why = running.last_line()[:200] or f"exit status {running.status}"
            failure = f"{part}: {why}" if running.status else ""
        except KeyboardInterrupt:
            failure = f"{INTERRUPTED} in step {len(steps) + 1}, {part}"
    counted = steps[TIMED:] or steps[MEMORY:]
    peaks = steps[MEMORY]["peaks"] if counted else {}
    return {
        "name": variant,
        "failure": failure,
        "parts": [_part(name, counted, peaks.get(name)) for name in PARTS if counted],
        "peak": max(peaks.values(), default=None),
        "seconds": statistics.median(step["total"] for step in counted) if counted else None,
        "held": steps[0]["held"] if steps else None,
    }


def _part(name: str, steps: list[Row], peak: int | None) -> Row:
    median, low, high = spread(step["seconds"][name] for step in steps)
    return {"part": name, "seconds": median, "low": low, "high": high, "peak": peak}


def markdown(found: Row) -> str:
    """Return the content of ``step.json`` as a document, each variant a line of its tables."""
    about = {**found["machine"], "command": f"`{found['command']}`", "date": found["date"]}
    lines = ["# fastrl bench step", ""]
    lines += [*(f"- {name}: {value}" for name, value in about.items() if value), "", NOTES]
    for unit, cell in (("seconds", _seconds), ("MB", _peak)):
        lines += ["", *head([unit, *PARTS, "step"])]
        for row in found["variants"]:
            name = f"{row['name']} ({row['failure']})" if row["failure"] else row["name"]
            cells = [cell(one) for one in (*row["parts"], row)] if row["parts"] else 7 * [""]
            lines.append(f"| {name.replace('|', '/')} | {' | '.join(cells)} |")
    predicted = [{"peak": found["predicted"].get(name)} for name in (*PARTS, "step")]
    lines.append(f"| predicted, without | {' | '.join(map(_peak, predicted))} |")
    return "\n".join(lines) + "\n"


def _seconds(one: Row) -> str:
    low, high = one.get("low"), one.get("high")  # a whole step has none
    around = "" if low == high else f" ({low:.3g}-{high:.3g})"
    return f"{one['seconds']:.3g}{around}"


def _peak(one: Row) -> str:
    return "" if one["peak"] is None else f"{one['peak'] / 1e6:,.1f}"
