"""A run that is killed, or whose files are damaged or changed, is resumed to the same or refused.

`FASTRL_KILLS` is the number of kills of each loop, by default 3.
"""

import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForSequenceClassification

from fastrl.train.checkpoint import latest
from fastrl.train.loading import character_tokenizer
from tests.support.train_runs import LOOPS, equal, rows, run, saved, train_alone

pytestmark = pytest.mark.usefixtures("unreported")

KILLS = int(os.environ.get("FASTRL_KILLS", "3"))
STEPS = 8


class Killer:
    """Starts a run, and kills it when a step is reached, while a checkpoint is written or not."""

    def __init__(self, processes, loop, settings, path):
        self.processes, self.settings, self.path = processes, settings, path
        self.train = partial(run, loop)
        self.directory = Path(settings["out"])
        self.chance = random.Random(settings["seed"])

    def start(self):
        resume = (self.directory / "config.json").exists()
        arguments = (partial(self.train, resume=resume), self.settings, self.path)
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

    def kill(self, step, *, in_write):
        """Kill a run once it has logged ``step``; whether a checkpoint was being written."""
        process = self.start()
        deadline = time.monotonic() + 120
        reached = self.writing if in_write else self.directory.exists
        while self.logged() < step or not reached():
            assert process.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline
        time.sleep(self.chance.uniform(0, 0.03 if in_write else 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended by itself"
        return self.writing()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_run_resumes_to_the_same_metrics_and_weights(small, tmp_path, loop, forkserver):
    settings = {**small, "steps": STEPS, "eval_every": 3, "save_every": 1, "learning_rate": 1e-3}
    settings |= {"kl_coef": 0.05, "prompts_per_step": 8, "seed": 5}
    killed, whole = (
        Killer(forkserver, loop, {**settings, "out": str(tmp_path / name)}, str(tmp_path))
        for name in ("killed", "whole")
    )
    in_write = 0
    for i in range(KILLS):
        step = i * (STEPS - 1) // KILLS - (i == 0)  # the first kill is before anything is logged
        killed_in_write = killed.kill(step, in_write=i % 2 == 1)
        while i % 2 == 1 and not killed_in_write:  # it was over before the kill
            killed_in_write = killed.kill(step, in_write=True)
        in_write += killed_in_write
    killed.finish()
    whole.finish()
    assert in_write >= KILLS // 2
    assert rows(killed.directory) == rows(whole.directory)
    assert [row["step"] for row in rows(killed.directory)] == list(range(STEPS + 1))
    assert equal(saved(killed.directory), saved(whole.directory))
    assert not [path for path in killed.directory.rglob("*") if path.name.startswith(".")]


def test_two_processes_do_not_use_one_directory(small, tmp_path, forkserver):
    settings = small | {"steps": 100_000, "save_every": 1, "seed": 0}
    killer = Killer(forkserver, "grpo", settings, str(tmp_path))
    process = killer.start()
    try:
        while killer.logged() < 1:
            assert process.is_alive()
        for resume in (True, False):
            with pytest.raises(ValueError, match=r"^out: .*run is in use by another run"):
                run("grpo", settings, resume=resume)
    finally:
        process.kill()
        process.join()
    steps = rows(small["out"])[-1]["step"] + 1
    assert run("grpo", settings, resume=True, steps=steps).step == steps
    assert not (killer.directory / ".lock").exists()


@pytest.mark.parametrize("out", ["train.jsonl/run", "/proc/run"])
def test_a_directory_that_cannot_be_written_is_named(small, out):
    with pytest.raises(ValueError, match=f"^out: {out} cannot be written: "):
        run("grpo", small, out=out)


def test_a_run_that_does_not_start_leaves_nothing(small, tmp_path):
    for change in ({"reward": ("small_rewards:gone",)}, {"max_prompt_tokens": 2}):
        with pytest.raises(ValueError, match=next(iter(change))):
            run("grpo", small, out=str(tmp_path / "x"), **change)
        assert not (tmp_path / "x").exists()


def test_runs_without_a_name_get_the_next_number(small):
    small |= {"out": None, "steps": 1}
    assert [run("ppo", small).directory for _ in "ab"] == [Path("runs/ppo-1"), Path("runs/ppo-2")]
    Path("runs/ppo-3").mkdir()
    assert run("ppo", small, steps=2, resume=True).directory == Path("runs/ppo-2")


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "tokenizer.json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_resumes(small, name):
    run("grpo", small, steps=2, save_every=1)
    last = latest(Path(small["out"]) / "checkpoints")
    content = (last / name).read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (changed, content[:middle], None):
        (last / name).unlink() if damaged is None else (last / name).write_bytes(damaged)
        expected = "^resume: .*step-000002 cannot be read; delete it to resume from the previous"
        with pytest.raises(ValueError, match=f"{expected} one .*{name}"):
            run("grpo", small, resume=True)
        assert [row["step"] for row in rows(small["out"])] == [0, 1, 2]
    shutil.rmtree(last)
    assert run("grpo", small, resume=True).step == 3


def test_a_damaged_row_of_the_log_is_said(small, capsys):
    metrics = Path(run("grpo", small, steps=2).directory) / "metrics.jsonl"
    first, _, last = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + '{"step": 1, "rew\n' + last)
    run("grpo", small, resume=True)
    assert f"{metrics} line 2 is damaged; the run continues without" in capsys.readouterr().out
    assert [row["step"] for row in rows(small["out"])] == [0, 2, 3]


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(small, capsys):
    directory = run("ppo", small, steps=1, value_model="separate").directory
    log, of_run = rows(directory), saved(directory)
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ValueError, match=r"^resume: .*run has metrics, but no checkpoint"):
        run("ppo", small, resume=True, steps=1, value_model="separate")
    assert rows(directory) == log
    (directory / "metrics.jsonl").unlink()  # as if killed before the first checkpoint
    run("ppo", small, resume=True, steps=1, value_model="separate")
    assert "holds no checkpoint; the run begins anew" in capsys.readouterr().out
    assert rows(directory) == log
    assert equal(saved(directory), of_run)


def test_changed_data_and_weights_are_refused_on_resume(small, base, tmp_path):
    config = LlamaConfig.from_pretrained(base, num_labels=1, hidden_size=16, num_hidden_layers=1)
    scorer = tmp_path / "scorer"
    character_tokenizer().save_pretrained(scorer)

    def save_scorer(seed):
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(scorer)

    save_scorer(0)
    small |= {"model": str(base), "lora_rank": 2, "reward": (f"model:{scorer}",), "kl_coef": 0.1}
    run("grpo", small, steps=1)
    weights = (base / "model.safetensors").read_bytes()
    save_scorer(1)
    with pytest.raises(ValueError, match=r"^resume: reward_model has changed since the run began"):
        run("grpo", small, resume=True)
    save_scorer(0)
    changed = bytearray(weights)
    changed[-2] ^= 1
    (base / "model.safetensors").write_bytes(changed)
    with pytest.raises(ValueError, match=r"^resume: base has changed since the run began"):
        run("grpo", small, resume=True)
    (base / "model.safetensors").write_bytes(weights)
    for path, name in zip(small["prompts"], ("prompts", "held_out"), strict=True):
        text = Path(path).read_text()
        Path(path).write_text(text + json.dumps({"prompt": "9 + 1 =", "answer": "10"}) + "\n")
        with pytest.raises(ValueError, match=f"^resume: {name} has changed since the run began"):
            run("grpo", small, resume=True)
        Path(path).write_text(text)
    assert run("grpo", small, resume=True, steps=2).step == 2


def test_a_copied_checkpoint_is_a_model(small, tmp_path):
    checkpoint = latest(run("grpo", small, steps=1).directory / "checkpoints")
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "state.pt").unlink()
    small |= {"model": str(copy), "out": str(tmp_path / "b"), "steps": 1}
    assert run("grpo", small).step == 1
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"^model must be .*copy is damaged: model.safetensors"):
        run("grpo", small, out=str(tmp_path / "c"))
