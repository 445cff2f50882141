"""Reward functions in processes that last for a run, and functions that are awaited."""

import asyncio
import gc
import os
import signal
import sys
import time

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.reward_calls import Source
from fastrl.train.reward_workers import Workers
from fastrl.train.rewards import RewardError
from tests.train.runs import asked, rewards_of

MODULE = """
import asyncio, os, sys, time

if "torch" not in sys.modules:  # in a worker
    time.sleep(IMPORT_SECONDS)
    FAULT

def pid(prompts, texts, records):
    if texts == ["hang"]:
        time.sleep(600)
    return [os.getpid()] * len(texts)

lock = asyncio.Lock()
calls = []

async def slowly(prompts, texts, records):
    async with lock:  # of the loop on which it was first awaited
        calls.append(asyncio.get_running_loop())
        await asyncio.sleep(0.01)
    if "exit" in texts:
        raise SystemExit(3)
    return [len(text) if calls[0] is calls[-1] else -1 for text in texts]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that only tests of this file have, and returns its name."""

    def make(seconds=0.0, fault="pass"):
        name = f"judge_{tmp_path.name}".replace("-", "_")
        text = MODULE.replace("IMPORT_SECONDS", str(seconds)).replace("FAULT", fault)
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return make


def score(rewards, *texts):
    return rewards.score(asked(*["2"] * len(texts)), texts, [1] * len(texts)).total.tolist()


def is_alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in open(f"/proc/{int(pid)}/status").read()


def soon(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_an_import_takes_no_time_of_a_completion_and_happens_once(module):
    """Nor after a completion whose process was killed."""
    rewards = rewards_of(f"{module(seconds=1.5)}:pid", reward_timeout=1.2, reward_failed=-1.0)
    (first,) = score(rewards, "")
    assert first not in (os.getpid(), -1.0)
    assert score(rewards, "") == [first]
    hung, second = score(rewards, "hang", "")
    assert (hung, second != -1.0) == (-1.0, True)
    rewards.close()


def test_workers_end_with_their_rewards(module):
    name = f"{module()}:pid"
    rewards = rewards_of(name, reward_timeout=9.0)
    (first,) = score(rewards, "")
    rewards.close()
    assert not is_alive(first)
    (second,) = score(rewards, "")  # it starts a new one
    assert is_alive(second)
    del rewards
    gc.collect()
    assert not is_alive(second)


def test_workers_end_when_a_call_is_interrupted(module, monkeypatch):
    workers = Workers(Source(module(), "pid"), 600.0)
    ((pid,),) = workers.call([("", "", {})])

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        workers.call([("", "hang", {})])
    signal.signal(signal.SIGALRM, previous)
    assert not is_alive(pid)


def test_a_killed_run_leaves_no_worker(module, tmp_path):
    source, noted = Source(module(), "pid"), tmp_path / "pid"
    child = os.fork()
    if child == 0:
        workers = Workers(source, 600.0)
        ((pid,),) = workers.call([("", "", {})])
        noted.write_text(f"{pid:.0f} ")
        workers.call([("", "hang", {})])
    assert soon(lambda: noted.exists() and noted.read_text().endswith(" "))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert soon(lambda: not is_alive(noted.read_text()))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise ImportError('no GPU here')", "raised ImportError: no GPU here in .* line 6"),
        ("os._exit(3)", "ended its process, with exit code 3"),
    ],
)
def test_what_only_a_worker_cannot_import_is_named(module, fault, reason):
    """It is no failure of a completion."""
    name = module(fault=fault)
    rewards = rewards_of(f"{name}:pid", reward_timeout=9.0, reward_failed=0.0)
    with pytest.raises(RewardError, match=f"^reward: a worker cannot load {name}:pid, .*{reason}"):
        score(rewards, "", "")


@pytest.mark.parametrize("limit", [None, 9.0])
def test_an_asynchronous_function_is_awaited(module, limit):
    """Always on one loop, also where another one runs, and if it fails."""
    rewards = rewards_of(f"{module()}:slowly", reward_timeout=limit, reward_failed=-2.0)

    async def in_a_notebook():
        return score(rewards, "a", "exit", "bcd")

    assert score(rewards, "a", "bc") == [1, 2]
    assert asyncio.run(in_a_notebook()) == [1, -2, 3]
    assert score(rewards, "abc") == [3]
    rewards.close()


def test_a_function_of_a_program_needs_a_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", torch)
    assert rewards_of("__main__:rand", reward_timeout=9.0)
    monkeypatch.setattr(torch, "__spec__", None)
    monkeypatch.delattr(torch, "__file__")
    with pytest.raises(ValueError, match="reward_timeout needs functions of a file"):
        rewards_of("__main__:rand", reward_timeout=9.0)
