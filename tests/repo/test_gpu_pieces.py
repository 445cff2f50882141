"""The pieces of `make gpu` without a GPU: each says what is missing, and keeps what it has."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.results import NAME, read, summary

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("i", range(3))
def test_good(i): pass

def test_bad(): assert 1 == 2, "one is not two"

def test_without_a_device(): pytest.skip("there is no such device")

def test_last(): pass
"""
CRASH = "\ndef test_crash(): os._exit(3)\n"
HANG = "\ndef test_hang(): time.sleep(600)\n"
LOSES_THE_GPU = """
import torch
from tests.gpu.conftest import fixed_seed

lost = []
torch.cuda.is_available = lambda: True

def synchronize():
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.synchronize = synchronize

def test_first(): pass

def test_loses(): lost.append(True)

def test_fails_and_loses():
    lost.append(True)
    assert 1 == 2, "one is not two"

def test_last(): pass
"""
ALONE = "\n@pytest.mark.alone\ndef test_large(): pass\n"
SANITIZER = """#!/bin/sh
test "$1" = --help && echo "  --kernel-name arg" && exit
while [ "$1" != -m ]; do
  test "$1" = --log-file && echo "========= ERROR SUMMARY: $ERRORS errors" > "$2"
  python=$1; shift
done
"$python" "$@" || exit
test "$ERRORS" = 0 || exit 9
"""


def make(*arguments, path=None, **variables):
    command = ["make", *arguments, f"GPU_PYTHON={sys.executable}"]
    environment = {**os.environ, **variables}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def run(tmp_path):
    """A function that runs a file of tests as `make gpu-test` does; it returns the process."""

    def start(text, *options, jobs=1):
        file = tmp_path / "test_some.py"
        file.write_text(text)
        command = [sys.executable, "-m", "tests.gpu.run", "--without-gpu", "--out", str(tmp_path)]
        command += ["--jobs", str(jobs), *options, str(file)]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def outcomes(folder):
    return {test.rpartition("::")[2]: one for test, one in read(folder).items()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_crash_and_a_hang_take_no_other_test_with_them(run, tmp_path, jobs):
    if jobs > 1:
        pytest.importorskip("xdist")
    done = run(CRASH.join(["", TESTS]) + HANG + ALONE, "--test-seconds", "2", jobs=jobs)
    said, _ = done.communicate(timeout=120)
    found = outcomes(tmp_path)
    kinds = {name: one.outcome for name, one in found.items()}
    assert kinds == {
        **{f"test_good[{i}]": "passed" for i in range(3)},
        "test_bad": "failed",
        "test_without_a_device": "skipped",
        "test_crash": "failed",
        "test_hang": "failed",
        "test_large": "passed",
        "test_last": "passed",
    }
    assert "one is not two" in found["test_bad"].why
    assert "1 skipped: there is no such device" in said
    assert "5 passed, 3 failed, 1 skipped, 0 cut" in said
    assert done.returncode == 1
    assert "test_hang" in (tmp_path / "hung.txt").read_text()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_test_that_loses_the_gpu_after_its_body_fails(run, tmp_path, jobs):
    if jobs > 1:
        pytest.importorskip("xdist")
    done = run(LOSES_THE_GPU, jobs=jobs)
    said, _ = done.communicate(timeout=120)
    found = outcomes(tmp_path)
    kinds = {name: one.outcome for name, one in found.items()}
    assert kinds == {
        "test_first": "passed",
        "test_loses": "failed",
        "test_fails_and_loses": "failed",
        "test_last": "passed",
    }
    assert "one is not two" in found["test_fails_and_loses"].why
    assert jobs > 1 or "an illegal memory access" in found["test_loses"].why
    assert "2 passed, 2 failed, 0 skipped, 0 cut" in said
    assert done.returncode == 1


def test_a_killed_run_keeps_its_outcomes_and_can_be_continued(run, tmp_path):
    slow = TESTS.replace("1 == 2", "1 == 1") + HANG
    killed = run(slow, "--test-seconds", "0")
    deadline = time.monotonic() + 60
    while "test_hang" not in outcomes(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    killed.send_signal(signal.SIGTERM)
    killed.communicate(timeout=30)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"test": "half a li')
    lines, passed = summary(tmp_path)
    assert not passed
    assert lines[-1] == "5 passed, 0 failed, 1 skipped, 1 cut"
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().rpartition("\n")[0] + "\n")
    continued = run(slow.replace("600", "0"), "--resume")
    said, _ = continued.communicate(timeout=60)
    assert "6 passed, 0 failed, 1 skipped, 0 cut" in said
    assert "6 deselected" in said
    assert continued.returncode == 0


def test_the_time_limit_of_a_run(run, tmp_path):
    done = run(TESTS + HANG, "--seconds", "5", "--test-seconds", "0")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "cut: " in said
    assert "cut after 5 s; RESUME=1 runs what is left" in said


def test_no_outcome_is_no_success(run, tmp_path):
    done = run("import nothing_of_this_name\n")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "No module named 'nothing_of_this_name'" in said


def test_arguments_of_pytest_may_come_first(run, tmp_path):
    done = run(TESTS, "-p", "no:cacheprovider", "-k", "good or last")
    said, _ = done.communicate(timeout=60)
    assert "4 passed, 0 failed, 0 skipped, 0 cut" in said
    assert done.returncode == 0


def test_without_a_file_the_tests_of_this_folder_run(tmp_path):
    command = [sys.executable, "-m", "tests.gpu.run", "--without-gpu", "--out", str(tmp_path)]
    command += ["--jobs", "1", "-k", "there_are_kernels or test_layout"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=90)
    assert [*read(tmp_path)] == ["tests/gpu/test_gpu_backends.py::test_there_are_kernels_to_test"]


def test_the_documented_run_without_a_gpu(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"^python (-m tests\.gpu\.run --without-gpu .*)$", text, re.MULTILINE)
    command = [sys.executable, *shlex.split(line), "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert len(read(tmp_path)) >= 8


def test_some_tests_of_a_gpu_on_tensors_of_the_cpu(tmp_path):
    """The files for a GPU can be run: fixtures, inputs, budgets, replays, the process around."""
    some = "(captures or captured or factor or change_no_bit or side_by_side) and triton and not 16"
    command = [sys.executable, "-m", "tests.gpu.run", "--without-gpu", "--out", str(tmp_path)]
    command += ["--jobs", "1", "tests/gpu", "-p", "tests.gpu.pretended", "-k", some]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(read(tmp_path)) >= 20


def test_packages_that_are_not_installed_are_found(tmp_path):
    (tmp_path / "sitecustomize.py").write_text('print("from PYTHONPATH")')
    done = make("gpu-bench", f"OUT={tmp_path}", "ARGS=--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "from PYTHONPATH" in done.stdout


def test_a_missing_gpu_is_said(tmp_path):
    done = make("gpu-test", f"OUT={tmp_path}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode
    assert "there is no GPU that torch can use" in done.stdout


def test_a_missing_compiler_is_said(tmp_path):
    done = make("gpu-build", f"OUT={tmp_path}", CUDA_HOME=str(tmp_path))
    assert done.returncode
    assert "make gpu-build needs nvcc" in done.stdout


def test_a_missing_sanitizer_is_said(tmp_path):
    done = make("gpu-sanitize", f"OUT={tmp_path}", f"GPU_PYTHON={sys.executable}")
    if "needs compute-sanitizer" not in done.stdout:
        pytest.skip("compute-sanitizer is installed")
    assert done.returncode


@pytest.fixture
def sanitize(tmp_path):
    """A function that runs gpu-sanitize with a script in the place of compute-sanitizer."""

    def run(script, **variables):
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(script)
        tool.chmod(0o755)
        # the backend of these calls is one that this machine has
        given = {"TOOLS": "memcheck", "BACKENDS": "cpu", "SANITIZE_SECONDS": "60", **variables}
        arguments = [f"{name}={value}" for name, value in given.items()]
        return make("gpu-sanitize", f"OUT={tmp_path}", *arguments, path=tmp_path)

    return run


def sanitized_outcome(folder):
    (line,) = (folder / "sanitize.jsonl").read_text().splitlines()
    return json.loads(line)["outcome"]


@pytest.mark.parametrize(
    ("errors", "seconds", "outcome"),
    [(0, 60, "clean, "), (2, 60, "FOUND something"), (0, 0, "out of time after 0 calls")],
)
def test_the_sanitizer_makes_the_calls_and_keeps_the_result(
    sanitize, tmp_path, errors, seconds, outcome
):
    done = sanitize(SANITIZER.replace("$ERRORS", str(errors)), SANITIZE_SECONDS=str(seconds))
    assert sanitized_outcome(tmp_path).startswith(outcome), done.stdout
    assert (done.returncode == 0) == outcome.startswith("clean")


def test_every_kind_of_call_is_sanitized(sanitize, tmp_path):
    """Operators, 16-bit elements, the linear forms, and gradients that a factor scales."""
    done = sanitize(SANITIZER.replace("$ERRORS", "0"))
    assert done.returncode == 0, done.stdout
    said = (tmp_path / "sanitize-memcheck-cpu.calls").read_text()
    made = {line.removeprefix("made ") for line in said.splitlines() if line.startswith("made ")}
    assert sanitized_outcome(tmp_path) == f"clean, {len(made)} calls"
    assert made >= {
        "gae, bootstrap token, packed",
        "group_advantages, group, ids True",
        "policy_loss, half of it, padded",
        "token_stats, V 1001, float32",
        "token_stats, V 1000, bfloat16",
        "token_stats, V 1001, bfloat16",
        "logits_policy_loss, half of it, V 1001, float32",
        "logits_policy_loss, half of it, V 1001, bfloat16",
        "logits_policy_loss, half of it, in place, V 1001, bfloat16",
        "linear_policy_loss, half of it",
    }


@pytest.mark.parametrize(
    ("script", "after"),
    [
        ("#!/bin/sh\necho No attachable process found\n", "0 of ?"),
        ("#!/bin/sh\necho 3 calls\necho call gae\necho made gae\necho call gae\n", "1 of 3"),
    ],
    ids=("none", "not all"),
)
def test_a_sanitizer_that_does_not_see_all_calls_has_failed(sanitize, tmp_path, script, after):
    done = sanitize(script)
    assert done.returncode
    assert sanitized_outcome(tmp_path).startswith(f"FAILED: status 0 after {after} calls")


@pytest.mark.parametrize("variables", [{"BACKENDS": "reference"}, {"TOOLS": ""}], ids=str)
def test_nothing_to_sanitize_is_no_success(sanitize, variables):
    done = sanitize(SANITIZER, **variables)
    assert done.returncode
    assert "make gpu-sanitize has nothing to do" in done.stdout
