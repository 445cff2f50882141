"""What is run on a machine with a GPU, in three pieces of nine minutes: `make gpu`.

    python -m tests.gpu.device.pieces first    # build, machine, tests
    python -m tests.gpu.device.pieces second   # build, profile, bench, peers
    python -m tests.gpu.device.pieces third    # build, linear-tests, linear-bench, sanitize, tune
    python -m tests.gpu.device.pieces peers tune    # some steps

Each piece can be the first command on a fresh machine. It ends within `--seconds`, whatever a step
does, and leaves OUT/gpu-<piece>.tar.gz, also where it is ended; OUT is a variable of the
environment. A step works and logs in build/gpu/<step>, where `--resume` goes on with what is there:
on another machine unpack the archive in build/gpu.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from tests.gpu.device.build import driver, path_with_tools

ROOT = Path(__file__).parents[3]
WORK = ROOT / "build" / "gpu"
PACKING = 10.0  # seconds at the end of a piece
ENDING = 8.0  # seconds that a step has to end when its time is over, and its inner limit is less
TAIL = 3000  # characters of a step's log that are shown

_TESTS = "{python} -m tests.gpu.device.run --out {out} --seconds {seconds} {resume}"
_BENCH = "{python} bench/gpu.py --out {out} --seconds {seconds} {resume} --only"
_LOGITS = "'^(token_stats|logits_policy_loss) 8192 x'"
_LINEAR = "'^linear_policy_loss 8192 x (4096 x 128256|896 x 151936) .*trained head$'"
_NCU = "ncu --clock-control none --set full --force-overwrite --export {out}/profile"
_SANITIZE = "compute-sanitizer --error-exitcode 9 --tool"
_FILES = "tests/gpu/device/test_gpu_"
#: Seconds at most (what a step leaves is for those after it) and commands, by importance: within a
#: piece the last ones are cut first.
STEPS: dict[str, tuple[float, list[str]]] = {
    "build": (180, ["{python} -m tests.gpu.device.build"]),
    "machine": (
        60,
        [
            "nvidia-smi",
            "{python} -m fastrl doctor",
            "nvcc --version",
            "{launches} clusters",
            "{launches} large 20",
        ],
    ),
    "tests": (
        540,
        [f"{_TESTS} {_FILES}backends.py {_FILES}calls.py {_FILES}vocabulary.py {_FILES}tokens.py"],
    ),
    "profile": (
        100,
        [f"{_NCU} {{launches}} large", "ncu --import {out}/profile.ncu-rep --page details"],
    ),
    # both measure fastrl: the difference is the noise
    "bench": (150, [f"{_BENCH} {_LOGITS} --no-peers"]),
    "peers": (540, [f"{_BENCH} {_LOGITS}"]),
    "linear-tests": (190, [f"{_TESTS} {_FILES}linear.py {_FILES}graphs.py"]),
    "linear-bench": (150, [f"{_BENCH} {_LINEAR}"]),
    # what racecheck finds need not be a defect: it may not know barriers in remote shared memory
    "sanitize": (
        70,
        [f"{_SANITIZE} {tool} {{launches}}" for tool in ("memcheck", "synccheck", "racecheck")],
    ),
    "tune": (540, ["{python} bench/gpu_tuning.py --out {out} --seconds {seconds} --knobs chunk"]),
}
PIECES = {
    "first": ("build", "machine", "tests"),
    "second": ("build", "profile", "bench", "peers"),
    "third": ("build", "linear-tests", "linear-bench", "sanitize", "tune"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*PIECES, *STEPS], metavar="piece or step")
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of all of it")
    parser.add_argument("--resume", action="store_true", help="leave out what has a result")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - PACKING
    os.environ["PATH"] = path_with_tools()
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode:
        print("there is no GPU that torch can use")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the archive is written, too
    steps = [step for name in options.names for step in PIECES.get(name, (name,))]
    ended = []
    try:
        for name in steps:
            ended.append(_step(name, deadline, resume=options.resume))
            print(ended[-1], flush=True)
    finally:
        archive = _pack("-".join(options.names), steps)
        print("\n".join([*ended, f"packed: {archive}"]))
    return 0 if all(": done" in line for line in ended) else 1


def _step(name: str, deadline: float, *, resume: bool) -> str:
    """Make a step and return a line about how it ended."""
    (seconds, commands), out, start = STEPS[name], WORK / name, time.monotonic()
    until = min(deadline, start + seconds)
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    log, failed = out / "log.txt", []
    log.touch()
    for command in commands:
        left = until - time.monotonic() - ENDING
        if left <= 0:
            failed.append(f"no time for {command.split()[0]}")
            break
        filled = command.format(
            python=shlex.quote(sys.executable),
            out=shlex.quote(str(out)),
            seconds=f"{left:.0f}",
            launches=shlex.quote(str(driver())),
            resume="--resume" if resume else "",
        )
        if why := _run(filled, log, left + ENDING / 2):
            failed.append(f"{Path(shlex.split(filled)[0]).name} {why}")
    print(log.read_text(errors="replace")[-TAIL:])
    took = time.monotonic() - start
    return f"{name}: {', '.join(failed) or 'done'} ({took:.0f} s, log: {log})"


def _run(command: str, log: Path, seconds: float) -> str:
    """Run a command; return how it failed, or ''."""
    with log.open("a") as file:
        file.write(f"$ {command}\n")
        file.flush()
        running = subprocess.Popen(
            command, shell=True, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = running.wait(seconds)
        except subprocess.TimeoutExpired:
            return "took too long"
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)  # which ends what a step started
                time.sleep(ENDING / 4)
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
    return f"ended with status {code}" if code else ""


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
