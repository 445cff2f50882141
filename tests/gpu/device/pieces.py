"""What is run on a machine with a GPU, in three pieces of nine minutes: `make gpu`.

    python -m tests.gpu.device.pieces first          # build, machine, tests
    python -m tests.gpu.device.pieces second         # build, profile, bench, peers
    python -m tests.gpu.device.pieces third   # build, linear-tests, linear-bench, sanitize, tune
    python -m tests.gpu.device.pieces peers tune     # some steps

Each piece can be the first command on a fresh machine. It ends within `--seconds`, whatever a step
does, and leaves OUT/gpu-<piece>.tar.gz, also where it is ended; OUT is a variable of the
environment. A step works and logs in build/gpu/<step>, where `--resume` goes on with what is there:
on another machine unpack the archive in build/gpu.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.gpu.device.build import driver, path_with_tools

ROOT = Path(__file__).parents[3]
WORK = ROOT / "build" / "gpu"
PACKING = 10.0  # seconds at the end of a piece
ENDING = 8.0  # seconds that a step has to end when its time is over, and its inner limit is less
TAIL = 3000  # characters of a step's log that are shown


class Step(NamedTuple):
    """Commands one after the other; `{...}` are of _filled_in."""

    seconds: float  # at most; what a step leaves is for those after it
    commands: tuple[str, ...]
    resumes: bool = False


_TESTS = "{python} -m tests.gpu.device.run --out {out} --seconds {seconds}"
_BENCH = "{python} bench/gpu.py --out {out} --seconds {seconds} --only"
_LOGITS = "'^(token_stats|logits_policy_loss) 8192 x'"
_LINEAR = "'^linear_policy_loss 8192 x (4096 x 128256|896 x 151936) .*trained head$'"
_NCU = "ncu --clock-control none --set full --force-overwrite"
#: By importance: within a piece the last ones are cut first.
STEPS = {
    "build": Step(180, ("{python} -m tests.gpu.device.build",)),
    "machine": Step(
        60,
        (
            "nvidia-smi",
            "{python} -m fastrl doctor",
            "nvcc --version",
            "{launches} clusters",
            "{launches} large 20",
        ),
    ),
    "tests": Step(
        math.inf,
        (
            f"{_TESTS} tests/gpu/device/test_gpu_backends.py tests/gpu/device/test_gpu_cuda.py "
            "tests/gpu/device/test_gpu_vocabulary.py tests/gpu/device/test_gpu_tokens.py",
        ),
        resumes=True,
    ),
    "profile": Step(
        100,
        (
            f"{_NCU} --export {{out}}/profile {{launches}} large",
            "ncu --import {out}/profile.ncu-rep --page details",
        ),
    ),
    # both measure fastrl: the difference is the noise
    "bench": Step(150, (f"{_BENCH} {_LOGITS} --no-peers",), resumes=True),
    "peers": Step(math.inf, (f"{_BENCH} {_LOGITS}",), resumes=True),
    "linear-tests": Step(
        190,
        (f"{_TESTS} tests/gpu/device/test_gpu_linear.py tests/gpu/device/test_gpu_graphs.py",),
        resumes=True,
    ),
    "linear-bench": Step(150, (f"{_BENCH} {_LINEAR}",), resumes=True),
    # what racecheck finds need not be a defect: it may not know barriers in remote shared memory
    "sanitize": Step(
        70,
        tuple(
            f"compute-sanitizer --tool {tool} --error-exitcode 9 {{launches}}"
            for tool in ("memcheck", "synccheck", "racecheck")
        ),
    ),
    "tune": Step(
        math.inf,
        ("{python} bench/gpu_tuning.py --out {out} --seconds {seconds} --knobs chunk",),
    ),
}
PIECES = {
    "first": ("build", "machine", "tests"),
    "second": ("build", "profile", "bench", "peers"),
    "third": ("build", "linear-tests", "linear-bench", "sanitize", "tune"),
}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    deadline = time.monotonic() + options.seconds - PACKING
    steps = [step for name in options.names for step in PIECES.get(name, (name,))]
    os.environ["PATH"] = path_with_tools()
    if reason := _no_gpu():
        print(reason)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the archive is written, too
    ended = []
    try:
        for name in steps:
            ended.append(_step(name, deadline, resume=options.resume))
            print(ended[-1], flush=True)
    finally:
        archive = _pack("-".join(options.names), steps)
        print("\n".join([*ended, f"packed: {archive}"]))
    return 0 if all(": done" in line for line in ended) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*PIECES, *STEPS], metavar="piece or step")
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of all of it")
    parser.add_argument("--resume", action="store_true", help="leave out what has a result")
    return parser.parse_args(arguments)


def _no_gpu() -> str:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    return "there is no GPU that torch can use" if done.returncode else ""


def _step(name: str, deadline: float, *, resume: bool) -> str:
    """Make a step and return a line about how it ended."""
    step, out, start = STEPS[name], WORK / name, time.monotonic()
    until = min(deadline, start + step.seconds)
    if not (resume and step.resumes):
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for command in step.commands:
        left = until - time.monotonic() - ENDING
        if left <= 0:
            (out / "log.txt").touch()
            failed.append(f"no time for {command.split()[0]}")
            break
        words = _filled_in(command, out, left) + (["--resume"] if resume and step.resumes else [])
        if why := _run(words, out / "log.txt", left + ENDING / 2):
            failed.append(f"{Path(words[0]).name} {why}")
    took = f"{time.monotonic() - start:.0f} s"
    print((out / "log.txt").read_text(errors="replace")[-TAIL:])
    return f"{name}: {', '.join(failed) or 'done'} ({took}, log: {out / 'log.txt'})"


def _filled_in(command: str, out: Path, seconds: float) -> list[str]:
    values = {
        "{python}": sys.executable,
        "{out}": str(out),
        "{seconds}": f"{seconds:.0f}",
        "{launches}": str(driver()),
    }
    words = []
    for word in shlex.split(command):
        for place, value in values.items():
            word = word.replace(place, value)
        words.append(word)
    return words


def _run(command: list[str], log: Path, seconds: float) -> str:
    """Run a command; return how it failed, or ''."""
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        try:
            running = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            file.write(f"{error.strerror}, also in the usual folders of the CUDA toolkit\n")
            return "is not there"
        try:
            code = running.wait(seconds)
        except subprocess.TimeoutExpired:
            return "took too long"
        finally:
            _end(running)
        return f"ended with status {code}" if code else ""


def _end(running: subprocess.Popen[bytes]) -> None:
    """End a process that still runs: it ends those that it started when it is asked to."""
    if running.poll() is None:
        running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(ENDING / 4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _pack(name: str, steps: list[str]) -> Path:
    """Pack what the steps have left into one file, since few come back from a lent machine."""
    folder = Path(os.environ.get("OUT") or WORK)
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"gpu-{name}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for step in steps:
            if (WORK / step).exists():
                file.add(WORK / step, arcname=step)
    return archive


if __name__ == "__main__":
    sys.exit(main())
