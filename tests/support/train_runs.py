"""Short runs of the training loops, and what they leave in their directory."""

import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from fastrl.train import grpo, ppo, run_log
from fastrl.train.checkpoint import latest
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.loading import load

LOOPS = {"grpo": (grpo.train, GrpoConfig), "ppo": (ppo.train, PpoConfig)}
OWN = {"grpo": {"group_size": 4}, "ppo": {}}
MEASURED = ("tokens_per_second", "seconds_", "peak_gb_")  # differ from run to run

REWARDS = """
import random
import signal
import numpy
calls = 0
def noise(prompts, completions, records):
    return [random.random() + numpy.random.rand() for _ in prompts]
def digits(prompts, completions, records):
    return [sum(c in '0123456789' for c in text) / 2 for text in completions]
def by_record(prompts, completions, records):
    assert prompts == [record['prompt'] for record in records]
    answers = [int(record['answer']) for record in records]
    return [sum(map(ord, text)) * n % 7 for text, n in zip(completions, answers)]
def constant(prompts, completions, records):
    return [0.5] * len(prompts)
def fails_later(prompts, completions, records):
    global calls
    calls += 1
    return [float('nan') if calls > 5 else 0.5] * len(prompts)
def interrupts(prompts, completions, records):
    global calls
    calls += 1
    if calls == 7:
        signal.raise_signal(signal.SIGINT)
    return [0.5] * len(prompts)
"""


def small_settings(directory):
    """Settings of a run of seconds: ten prompts, a reward for digits in the completion."""
    lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(10)]
    (directory / "train.jsonl").write_text("".join(lines[:6]))
    (directory / "held_out.jsonl").write_text("".join(lines[6:]))
    (directory / "small_rewards.py").write_text(REWARDS)
    return {
        "out": str(directory / "run"),
        "prompts": (str(directory / "train.jsonl"), str(directory / "held_out.jsonl")),
        "reward": ("small_rewards:digits",),
        "prompts_per_step": 16,
        "max_new_tokens": 2,
        "steps": 3,
    }


def run(loop, settings, **changes):
    train, kind = LOOPS[loop]
    return train(kind(**{**OWN[loop], **settings, **changes}))


def arguments_of(settings):
    """The settings as a command line."""
    arguments = []
    for name, value in settings.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no_{name}")
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            arguments += [f"--{name}", *map(str, values)]
    return arguments


def start_process(directory, settings, *, loop="grpo", limit="", program=()):
    """Train in a process of its own, after the shell command ``limit``; stderr goes to a file.

    ``program`` are the arguments of Python, by default those that run the loop.
    """
    command = [sys.executable, *(program or ("-m", f"fastrl.train.{loop}"))]
    # a shell that starts the tests in the background lets them, and this run, ignore SIGINT
    shell = ["env", "--default-signal=INT", "sh", "-c", f'{limit or ":"}; exec "$@"', "sh"]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [*shell, *command, *arguments_of({**OWN[loop], **settings})],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{directory}:{root}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=(directory / "stderr.txt").open("w"),
        text=True,
    )


def train_alone(train, settings, path):
    """Train in a process of its own, forked from one that has imported this module."""
    sys.path.insert(0, path)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    run_log.write_report = lambda *_: None  # most of the time of a short run
    train(settings)


class Process:
    """A run in processes of its own, which are killed in a checkpoint's write or not."""

    def __init__(self, processes, loop, settings):
        self.processes, self.loop, self.settings = processes, loop, settings
        self.directory, self.chance = Path(settings["out"]), random.Random(5)

    def start(self):
        train = partial(run, self.loop, resume=(self.directory / "config.json").exists())
        arguments = (train, self.settings, str(self.directory.parent))
        process = self.processes.Process(target=train_alone, args=arguments)
        process.start()
        return process

    def finish(self):
        process = self.start()
        process.join(120)
        assert process.exitcode == 0

    def writing(self):
        return any((self.directory / "checkpoints").glob(".step-*.partial"))

    def logged(self):
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_text().count("\n") - 1 if metrics.exists() else -1

    def kill(self, step, *, in_write, while_alive=lambda: None):
        """Kill a run once it has logged ``step``; whether a checkpoint was being written."""
        process = self.start()
        deadline = time.monotonic() + 120
        reached = self.writing if in_write else self.directory.exists
        while self.logged() < step or not reached():
            assert process.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline
        time.sleep(self.chance.uniform(0, 0.03 if in_write else 0.2))
        while_alive()
        process.kill()
        process.join()
        assert process.exitcode < 0, "the run ended by itself"
        return self.writing()


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


def equal(one, other):
    """Whether two nested values, with tensors in them, are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def saved(directory):
    """All that the latest checkpoint holds: weights or adapter, optimizer, generators, ..."""
    last = latest(Path(directory) / "checkpoints")
    (tensors,) = last.glob("*.safetensors")
    return load_file(tensors), torch.load(last / "state.pt", weights_only=True)


def weights(directory):
    """The weights of the latest checkpoint."""
    model, _ = load(str(latest(Path(directory) / "checkpoints")), torch.device("cpu"))
    return model.state_dict()
