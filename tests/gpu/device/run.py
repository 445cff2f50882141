"""Run the tests of this folder with a time limit.

    python -m tests.gpu.device.run --out build/gpu/tests --seconds 450

With pytest-xdist several tests run side by side, without it one after the other. Tests that need
most of the GPU's memory follow alone. Where a test takes the process with it (a crash, an error
after which the GPU refuses everything, a hang), the rest runs in another. Each outcome is written
to OUT/tests.jsonl when it is known; `--resume` continues a run that was cut. All other arguments
are pytest's, in their order: files (default: tests/gpu/device) and options.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.gpu.device.outcomes import LOST, NAME, append, read

ROOT = Path(__file__).parents[3]
#: Of pytest: all passed, some failed, none were collected.
ENDED = (0, 1, 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=lambda name: Path(name).resolve(), default="build/gpu/tests")
    parser.add_argument("--seconds", type=float, default=450.0, help="limit of the whole run")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="limit of one test")
    parser.add_argument("--jobs", type=int, default=0, help="processes; default: cores, at most 8")
    parser.add_argument("--backends", default="", help="default: all; a missing one is a failure")
    parser.add_argument("--resume", action="store_true", help="leave out what has an outcome")
    # no positional argument, which would part an option of pytest from its value
    options, options.of_pytest = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that pytest is stopped, too
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        (options.out / NAME).unlink(missing_ok=True)
    deadline = time.monotonic() + options.seconds
    in_time = all(_stage(options, stage, deadline) for stage in ("not alone", "alone"))
    passed = _summary(options.out)
    if not in_time:
        print(f"cut after {options.seconds:.0f} s; --resume runs what is left")
    return 0 if passed and in_time else 1


def _stage(options: argparse.Namespace, stage: str, deadline: float) -> bool:
    """Run the tests of a stage, in as many processes as it takes; return whether time sufficed."""
    jobs = options.jobs or min(8, os.cpu_count() or 1)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.device.outcomes", "-q", "-m", stage]
    # one argument: pytest would look for its rootdir above a separate one that is a folder
    command += [f"--results={options.out}", f"--test-seconds={options.test_seconds}"]
    command += ["--confcutdir=tests/gpu/device", f"--backends={options.backends}"]
    command += ["-o", "testpaths=tests/gpu/device", *options.of_pytest]
    if stage == "not alone" and jobs > 1 and importlib.util.find_spec("xdist"):
        # a replaced process costs seconds, and each may lose its GPU once per failing kernel; one
        # test at a time, so that the first ones run first
        command += ["-n", str(jobs), "--max-worker-restart=100", "--maxschedchunk=1"]
    while True:
        code = _until(deadline, command)
        died = [test for test, (outcome, _) in read(options.out).items() if outcome == "cut"]
        if code is None:
            return False
        for test in died:
            append(options.out, test=test, outcome="failed", why="its process died or hung")
        if not died and code != LOST:
            if code not in ENDED:
                append(options.out, test="pytest", outcome="failed", why=f"exit status {code}")
            return True


def _until(deadline: float, command: list[str]) -> int | None:
    """Run a command; None if it had to be stopped at the deadline."""
    # each process would start a thread per core, and a pool of compilers
    few = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = subprocess.Popen(command, cwd=ROOT, env={**few, **os.environ}, start_new_session=True)
    try:
        return running.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _summary(folder: Path) -> bool:
    """Print what happened; return whether every test passed or said why it cannot run."""
    found = read(folder)
    for why, count in Counter(why for kind, why in found.values() if kind == "skipped").items():
        print(f"{count} skipped: {why}")
    for test, (kind, why) in found.items():
        if kind in ("failed", "cut"):
            print(f"{kind}: {test}: {why}")
    counts = Counter(kind for kind, _ in found.values())
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped", "cut")))
    return bool(counts["passed"]) and not counts["failed"] and not counts["cut"]


if __name__ == "__main__":
    sys.exit(main())
