"""The runs of `make gpu` without a GPU: each says what is missing, and keeps what it has."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.gpu.device import head_of_ranks, pieces
from tests.gpu.device.run import NAME, read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time
import pytest, torch
from tests.gpu.device.conftest import fixed_seed

@pytest.mark.parametrize("i", range(3))
def test_good(i): pass

def test_crash(): os._exit(3)

def test_bad(): assert 1 == 2, "one is not two"

def test_without_a_device(): pytest.skip("there is no such device")

def test_hang(): time.sleep(HANG)

def test_loses(): torch.cuda.lost = True

@pytest.mark.alone
def test_large(): pass

def test_last(): assert os.environ["OMP_NUM_THREADS"] == "2"
"""
#: In the place of the real one, whose import takes seconds.
TORCH = """
def manual_seed(seed): pass

class cuda:
    lost = False

    def is_available(): return True

    def empty_cache(): pass

    def synchronize():
        if cuda.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
#: Of the tests for a GPU: on small inputs, without what only a GPU can do.
SMALL = "(cuda or triton) and (masked_rows or waits or large and 129)"
#: A program that notes how it was called, and hangs in a benchmark.
NOTES = """#!/bin/sh
echo "$(basename "$0") $*" >> "$NOTES"
case "$*" in *fastrl.bench*) sleep 600;; esac
"""


def run(*command, **environment):
    given = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env={**given, **environment},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run_tests(tmp_path):
    """A function that runs TESTS where torch seems to have a GPU."""
    (tmp_path / "torch.py").write_text(TORCH)
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tmp_path)}

    def start(*options, jobs=1, hang=600):
        (tmp_path / "test_some.py").write_text(TESTS.replace("HANG", str(hang)))
        command = ["tests.gpu.device.run", "--out", str(tmp_path), "--jobs", str(jobs), *options]
        plugins = {"PYTEST_PLUGINS": "xdist.plugin"} if jobs > 1 else {}
        return run(*command, str(tmp_path / "test_some.py"), **environment, **plugins)

    return start


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_crash_a_hang_and_a_lost_gpu_take_no_other_test_with_them(run_tests, tmp_path, jobs):
    code, said = run_tests("--test-seconds", "2", jobs=jobs)
    assert code == 1
    found = {test.rpartition("::")[2]: one for test, one in read(tmp_path).items()}
    failed = {name: why for name, (kind, why) in found.items() if kind == "failed"}
    assert failed.keys() == {"test_crash", "test_bad", "test_hang", "test_loses"}
    assert "one is not two" in failed["test_bad"]
    assert "illegal memory access" in failed["test_loses"]
    assert "1 skipped: there is no such device" in said
    assert "5 passed, 4 failed, 1 skipped, 0 cut" in said
    assert "test_hang" in (tmp_path / "hung.txt").read_text()


def test_a_run_that_is_cut_keeps_its_outcomes_and_goes_on(run_tests, tmp_path):
    code, said = run_tests("--seconds", "8", "--test-seconds", "0")
    assert code == 1
    assert "1 cut" in said
    assert "cut after 8 s; --resume runs what is left" in said
    with (tmp_path / NAME).open("a") as file:
        file.write('\n{"test": "half a li')
    code, said = run_tests("--resume", hang=0)
    assert code == 1  # what failed is not tried again
    assert "6 passed, 3 failed, 1 skipped, 0 cut" in said


def test_tests_for_a_gpu_run_on_executed_kernels(tmp_path):
    """Fixtures, inputs, budgets, replays, the process around, by the command that is documented."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    pattern = r'^FASTRL_TESTED="triton cuda" python -m (tests\.\S*run -p \S*pretended) '
    (line,) = re.findall(pattern, text, re.MULTILINE)
    options = ["--jobs", "1", "--out", str(tmp_path), "-k", SMALL, "tests/gpu/device"]
    code, said = run(*shlex.split(line), *options, FASTRL_TESTED="triton cuda")
    assert code == 0, said[-3000:]
    assert len(read(tmp_path)) >= 40


def test_the_values_of_a_piece_on_executed_kernels():
    commands = [command for _, commands in pieces.STEPS.values() for command in commands]
    given = {**os.environ, "PYTHON": sys.executable, "LEFT": "300"}
    small = "--device pretended --jobs 1 --function gae"
    for command in filter(lambda command: "-m tests.fuzz" in command, commands):
        command = re.sub(r"--cases \d+", "--cases 2", command.replace("--device cuda", small))
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=given, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ": 0 failed in 0 ways" in done.stdout


@pytest.mark.parametrize("way", ["pool", "compiled"])
def test_first_calls_of_a_process_on_the_cpu(way):
    names = "policy_loss", "logits_policy_loss by sequence", "gae"
    code, said = run("tests.gpu.device.first_calls", "cpu", way, *names)
    assert code == 0, said[-3000:]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_heads_that_ranks_shard_or_split_on_the_cpu():
    head_of_ranks.assert_sharded_equals_whole("cpu", "gloo", "cpu")
    head_of_ranks.assert_parts_equal_whole("cpu", "cpu")


def test_a_piece_is_cut_in_time_and_leaves_what_it_has(tmp_path, monkeypatch, capsys):
    for name in ("python", "nvcc", "ncu", "launches"):
        (tmp_path / name).write_text(NOTES)
        (tmp_path / name).chmod(0o755)
    settings = {"WORK": tmp_path / "work", "PACKING": 0.2, "ENDING": 0.4}
    settings |= {"driver": lambda: tmp_path / "launches"}
    settings |= {"path_with_tools": lambda: f"{tmp_path}:/usr/bin:/bin"}
    for name, value in settings.items():
        monkeypatch.setattr(pieces, name, value)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["pieces", "machine", "second", "--seconds", "4"])
    for name, value in {"PATH": "", "OUT": tmp_path / "out", "NOTES": tmp_path / "notes"}.items():
        monkeypatch.setenv(name, str(value))
    assert pieces.main() == 1
    said = capsys.readouterr().out
    assert "machine: nvidia-smi ended with status 127" in said
    assert "linear-tests: done" in said
    assert "draws: done" in said
    assert re.search("linear-bench: .*took too long", said)
    assert "peers: no time for" in said
    calls = (tmp_path / "notes").read_text()
    assert "launches large 20" in calls
    assert "-m tests.gpu.device.build" in calls
    with tarfile.open(tmp_path / "out" / "gpu-machine-second.tar.gz") as file:
        assert {"machine/log.txt", "linear-tests/log.txt", "linear-bench/log.txt"} <= set(
            file.getnames()
        )


def test_the_pieces_are_listed_without_any_package():
    command = [sys.executable, "-S", "-m", "tests.gpu.device.pieces", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pieces first" in done.stdout


def test_what_the_steps_call_exists():
    words = " ".join(command for _, commands in pieces.STEPS.values() for command in commands)
    named = re.findall(r"(?:tests|bench)/\S+\.py", words)
    assert len(named) >= 4
    assert all((ROOT / name).exists() for name in named)
