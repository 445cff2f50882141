"""Short runs of the training loops, and what they leave in their directory."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import torch

from fastrl.train import grpo, ppo
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.model.loading import load
from fastrl.train.run.checkpoint import latest

LOOPS = {"grpo": (grpo.train, GrpoConfig), "ppo": (ppo.train, PpoConfig)}
OWN = {"grpo": {"group_size": 4}, "ppo": {}}
MEASURED = ("tokens_per_second", "seconds_", "peak_gb_")  # differ from run to run

REWARDS = """
import signal
calls = 0
def digits(prompts, completions, records):
    return [sum(c in '0123456789' for c in text) / 2 for text in completions]
def fails_later(prompts, completions, records):
    global calls
    calls += 1
    return [float('nan') if calls > 5 else 0.5] * len(prompts)
def by_record(prompts, completions, records):
    assert prompts == [record['prompt'] for record in records]
    answers = [int(record['answer']) for record in records]
    return [sum(map(ord, text)) * n % 7 for text, n in zip(completions, answers)]
def interrupts(prompts, completions, records):
    global calls
    calls += 1
    if calls == 7:
        signal.raise_signal(signal.SIGINT)
    return [0.5] * len(prompts)
def constant(prompts, completions, records):
    return [0.5] * len(prompts)
def far(prompts, completions, records):
    return [4.0] * len(prompts)
def short(prompts, completions, records):
    return [1.0]
"""


def small_settings(directory):
    """Settings of a run of seconds: ten prompts, a reward for digits in the completion."""
    lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(10)]
    (directory / "train.jsonl").write_text("".join(lines[:6]))
    (directory / "held_out.jsonl").write_text("".join(lines[6:]))
    (directory / "small_rewards.py").write_text(REWARDS)
    return {
        "out_dir": str(directory / "runs"),
        "train_file": str(directory / "train.jsonl"),
        "held_out_file": str(directory / "held_out.jsonl"),
        "reward": "small_rewards:digits",
        "warm_start_steps": 0,
        "prompts_per_step": 16,
        "max_new_tokens": 2,
        "steps": 3,
    }


def run(loop, settings, **changes):
    train, kind = LOOPS[loop]
    return train(kind(**{**OWN[loop], **settings, **changes}))


def start_process(directory, settings, *arguments, loop="grpo", limit="", launcher=()):
    """Train in a process of its own, after the shell command ``limit``; stderr goes to a file.

    ``launcher`` are arguments of Python before those of the loop.
    """
    (directory / "settings.json").write_text(json.dumps({**OWN[loop], **settings}))
    command = [sys.executable, *launcher, "-m", f"fastrl.train.{loop}", "--config", "settings.json"]
    root = Path(__file__).parents[2]
    # a shell that starts the tests in the background lets them, and this run, ignore SIGINT
    shell = ["env", "--default-signal=INT", "sh", "-c", f'{limit or ":"}; exec "$@"', "sh"]
    return subprocess.Popen(
        [*shell, *command, *arguments],
        cwd=directory,
        env={"PYTHONPATH": f"{directory}:{root}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=(directory / "stderr.txt").open("w"),
        text=True,
    )


def on_terminal(directory, settings, *, columns=80, piped=False, **environment):
    """Run GRPO on a terminal on which nobody answers, all of it or ``piped`` without its output.

    Returns:
        The exit status, what the terminal was sent, and the output if that is piped.
    """
    (directory / "settings.json").write_text(json.dumps(settings))
    terminal, of_child = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    place = {"PYTHONPATH": f"{directory}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastrl.train.grpo", "--config", "settings.json"],
        cwd=directory,
        env={**place, "OMP_NUM_THREADS": "1", **environment},
        stdin=of_child,
        stdout=subprocess.PIPE if piped else of_child,
        stderr=of_child,
    )
    os.close(of_child)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 65536):
            shown += part
    out = process.stdout.read().decode() if piped else ""
    return process.wait(timeout=60), shown, out


def train_alone(train, settings, path):
    """Train in a process of its own, forked from one that has imported this module."""
    sys.path.insert(0, path)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    train(settings)


def wait_for(process, condition, seconds=60):
    """Wait until ``condition()`` while ``process`` runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def rows(directory):
    """The logged rows, without what a clock measured."""
    logged = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in logged]


def weights(directory):
    """The weights of the latest checkpoint."""
    model, _ = load(str(latest(Path(directory) / "checkpoints")), "cpu")
    return model.state_dict()
