"""What is run on a machine with a GPU, in pieces that fit into a lease of it: `make gpu`.

    python -m tests.gpu.device.pieces first     # build, machine, values, tests, bench
    python -m tests.gpu.device.pieces second    # build, drawn calls, linear forms, sanitizers
    python -m tests.gpu.device.pieces third     # build, profile, tune, all tests and benchmarks
    python -m tests.gpu.device.pieces build peers    # some steps; the others need what build makes

They take at most 350, 350 and 540 seconds: the first two fit into a quarter of an hour on one
machine, with its start. A piece can be the first command on a fresh machine, ends within
`--seconds`, whatever a step does, and leaves OUT/gpu-<piece>.tar.gz, also where it is ended; OUT is
a variable of the environment. `values` and `draws` are cases of tests.fuzz, of the table and drawn,
which the oracle of tests/calls judges. A step works and logs in build/gpu/<step>, where `--resume`
goes on with what is there: on another machine unpack the archive in build/gpu. Wheels of other
libraries to measure are taken from build/gpu-wheels.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from tests.gpu.device.build import driver, path_with_tools
from tests.gpu.device.limit import ROOT, within

WORK = ROOT / "build" / "gpu"
SITE = ROOT / "build" / "gpu-site"
PACKING = 10.0  # seconds at the end of a piece
ENDING = 8.0  # seconds that a step has to end when its time is over, and its inner limit is less
TAIL = 3000  # characters of a step's log that are shown

_TESTS = '"$PYTHON" -m tests.gpu.device.run --out "$STEP" --seconds $LEFT $RESUME'
_VALUES = 'OMP_NUM_THREADS=1 "$PYTHON" -m tests.fuzz --device cuda --no-shrink --backend'
_BENCH = '"$PYTHON" -m fastrl.bench --device cuda --no-plots --out "$STEP" --seconds $LEFT $RESUME'
_LOGITS = "--op logits_policy_loss token_stats --model qwen3-0.6b --rows 8192 --variant ''"
_LINEAR = "--op linear_policy_loss --model llama-3.1-8b qwen2.5-0.5b --rows 8192 --pass both"
_WHEELS = """for wheel in build/gpu-wheels/*.whl; do
  [ ! -e "$wheel" ] || "$PYTHON" -m zipfile -e "$wheel" "$SITE"
done"""
_NCU = "ncu --clock-control none"
_SECTIONS = "SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats"
_COUNTED = " ".join(f"--section {name}" for name in _SECTIONS)
_FILES = "tests/gpu/device/test_gpu_"
#: Seconds at most (what a step leaves is for those after it) and commands, by importance: within a
#: piece the last ones are cut first.
STEPS: dict[str, tuple[float, list[str]]] = {
    "build": (180, [_WHEELS, '"$PYTHON" -m tests.gpu.device.build']),
    "machine": (
        60,
        [
            "nvidia-smi",
            '"$PYTHON" -m fastrl doctor',
            "nvcc --version",
            '"$LAUNCHES" clusters',
            '"$LAUNCHES" large 20',
        ],
    ),
    "values": (
        120,
        [
            f"{_VALUES} triton --table --cases 3 --seconds $((LEFT / 2))",
            f"{_VALUES} cuda --table --cases 3 --seconds $LEFT",
        ],
    ),
    "tests": (110, [f"{_TESTS} {_FILES}calls.py"]),
    # all operators in turn; `peers` measures fastrl once more: the difference is the noise
    "bench": (540, [f"{_BENCH} --peer none"]),
    "draws": (
        50,
        [
            f"{_VALUES} triton --cases 300 --seconds $((LEFT / 2))",
            f"{_VALUES} cuda --cases 1000 --seconds $LEFT",
        ],
    ),
    "linear-tests": (90, [f"{_TESTS} {_FILES}linear.py {_FILES}first_calls.py"]),
    "linear-bench": (80, [f"{_BENCH} {_LINEAR}"]),
    "peers": (70, [f"{_BENCH} {_LOGITS}"]),
    "counters": (30, [f'{_NCU} {_COUNTED} "$LAUNCHES" large']),
    # what racecheck finds need not be a defect: it may not know barriers in remote shared memory
    "sanitize": (
        90,
        [
            f'compute-sanitizer --error-exitcode 9 --tool {tool} "$LAUNCHES"'
            for tool in ("memcheck", "initcheck", "synccheck", "racecheck")
        ],
    ),
    "profile": (
        100,
        [
            f'{_NCU} --set full --force-overwrite --export "$STEP/profile" "$LAUNCHES" large',
            'ncu --import "$STEP/profile.ncu-rep" --page details',
        ],
    ),
    "tune": (
        120,
        ['"$PYTHON" bench/gpu_cost/tuning.py --out "$STEP" --seconds $LEFT --knobs chunk'],
    ),
    "all-values": (
        150,
        [
            f"{_VALUES} reference --table --cases 5 --seconds $((LEFT / 3))",
            f"{_VALUES} triton --table --cases 20 --seconds $((LEFT / 2))",
            f"{_VALUES} cuda --table --cases 40 --seconds $LEFT",
        ],
    ),
    "all-tests": (150, [_TESTS]),
    "all-bench": (540, [_BENCH]),
}
#: Seconds at most, and steps.
PIECES: dict[str, tuple[float, tuple[str, ...]]] = {
    "first": (350, ("build", "machine", "values", "tests", "bench")),
    "second": (
        350,
        ("build", "draws", "linear-tests", "linear-bench", "peers", "counters", "sanitize"),
    ),
    "third": (540, ("build", "profile", "tune", "all-values", "all-tests", "all-bench")),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*PIECES, *STEPS], metavar="piece or step")
    help_seconds = "limit of the whole run; default: the limits of the pieces or steps, added up"
    parser.add_argument("--seconds", type=float, help=help_seconds)
    parser.add_argument("--resume", action="store_true", help="leave out what has a result")
    options = parser.parse_args()
    parts = [PIECES.get(name) or (STEPS[name][0], (name,)) for name in options.names]
    seconds = sum(of_part for of_part, _ in parts) if options.seconds is None else options.seconds
    deadline = time.monotonic() + seconds - PACKING
    os.environ["PATH"] = path_with_tools()
    code = "import numpy, pytest, setuptools, sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode:
        print("there is no GPU that torch can use, or a package is missing")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the archive is written, too
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    steps, ended = [*dict.fromkeys(step for _, of_part in parts for step in of_part)], []
    try:
        for name in steps:
            ended.append(_step(name, deadline, resume=options.resume))
            print(ended[-1], flush=True)
    finally:
        print("\n".join([*ended, f"packed: {_pack('-'.join(options.names), steps)}"]))
    return 0 if all(": done" in line for line in ended) else 1


def _step(name: str, deadline: float, *, resume: bool) -> str:
    """Make a step and return a line about how it ended."""
    (seconds, commands), step, start = STEPS[name], WORK / name, time.monotonic()
    until = min(deadline, start + seconds) - ENDING
    if not resume:
        shutil.rmtree(step, ignore_errors=True)
    step.mkdir(parents=True, exist_ok=True)
    names = {"PYTHON": sys.executable, "STEP": str(step), "SITE": str(SITE)}
    names |= {"LAUNCHES": str(driver()), "RESUME": "--resume" if resume else ""}
    log, failed = step / "log.txt", []
    log.touch()
    for command in commands:
        left = until - time.monotonic()
        if left <= 0:
            failed.append(f"no time for {command}")
            break
        with log.open("a") as file:
            print(f"$ {command}", file=file, flush=True)
            given = {**os.environ, **names, "LEFT": f"{left:.0f}"}
            whole = {"shell": True, "stdout": file, "stderr": file, "env": given}
            code = within(left + ENDING / 2, command, **whole)
        if code != 0:
            how = "took too long" if code is None else f"ended with status {code}"
            failed.append(f"{command} {how}")
    print(log.read_text(errors="replace")[-TAIL:])
    took = time.monotonic() - start
    return f"{name}: {', '.join(failed) or 'done'} ({took:.0f} s, log: {log})"


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
