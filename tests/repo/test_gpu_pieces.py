"""The runs of `make gpu` without a GPU: each says what is missing, and keeps what it has."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.device import build, pieces
from tests.gpu.device.results import NAME, read, summary

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time
import pytest, torch
from tests.gpu.device.conftest import fixed_seed

@pytest.mark.parametrize("i", range(3))
def test_good(i): pass

def test_bad(): assert 1 == 2, "one is not two"

def test_without_a_device(): pytest.skip("there is no such device")

def test_threads(): assert os.environ["OMP_NUM_THREADS"] == "2"

def test_last(): pass
"""
CRASH = "\ndef test_crash(): os._exit(3)\n"
HANG = "\ndef test_hang(): time.sleep(600)\n"
LOSES_THE_GPU = """
def test_loses(): torch.cuda.lost = True

def test_fails_and_loses():
    torch.cuda.lost = True
    assert 1 == 2, "one is not two"
"""
ALONE = "\n@pytest.mark.alone\ndef test_large(): pass\n"
#: The import of all others takes longer than these tests.
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
#: In the place of the real one, whose import takes seconds.
TORCH = """
print("torch of", __file__)

def manual_seed(seed): pass

class cuda:
    lost = False

    def is_available(): return HAS_GPU

    def empty_cache(): pass

    def synchronize():
        if cuda.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture
def torch_of(tmp_path):
    """A function that returns an environment in which torch has a GPU, or none."""

    def write(has_gpu):
        (tmp_path / "torch.py").write_text(TORCH.replace("HAS_GPU", str(has_gpu)))
        given = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
        return {**given, **FEW_PLUGINS, "PYTHONPATH": str(tmp_path)}

    return write


@pytest.fixture
def run(tmp_path, torch_of):
    """A function that runs a file of tests as the pieces do; it returns the process."""

    def start(text, *options, jobs=1, **variables):
        if jobs > 1:
            pytest.importorskip("xdist")
            variables["PYTEST_PLUGINS"] = "xdist.plugin"
        file = tmp_path / "test_some.py"
        file.write_text(text)
        command = [
            sys.executable,
            "-m",
            "tests.gpu.device.run",
            "--without-gpu",
            "--out",
            str(tmp_path),
        ]
        command += ["--jobs", str(jobs), *options, str(file)]
        return subprocess.Popen(
            command, cwd=ROOT, env={**torch_of(has_gpu=True), **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def outcomes(folder):
    return {test.rpartition("::")[2]: one for test, one in read(folder).items()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_crash_a_hang_and_a_lost_gpu_take_no_other_test_with_them(run, tmp_path, jobs):
    text = CRASH.join(["", TESTS]) + HANG + LOSES_THE_GPU + ALONE
    done = run(text, "--test-seconds", "2", jobs=jobs)
    said, _ = done.communicate(timeout=120)
    found = outcomes(tmp_path)
    kinds = {name: one.outcome for name, one in found.items()}
    assert kinds == {
        **{f"test_good[{i}]": "passed" for i in range(3)},
        "test_bad": "failed",
        "test_without_a_device": "skipped",
        "test_threads": "passed",
        "test_crash": "failed",
        "test_hang": "failed",
        "test_loses": "failed",
        "test_fails_and_loses": "failed",
        "test_large": "passed",
        "test_last": "passed",
    }
    assert "one is not two" in found["test_bad"].why
    assert "one is not two" in found["test_fails_and_loses"].why
    assert jobs > 1 or "an illegal memory access" in found["test_loses"].why
    assert "1 skipped: there is no such device" in said
    assert "6 passed, 5 failed, 1 skipped, 0 cut" in said
    assert done.returncode == 1
    assert "test_hang" in (tmp_path / "hung.txt").read_text()


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
    assert lines[-1] == "6 passed, 0 failed, 1 skipped, 1 cut"
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().rpartition("\n")[0] + "\n")
    continued = run(slow.replace("600", "0"), "--resume")
    said, _ = continued.communicate(timeout=60)
    assert "7 passed, 0 failed, 1 skipped, 0 cut" in said
    assert "7 deselected" in said
    assert continued.returncode == 0


def test_the_time_limit_of_a_run_and_a_variable_of_the_environment(run):
    text = HANG.join([TESTS.replace('== "2"', '== "3"'), ""])
    done = run(text, "--seconds", "6", "--test-seconds", "0", OMP_NUM_THREADS="3")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "5 passed, 1 failed, 1 skipped, 1 cut" in said
    assert "cut after 6 s; --resume runs what is left" in said


def test_no_outcome_is_no_success(run):
    done = run("import nothing_of_this_name\n")
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "No module named 'nothing_of_this_name'" in said


def test_arguments_of_pytest_may_come_first(run):
    done = run(TESTS, "-p", "no:cacheprovider", "-k", "good or last")
    said, _ = done.communicate(timeout=60)
    assert "4 passed, 0 failed, 0 skipped, 0 cut" in said
    assert done.returncode == 0


def test_the_documented_run_without_a_gpu(tmp_path):
    """The files for a GPU can be run: fixtures, inputs, budgets, replays, the process around."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"^python (-m tests\.gpu\.run --without-gpu .*)$", text, re.MULTILINE)
    command = [sys.executable, *shlex.split(line), "--out", str(tmp_path), "--jobs", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **FEW_PLUGINS}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert len(read(tmp_path)) >= 3


def test_without_a_gpu_a_piece_says_so_and_takes_packages_from_a_folder(tmp_path, torch_of):
    command = ["make", "gpu-second", f"OUT={tmp_path / 'out'}", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run(
        command, cwd=ROOT, env=torch_of(has_gpu=False), capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert f"torch of {tmp_path / 'torch.py'}" in done.stdout
    assert "there is no GPU that torch can use" in done.stdout
    assert not (tmp_path / "out").exists()


# The pieces, with programs that only note how they were called.
NOTES = """#!/bin/sh
echo "$(basename "$0") $*" >> "$NOTES"
case "$*" in *--out*) test -z "$CUT" || sleep 600;; esac
echo "this is $(basename "$0")"
"""
PROGRAMS = ("python", "nvcc", "nvidia-smi", "ncu", "compute-sanitizer", "launches")


@pytest.fixture
def piece(tmp_path, monkeypatch):
    """A function that runs a piece; it returns the exit status and how programs were called."""
    tools, notes = tmp_path / "tools", tmp_path / "notes"
    tools.mkdir()
    for name in PROGRAMS:
        (tools / name).write_text(NOTES)
        (tools / name).chmod(0o755)
    monkeypatch.setattr(pieces, "WORK", tmp_path / "work")
    monkeypatch.setattr(pieces, "driver", lambda: tools / "launches")
    monkeypatch.setattr(build, "FOLDERS", (str(tools),))
    monkeypatch.setattr(build, "PROFILERS", ())
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    at_the_end = signal.getsignal(signal.SIGTERM)

    def start(*arguments):
        notes.write_text("")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        code = pieces.main([*arguments])
        return code, notes.read_text().splitlines()[1:]  # the first asks for a GPU

    yield start
    signal.signal(signal.SIGTERM, at_the_end)


def packed(tmp_path):
    (archive,) = (tmp_path / "out").iterdir()
    with tarfile.open(archive) as file:
        return archive.name, {name for name in file.getnames() if "/" in name}


EXPECTED = {
    "first": ["python -m tests.gpu.device.build", "nvidia-smi", "python -m fastrl doctor", "nvcc",
              "launches clusters", "launches large", "python -m tests.gpu.device.run"],
    "second": ["python -m tests.gpu.device.build", "ncu --clock-control none", "ncu --import",
               "python bench/gpu.py", "python bench/gpu.py"],
    "third": ["python -m tests.gpu.device.build", "python -m tests.gpu.device.run", "python bench/gpu.py",
              *(f"compute-sanitizer --tool {tool}" for tool in
                ("memcheck", "synccheck", "racecheck")), "python bench/gpu_tuning.py"],
}  # fmt: skip


@pytest.mark.parametrize("name", pieces.PIECES)
def test_a_piece_makes_its_steps_in_order_and_leaves_one_file(piece, tmp_path, name):
    code, calls = piece(name)
    assert code == 0
    assert len(calls) == len(EXPECTED[name])
    assert all(map(str.startswith, calls, EXPECTED[name])), calls
    assert packed(tmp_path) == (
        f"gpu-{name}.tar.gz", {f"{step}/log.txt" for step in pieces.PIECES[name]}
    )  # fmt: skip


def test_what_the_steps_are_called_with_exists():
    for step in pieces.STEPS.values():
        words = " ".join(step.commands).split()
        assert all((ROOT / word).exists() for word in words if re.match(r"(tests|bench)/", word))


def test_the_benchmarks_of_the_pieces(bench):
    cases = bench("gpu_cases")
    made = [item.make() for item in cases.items(cases.SHAPES["gpu"], torch.device("cpu"))]
    names = [f"{case.label} {case.work}" for case in made]
    chosen = {
        step: [name for name in names if re.search(shlex.split(*of.commands)[-1 - late], name)]
        for step, late in (("bench", 1), ("peers", 0), ("linear-bench", 0))
        for of in [pieces.STEPS[step]]
    }
    assert chosen["bench"] == chosen["peers"]
    assert len(chosen["peers"]) == 12
    work = "loss and gradients, trained head"
    shapes = ("8192 x 4096 x 128256", "8192 x 896 x 151936")
    assert chosen["linear-bench"] == [
        f"linear_policy_loss {shape} bfloat16 {work}" for shape in shapes
    ]


def test_a_step_continues_what_is_there_although_the_output_folder_is_emptied(piece, tmp_path):
    piece("tests")
    (tmp_path / "work" / "tests" / NAME).write_text("found before")
    _, (call,) = piece("tests", "--resume")
    assert call.endswith(" --resume")
    assert packed(tmp_path) == ("gpu-tests.tar.gz", {"tests/log.txt", f"tests/{NAME}"})
    _, (call,) = piece("tests")
    assert "--resume" not in call
    assert packed(tmp_path) == ("gpu-tests.tar.gz", {"tests/log.txt"})


def test_a_piece_is_cut_in_time_and_leaves_what_it_has(piece, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pieces, "PACKING", 0.2)
    monkeypatch.setattr(pieces, "ENDING", 0.4)
    monkeypatch.setenv("CUT", "1")
    start = time.monotonic()
    code, calls = piece("second", "--seconds", "2")
    assert code == 1
    assert time.monotonic() < start + 30
    assert len(calls) == 4  # the last step has no time
    said = capsys.readouterr().out
    assert "bench: python took too long" in said
    assert "peers: no time for" in said
    assert "this is ncu" in said
    _, names = packed(tmp_path)
    assert "profile/log.txt" in names


def test_a_piece_that_is_ended_leaves_what_it_has(piece, tmp_path):
    (tmp_path / "tools" / "nvidia-smi").write_text("#!/bin/sh\nkill -TERM $PPID\nsleep 600\n")
    with pytest.raises(SystemExit):
        piece("first")
    assert packed(tmp_path)[1] == {"build/log.txt", "machine/log.txt"}


def test_a_missing_program_is_named_and_the_others_run(piece, tmp_path, capsys):
    (tmp_path / "tools" / "nvidia-smi").unlink()
    code, calls = piece("machine")
    assert code == 1
    assert len(calls) == len(EXPECTED["first"]) - 3
    said = capsys.readouterr().out
    assert "machine: nvidia-smi is not there" in said
    assert "also in the usual folders of the CUDA toolkit" in said


# The build, with a compiler that makes empty files.
NVCC = """#!/bin/sh
test "$1" = -dryrun && echo "#\\$ TOP=/usr" >&2 && exit
while [ "$1" != -o ]; do test $# = 0 && exit; shift; done
printf '#!/bin/sh\nexit $BROKEN\n' > "$2" && chmod +x "$2"
"""


def test_what_loads_is_not_compiled_and_all_else_is(piece, tmp_path, monkeypatch, capfd):
    (tmp_path / "tools" / "nvcc").write_text(NVCC)
    for name, value in {"TORCH_CUDA_ARCH_LIST": "9.0", "FASTRL_BUILD": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "DRIVERS", tmp_path / "driver")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(ROOT)
    for broken, said in (("0", "no build of these sources"), ("0", "nothing is compiled"),
                         ("1", "status 1; compiling")):  # fmt: skip
        monkeypatch.setenv("BROKEN", broken)
        assert build.main() == 0
        assert said in capfd.readouterr().out
        assert [*(tmp_path / "driver").iterdir()] == [build.driver()]
        build.driver().chmod(0o644)


@pytest.mark.parametrize("home", [True, False])
def test_tools_are_found_in_the_folders_of_the_toolkit(tmp_path, monkeypatch, home):
    for folder in ("home/bin", "usual/cuda-13.0/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nvcc").touch(mode=0o755)
    monkeypatch.setattr(build, "FOLDERS", (f"{tmp_path}/usual/cuda-*/bin",))
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home") if home else "")
    found = shutil.which("nvcc", path=build.path_with_tools())
    assert found == str(tmp_path / ("home/bin" if home else "usual/cuda-13.0/bin") / "nvcc")
