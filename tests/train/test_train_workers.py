"""Reward functions in worker processes: what hangs, raises or ends its process."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fastrl.train.config import GrpoConfig
from fastrl.train.rewards import RewardError, make_rewards
from fastrl.train.run.checkpoint import latest
from tests.support.train_runs import rows, run, start_process, wait_for

SLOW_REWARDS = """
import os, signal, sys, time
from pathlib import Path
def length(prompts, completions, records):
    (completion,) = completions
    return [len(completion)]
def faulty(prompts, completions, records):
    (completion,) = completions
    if completion == "hang":
        time.sleep(600)
    if completion == "backtrack":
        import re
        re.fullmatch("(a|a)*b", 40 * "a")
    if completion == "raise":
        raise KeyError("no such test")
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(4)
    if completion == "nan":
        return [float("nan")]
    if completion == "two":
        return [1, 2]
    return [1.0]
def process(prompts, completions, records):
    return [os.getpid()]
def meets_another(prompts, completions, records):
    here = Path(__file__).parent
    (here / f"worker-{os.getpid()}").touch()
    while len(list(here.glob("worker-*"))) < 2:
        time.sleep(0.01)
    return [os.getpid()]
def terminated_once(prompts, completions, records):
    mark = Path(records[0]["mark"])
    if completions[0] == "x" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    return [1.0]
def hangs_in_step_2(prompts, completions, records):
    mark = Path(__file__).with_name("calls")
    with mark.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if mark.read_text().count("\\n") > 10 + 4 + 20:  # probes, held-out prompts, step 1
        time.sleep(600)
    return [0.5]
"""


@pytest.fixture
def slow(tmp_path, monkeypatch):
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("slow_rewards", None)


def score(name, completions, record=None, **settings):
    """The rewards of completions; afterwards no worker process is left."""
    config = GrpoConfig(reward=(f"slow_rewards:{name}",), **settings)
    records = [{"prompt": f"prompt {i}", **(record or {})} for i in range(len(completions))]
    with make_rewards(config) as rewards:
        scored = rewards.score(records, completions, [1] * len(completions))
    assert not children()
    return scored


def children():
    """The processes below this one that run the workers' code, except the server of forks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(
                line.split(":\t", 1) for line in stat.read_text().splitlines() if ":\t" in line
            )
            command = (stat.parent / "cmdline").read_bytes()
            parent = Path(f"/proc/{fields['PPid'].strip()}/status").read_text()
        except (OSError, ValueError):
            continue
        of_server = f"PPid:\t{os.getpid()}\n" in parent
        if of_server and b"forkserver" in command and not fields["State"].startswith("Z"):
            found.append(int(stat.parent.name))
    return found


def test_each_completion_is_a_call_in_one_of_the_workers(slow):
    assert score("length", ["a", "bbb", ""], reward_workers=2).total.tolist() == [1, 3, 0]
    calls = score("meets_another", ["a"] * 8, reward_workers=2, reward_timeout=60)
    pids = set(calls.total.tolist())
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_timeout_alone_means_one_worker(slow):
    pids = set(score("process", ["a"] * 3, reward_timeout=60).total.tolist())
    assert len(pids) == 1
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("hang", "took longer than 1 s"),
        ("backtrack", "took longer than 1 s"),
        ("raise", "raised KeyError: 'no such test'"),
        ("exit", "raised SystemExit: 3"),
        ("die", "ended its worker process, with exit code 4"),
        ("nan", "must be finite in float32, got nan"),
        ("two", "must return 1 numbers, got 2"),
    ],
)
def test_a_failure_names_function_prompt_and_completion_or_gets_a_reward(slow, completion, reason):
    completions = ["fine", completion, "fine"]
    limits = {"reward_workers": 1, "reward_timeout": 1.0}
    with pytest.raises(RewardError) as error:
        score("faulty", completions, **limits)
    assert str(error.value) == f"reward faulty: {reason}, for 'prompt 1' -> {completion!r}"
    scored = score("faulty", completions, **limits, reward_failed=-2.0)
    assert scored.total.tolist() == [1, -2, 1]
    assert scored.failed.tolist() == [False, True, False]


def test_after_a_failure_no_further_call_is_waited_for(slow):
    began = time.monotonic()
    with pytest.raises(RewardError, match="took longer than 1 s, for 'prompt 0'"):
        score("faulty", ["hang"] * 100, reward_timeout=1.0)
    assert time.monotonic() - began < 50  # and not 100


def test_a_worker_that_is_terminated_from_outside_is_no_failure_of_the_function(slow):
    record = {"mark": str(slow / "mark")}
    assert score("terminated_once", ["x", "y"], record, reward_workers=1).total.tolist() == [1, 1]
    assert (slow / "mark").exists()


def test_workers_that_end_between_two_calls_are_replaced(slow):
    with make_rewards(GrpoConfig(reward=("slow_rewards:process",), reward_workers=1)) as rewards:
        first = int(rewards.score([{"prompt": "a"}], ["x"], [1]).total)
        os.kill(first, signal.SIGKILL)
        time.sleep(0.5)
        assert int(rewards.score([{"prompt": "a"}], ["x"], [1]).total) != first


def slow_settings(small, **changes):
    return {
        **small,
        "reward": ["slow_rewards:hangs_in_step_2"],
        "reward_workers": 2,
        "prompts_per_step": 5,
        "eval_every": 100,
        "name": "a",
        **changes,
    }


def test_a_hang_in_a_run_is_an_error_that_loses_no_step(small, slow):
    settings = slow_settings(small, reward_timeout=0.5)
    with pytest.raises(RewardError, match=r"took longer than 0.5 s, .* from .*step-000001"):
        run("grpo", settings)
    assert not children()
    directory = Path(small["out_dir"]) / "a"
    assert rows(directory)[-1]["step"] == 1
    (slow / "calls").write_text(24 * "0\n")
    run("grpo", settings, resume=True, reward_failed=0.25, reward_timeout=0.2, steps=2)
    last = rows(directory)[-1]
    assert (last["reward"], last["reward_failures"]) == (0.25, 20)
    assert (last["held_out_reward"], last["held_out_reward_failures"]) == (0.25, 4)
    assert latest(directory / "checkpoints").name == "step-000002"
    assert not children()


def test_a_function_that_always_fails_is_found_before_the_run(small, slow):
    settings = slow_settings(small, reward_timeout=0.2, reward_failed=0.0)
    (slow / "calls").write_text(99 * "0\n")
    with pytest.raises(RewardError, match=r"^reward hangs_in_step_2: took .*for '0 \+ 1 =' -> ''"):
        run("grpo", settings)
    assert not Path(small["out_dir"]).exists()


@contextmanager
def running(*arguments, **options):
    """A run in a process of its own, which is killed if the test fails."""
    process = start_process(*arguments, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_run_that_is_ended(small, slow, number):
    """The last function calls hang, and have no time limit."""
    calls = slow / "calls"

    def called():
        return calls.read_text().split() if calls.exists() else []

    with running(slow, slow_settings(small, steps=50)) as process:
        wait_for(process, lambda: len(called()) == 36, seconds=300)
        workers = {int(pid) for pid in called()}
        assert len(alive(workers)) == 2
        process.send_signal(number)
        if number != signal.SIGKILL:
            time.sleep(1)
            assert process.poll() is None  # it waits for the step to end
            process.send_signal(number)
        process.communicate(timeout=300)
    deadline = time.monotonic() + 60
    while alive(workers):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.1)


def test_an_interrupt_ends_the_step_with_its_workers(small, slow):
    """A Ctrl-C of a terminal reaches all processes of its group."""
    source = SLOW_REWARDS + (
        "def slow(prompts, completions, records):\n    time.sleep(0.05)\n    return [0.5]\n"
    )
    (slow / "slow_rewards.py").write_text(source)
    settings = slow_settings(small, reward=["slow_rewards:slow"], steps=500)
    metrics = Path(small["out_dir"]) / "a" / "metrics.jsonl"
    with running(slow, settings, limit='exec setsid "$@"') as process:
        wait_for(process, lambda: metrics.exists() and metrics.read_text().count("\n") > 1, 300)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=300)
    errors = (slow / "stderr.txt").read_text()
    assert process.returncode == 130, errors
    assert "stopped after step" in out
    assert "RuntimeWarning" not in errors
