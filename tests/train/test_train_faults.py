"""What goes wrong in a run is named, loses nothing, and can be continued from."""

import resource
import shutil
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.train import checkpoint, optimizers, run_log
from fastrl.train.checkpoint import latest
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig
from fastrl.train.phases import Phases
from tests.support.train_runs import LOOPS, OWN, equal, rows, run, saved, start_process, weights

pytestmark = pytest.mark.usefixtures("unreported")

REWARDS = """
def breaks(prompts, completions, records):
    return [1 / len(text) if text else 1 / int(record["answer"] != "4")
            for text, record in zip(completions, records)]
def breaks_always(prompts, completions, records):
    raise KeyError("gold")
"""


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
        if isinstance(module, transformers.LlamaModel):
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
    summary = run(loop, small, steps=4, resume=True)
    assert not summary.interrupted
    assert rows(summary.directory) == rows(whole)
    assert equal(saved(summary.directory), saved(whole))


def test_a_stopped_run_says_how_to_continue(small, signals, capsys, monkeypatch):
    signals("generate", 4)
    config = GrpoConfig(**OWN["grpo"], **small)
    with pytest.raises(SystemExit, match="130"):
        main(GrpoConfig, lambda _: LOOPS["grpo"][0](config), [])
    expected = f"stopped after step 1; continue with --resume --out {small['out']}\n"
    assert expected in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_second_signal_ends_at_once_and_leaves_the_last_checkpoint(small, signals, capsys):
    def train(config):
        signals("learn", 2)  # after the first of four optimizer steps
        signals("learn", 3)
        run("grpo", small, save_every=1)

    with pytest.raises(SystemExit, match="130"):
        main(GrpoConfig, train, [])
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert names(small["out"]) == ["step-000000"]
    assert run("grpo", small, resume=True, save_every=1).step == 3


def test_ctrl_c_during_the_imports_prints_nothing(small, tmp_path):
    interrupting = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "transformers.py").write_text(interrupting)  # found before the real one
    process = start_process(tmp_path, small)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert (out, (tmp_path / "stderr.txt").read_text()) == ("", "")


def test_checkpoints_by_the_clock(small, tmp_path):
    small |= {"save_every": 100, "steps": 4}
    often = run("grpo", small, out=str(tmp_path / "a"), save_minutes=1e-9).directory
    seldom = run("grpo", small, out=str(tmp_path / "b"), save_minutes=1e9).directory
    assert names(often) == ["step-000003", "step-000004"]
    assert names(seldom) == ["step-000000", "step-000004"]


@pytest.fixture
def failing(monkeypatch):
    """Make a call of `optimizers.apply` fail: with infinite gradients, or in the optimizer."""
    apply, calls = optimizers.apply, []

    def fail_at(call, error=None):
        def apply_or_fail(optimizer, config, step):
            calls.append(step)
            first = optimizer.param_groups[0]["params"][0]
            if len(calls) == call and error is None:
                first.grad.fill_(float("inf"))
            elif len(calls) == call:
                first.data += 1  # as if it stepped in part
                raise error
            return apply(optimizer, config, step)

        calls.clear()
        monkeypatch.setattr(optimizers, "apply", apply_or_fail)

    return fail_at


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("call", "error", "step"),
    [
        (4, None, 1),  # the second minibatch of the second step
        (4, torch.OutOfMemoryError("no memory left"), 1),
        (5, None, 2),  # the first minibatch of the third step, which no checkpoint was due before
    ],
)
def test_no_checkpoint_holds_a_part_of_a_step(small, tmp_path, failing, loop, call, error, step):
    small |= {"minibatches": 2, "save_every": 1 if step == 1 else 100}
    failing(call, error)
    kind = FloatingPointError if error is None else type(error)
    with pytest.raises(kind, match=r"; --resume continues from .*step-00000\d$"):
        run(loop, small)
    after = latest(Path(small["out"]) / "checkpoints").name
    assert after == ("step-000001" if step == 1 else "step-000000")
    failing(0)
    directory = run(loop, small, resume=True).directory
    whole = run(loop, small, out=str(tmp_path / "whole")).directory
    assert rows(directory) == rows(whole)
    assert equal(saved(directory), saved(whole))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_diverges_keeps_its_good_checkpoints(small, loop):
    settings = {"learning_rate": 1e30, "warmup_steps": 0, "save_every": 1, "minibatches": 1}
    with pytest.raises(FloatingPointError, match=r"not finite.*; --resume continues from"):
        run(loop, small, **settings)
    assert names(small["out"]) == ["step-000000"]
    assert all(weight.isfinite().all() for weight in weights(small["out"]).values())
    with pytest.raises(FloatingPointError, match="not finite"):
        run(loop, small, **settings, resume=True)  # as before: what is resumed is whole


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(small, monkeypatch):
    def spoil(optimizer, config, step):
        norm = apply(optimizer, config, step)
        if step == 2:
            optimizer.param_groups[0]["params"][0].data[2, 3] = float("nan")
        return norm

    apply = optimizers.apply
    monkeypatch.setattr(optimizers, "apply", spoil)
    expected = r"^after step 3, the weight 'model.embed_tokens.weight' is not finite; .*step-000002"
    with pytest.raises(FloatingPointError, match=expected):
        run("grpo", small, save_every=1, minibatches=1)
    assert names(small["out"]) == ["step-000001", "step-000002"]


def test_an_error_between_steps_leaves_a_checkpoint_and_shows_where_it_came_from(
    small, tmp_path, capsys
):
    with (tmp_path / "small_rewards.py").open("a") as file:
        file.write(REWARDS)
    small |= {"reward": ("small_rewards:fails_later",), "save_every": 100}
    with pytest.raises(ValueError, match=r"finite in float32, got nan, .*step-000002$"):
        run("grpo", small)  # two calls on trial, one on the held-out prompts, then two steps
    assert rows(small["out"])[-1]["step"] == 2
    sys.modules["small_rewards"].calls = -100
    assert run("grpo", small, resume=True).step == 3
    with pytest.raises(SystemExit, match="2"):
        small |= {"out": "b", "reward": ("small_rewards:breaks_always",)}
        main(GrpoConfig, lambda _: run("ppo", small), [])
    *trace, error = capsys.readouterr().err.splitlines()
    place = f"{tmp_path}/small_rewards.py"
    assert f'  File "{place}", line ' in "\n".join(trace)
    assert f"KeyError: 'gold' in {place} line " in error


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_reward_for_what_a_function_fails_on(small, tmp_path, forkserver, timeout):
    with (tmp_path / "small_rewards.py").open("a") as file:
        file.write(REWARDS)
    small |= {"reward": ("small_rewards:breaks",), "steps": 1, "reward_timeout": timeout}
    small |= {"prompts_per_step": 2, "minibatches": 1}
    logged = rows(run("grpo", small, reward_failed=-1.0).directory)
    assert 0 <= logged[1]["reward_failures"] <= 8
    with pytest.raises(
        ValueError, match=r"breaks: raised ZeroDivisionError: .*py line \d+, for '3"
    ):
        run("grpo", small, out=str(tmp_path / "b"))


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


def test_there_is_room_for_two_checkpoints_alone(small, monkeypatch):
    def seen(directory, write):
        found.append(names(directory.parent.parent))
        store(directory, write)
        found.append(names(directory.parent.parent))

    store, found = checkpoint.store, []
    monkeypatch.setattr(checkpoint, "store", seen)
    run("grpo", small, save_every=1)
    assert found[2:] == [
        ["step-000000"],
        ["step-000000", "step-000001"],
        ["step-000001"],
        ["step-000001", "step-000002"],
        ["step-000002"],
        ["step-000002", "step-000003"],
    ]


def test_a_log_that_cannot_be_written_ends_the_run(small, monkeypatch):
    def write(log, row):
        if row["step"] == 2:
            (log.directory / "metrics.jsonl").unlink()
            (log.directory / "metrics.jsonl").symlink_to("/dev/full")
        original(log, row)

    original = run_log.RunLog.write
    monkeypatch.setattr(run_log.RunLog, "write", write)
    expected = r"No space left on device.*--resume continues from .*step-00000[12]$"
    with pytest.raises(OSError, match=expected):
        run("grpo", small, save_every=1)


def test_an_old_checkpoint_half_deleted_is_not_taken_for_whole(small, monkeypatch):
    def killed(path, **options):
        if path.name == ".step-000000.partial" and path.exists():
            raise KeyboardInterrupt
        return rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run("grpo", small, save_every=1)
    assert latest(Path(small["out"]) / "checkpoints").name == "step-000001"
    monkeypatch.undo()
    run("grpo", small, save_every=1, resume=True)
    assert names(small["out"]) == ["step-000002", "step-000003"]
