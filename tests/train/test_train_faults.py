"""What goes wrong in a run is named, loses nothing, and can be continued from to the same bits.

`FASTRL_KILLS` is the number of kills of each loop, by default 3.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaModel

from fastrl.train import checkpoint, optimizers
from fastrl.train.checkpoint import latest
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig
from fastrl.train.phases import Phases
from tests.train import small_rewards
from tests.train.packed import save_reward_model, save_teacher
from tests.train.runs import LOOPS, assert_same, equal, kill, rows, run, saved, train_alone

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("FASTRL_KILLS", "3"))


def names(directory):
    """The names of a run's checkpoints, with all that is left of unfinished ones."""
    return sorted(path.name for path in (Path(directory) / "checkpoints").iterdir())


@pytest.fixture
def signals(monkeypatch):
    """Raise a signal in the n-th forward of a phase, counted over the process's whole run."""
    phase, planned, counts = ["before"], {}, Counter()
    enter = Phases.__call__

    @contextmanager
    def remembered(self, name):
        phase.append(name)
        try:
            with enter(self, name):
                yield
        finally:
            phase.pop()

    def count(module, arguments):
        if isinstance(module, LlamaModel):
            counts[phase[-1]] += 1
            if number := planned.pop((phase[-1], counts[phase[-1]]), None):
                signal.raise_signal(number)

    def plan(name, forward, number=signal.SIGINT):
        counts.clear()
        planned[name, forward] = number

    monkeypatch.setattr(Phases, "__call__", remembered)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield plan
    hook.remove()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_stopped_anywhere_in_a_step_is_resumed_to_the_bit(small, tmp_path, signals, loop):
    small |= {"kl_coef": 0.05, "save_every": 100, "eval_every": 2, "minibatches": 2}
    whole = run(loop, small, out=str(tmp_path / "whole"), steps=4).directory
    stops = {  # where, and the steps that are done then
        ("evaluate", 1): 0,  # before the first step
        ("generate", 2): 0,  # between two tokens
        ("logprobs", 1): 0,
        ("learn", 1): 0,
        ("learn", 2): 1,  # after an optimizer step the step is finished
        ("evaluate", 2): 2,  # after the second step
        ("learn", 3): 3,  # whose evaluation was made up for
    }
    for i, ((phase, forward), step) in enumerate(stops.items()):
        signals(phase, forward, (signal.SIGINT, signal.SIGTERM)[i % 2])
        summary = run(loop, small, steps=4, resume=i > 0)
        assert (summary.step, summary.interrupted) == (step, True), (phase, forward)
        assert latest(summary.directory / "checkpoints").name == f"step-00000{step}"
    assert not run(loop, small, steps=4, resume=True).interrupted
    assert_same(summary.directory, whole)


def test_a_signal_leaves_a_checkpoint_and_a_second_one_ends_at_once(small, signals, capsys):
    def main_ends():
        with pytest.raises(SystemExit, match="130"):
            main(GrpoConfig, lambda _: run("grpo", small), [])
        return capsys.readouterr()

    signals("generate", 4)
    expected = f"stopped after step 1; continue with --resume --out {small['out']}\n"
    assert expected in main_ends().out
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    small |= {"resume": True, "save_every": 1}
    signals("learn", 2)  # after the first of four optimizer steps
    signals("learn", 3)
    assert main_ends().err.endswith("interrupted\n")
    assert names(small["out"]) == ["step-000000", "step-000001"]
    assert run("grpo", small).step == 3


def test_ctrl_c_during_the_imports_prints_nothing(tmp_path):
    interrupting = "import signal; signal.raise_signal(signal.SIGINT)"
    (tmp_path / "transformers.py").write_text(interrupting)  # found before the real one
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "fastrl.train.grpo"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_checkpoints_by_the_clock(small, tmp_path):
    small |= {"save_every": 100, "steps": 4}
    often = run("grpo", small, out=str(tmp_path / "a"), save_minutes=1e-9).directory
    seldom = run("grpo", small, out=str(tmp_path / "b"), save_minutes=1e9).directory
    assert names(often) == ["step-000003", "step-000004"]
    assert names(seldom) == ["step-000000", "step-000004"]
    assert_same(often, seldom)
    assert {kind().save_minutes for _, kind in LOOPS.values()} == {10}


@pytest.mark.parametrize("loop", LOOPS)
def test_no_checkpoint_holds_a_part_of_a_step(small, tmp_path, monkeypatch, loop):
    def apply_or_fail(optimizer, config, step):
        calls.append(step)
        if len(calls) == 4:
            optimizer.param_groups[0]["params"][0].data += 1  # as if it stepped in part
            raise torch.OutOfMemoryError("no memory left")
        return apply(optimizer, config, step)

    apply, calls = optimizers.apply, []
    small |= {"minibatches": 2, "save_every": 1}
    whole = run(loop, small, out=str(tmp_path / "whole")).directory
    monkeypatch.setattr(optimizers, "apply", apply_or_fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"left; --resume continues .*step-000001$"):
        run(loop, small)
    assert run(loop, small, resume=True).step == 3
    assert_same(small["out"], whole)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("minibatches", [1, 4])
def test_a_run_that_diverges_keeps_a_checkpoint_to_resume_from(small, loop, minibatches):
    small |= {"learning_rate": 1e30, "warmup_steps": 0, "save_every": 1}
    for resume in (False, True):  # what cannot be resumed would be another error
        with pytest.raises(FloatingPointError, match=r"not finite.*; --resume continues from"):
            run(loop, small, minibatches=minibatches, resume=resume)
        assert names(small["out"])[0] == "step-000000"


def test_an_error_between_steps_leaves_a_checkpoint(small, monkeypatch):
    small |= {"reward": ("tests.train.small_rewards:fails_later",), "save_every": 100}
    with pytest.raises(ValueError, match=r"finite in float32, got nan, .*step-000002$"):
        run("grpo", small)  # two calls on trial, one on the held-out prompts, then two steps
    assert rows(small["out"])[-1]["step"] == 2
    monkeypatch.setattr(small_rewards, "calls", -100)
    assert run("grpo", small, resume=True).step == 3


def test_a_reward_function_that_raises(small, capsys):
    small |= {"reward": ("tests.train.small_rewards:breaks",), "prompts_per_step": 6, "steps": 1}
    with pytest.raises(SystemExit, match="2"):
        main(GrpoConfig, lambda _: run("grpo", small), [])
    *trace, error = capsys.readouterr().err.splitlines()
    place = small_rewards.__file__
    line = small_rewards.breaks.__code__.co_firstlineno + 1
    assert f'  File "{place}", line {line}, in breaks' in trace
    assert f"breaks: raised ZeroDivisionError: division by zero in {place} line {line}" in error
    logged = rows(run("grpo", small, reward_failed=-1.0).directory)
    assert (logged[1]["reward_failures"], logged[1]["reward"]) == (4, (5 - 1) / 6)


@pytest.mark.parametrize("megabytes", [3, 1])  # the optimizer's state does not fit, or the weights
def test_a_full_disk_is_named_and_gets_its_space_back(small, megabytes):
    run("grpo", small, steps=1)
    before = saved(small["out"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 20, limits[1]))
    try:
        expected = "step-000003 could not be written: .*; --resume continues from .*step-000001$"
        with pytest.raises(checkpoint.CheckpointError, match=expected):
            run("grpo", small, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(small["out"]) == ["step-000001"]
    assert equal(saved(small["out"]), before)
    assert run("grpo", small, resume=True, steps=4).step == 4


def test_an_old_checkpoint_is_renamed_and_removed_before_a_new_one_is_written(small, monkeypatch):
    def remove(path, **options):
        removed.extend([path.name] * path.exists())
        rmtree(path, **options)

    def seen(directory, write):
        found.append(names(small["out"]))
        store(directory, write)

    store, rmtree, found, removed = checkpoint.store, shutil.rmtree, [], []
    run("grpo", small, steps=2, save_every=1)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    monkeypatch.setattr(checkpoint, "store", seen)
    run("grpo", small, resume=True)
    assert removed == [".step-000001.partial"]  # half of it would not look whole
    assert found == [["step-000002"]]
    assert names(small["out"]) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_run_resumes_to_the_same_metrics_and_weights(small, tmp_path, loop, forkserver):
    small |= {"steps": 8, "eval_every": 3, "save_every": 1, "learning_rate": 1e-3}
    small |= {"kl_coef": 0.05, "prompts_per_step": 8}
    killed, whole = (tmp_path / name for name in ("killed", "whole"))
    chance = random.Random(5)

    def process(out):
        return forkserver.Process(target=train_alone, args=(loop, small | {"out": str(out)}))

    def writing():
        return any((killed / "checkpoints").glob(".step-*.partial"))

    def reached():
        metrics = killed / "metrics.jsonl"
        logged = metrics.read_text().count("\n") - 1 if metrics.exists() else -1
        return logged >= step and (writing() if in_write else killed.exists())

    for i in range(KILLS):
        # the first kill is before anything is logged, and every second one in a write
        step, in_write = i * 7 // KILLS - (i == 0), i % 2 == 1
        kill(process(killed), reached, seconds=chance.uniform(0, 0.03 if in_write else 0.2))
        while in_write and not writing():  # it was over before the kill
            kill(process(killed), reached, seconds=chance.uniform(0, 0.03))
    for out in (killed, whole):
        to_the_end = process(out)
        to_the_end.start()
        to_the_end.join(120)
        assert to_the_end.exitcode == 0
    assert [row["step"] for row in rows(killed)] == list(range(9))
    assert_same(killed, whole)
    assert not [path for path in killed.rglob("*") if path.name.startswith(".")]


def test_two_processes_do_not_use_one_directory(small, forkserver):
    def refused():
        for resume in (True, False):
            with pytest.raises(ValueError, match=r"^out: .*run is in use by another run"):
                run("grpo", settings, resume=resume)

    settings = small | {"steps": 100_000, "save_every": 1}
    process = forkserver.Process(target=train_alone, args=("grpo", settings))
    logged = Path(small["out"], "metrics.jsonl").exists
    kill(process, logged, seconds=0.2, while_alive=refused)
    steps = rows(small["out"])[-1]["step"] + 1
    assert run("grpo", settings, resume=True, steps=steps).step == steps
    assert not Path(small["out"], ".lock").exists()


def test_runs_without_a_name_get_the_next_number_and_failed_starts_leave_nothing(small):
    small |= {"out": None, "steps": 1}
    assert [run("ppo", small).directory for _ in "ab"] == [Path("runs/ppo-1"), Path("runs/ppo-2")]
    with pytest.raises(ValueError, match=r"^max_prompt_tokens must be at least"):
        run("ppo", small, max_prompt_tokens=2)
    assert not Path("runs/ppo-3").exists()
    assert run("ppo", small, steps=2, resume=True).directory == Path("runs/ppo-2")


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "tokenizer.json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_resumes(small, name):
    run("grpo", small, steps=2, save_every=1)
    last = latest(Path(small["out"]) / "checkpoints")
    content = (last / name).read_bytes()
    changed = bytes([content[0] ^ 1]) + content[1:]
    for damaged in (changed, content[:-1], None):
        (last / name).unlink() if damaged is None else (last / name).write_bytes(damaged)
        expected = "^resume: .*step-000002 cannot be read; delete it to resume from the previous"
        with pytest.raises(ValueError, match=f"{expected} one .*{name}"):
            run("grpo", small, resume=True)
    shutil.rmtree(last)
    assert run("grpo", small, resume=True).step == 3


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(small, tmp_path, capsys):
    small |= {"steps": 1, "value_model": "separate"}
    directory = run("ppo", small).directory
    before = shutil.copytree(directory, tmp_path / "before")
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ValueError, match=r"^resume: .*run has metrics, but no checkpoint"):
        run("ppo", small, resume=True)
    assert rows(directory) == rows(before)
    (directory / "metrics.jsonl").unlink()  # as if killed before the first checkpoint
    run("ppo", small, resume=True)
    assert "holds no checkpoint; the run begins anew" in capsys.readouterr().out
    assert_same(directory, before)


def test_changed_data_and_weights_are_refused_on_resume(small, base, tmp_path):
    save_reward_model(tmp_path / "scorer")
    small |= {"model": str(base), "lora_rank": 2, "reward": (f"model:{tmp_path / 'scorer'}",)}
    small |= {"kl_coef": 0.1, "steps": 1, "teacher": save_teacher(tmp_path / "teacher")}
    run("grpo", small)
    more = json.dumps({"prompt": "9 + 1 =", "answer": "10"}).encode() + b"\n"
    for name, path in (
        ("reward_model", tmp_path / "scorer" / "model.safetensors"),
        ("base", base / "model.safetensors"),
        ("teacher", tmp_path / "teacher" / "model.safetensors"),
        ("prompts", Path(small["prompts"][0])),
        ("held_out", Path(small["prompts"][1])),
    ):
        content = path.read_bytes()
        weights = content[:-2] + bytes([content[-2] ^ 1, content[-1]])
        path.write_bytes(weights if path.suffix == ".safetensors" else content + more)
        with pytest.raises(ValueError, match=f"^resume: {name} has changed since the run began"):
            run("grpo", small, resume=True)
        path.write_bytes(content)
    assert run("grpo", small, resume=True, steps=2).step == 2
