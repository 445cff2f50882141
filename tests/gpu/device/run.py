"""Run the tests of this folder within a time limit; also the plugin of pytest that this takes.

    python -m tests.gpu.device.run --out build/gpu/tests --seconds 450

With pytest-xdist several tests run side by side, without it one after the other. Tests that need
most of the GPU's memory follow alone. A test that takes its process with it (a crash, a hang, an
error after which the GPU refuses everything) fails, and the others run in another process. Each
outcome is in OUT/tests.jsonl when it is known; `--resume` leaves out what has one. All other
arguments are pytest's: files (default: this folder) and options.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.device.limit import within

NAME, DONE = "tests.jsonl", "done.json"
#: Of a test after which this process can run no other: the key, and the status of the process.
LOST, LOST_STATUS = pytest.StashKey[bool](), 70


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=lambda name: Path(name).resolve(), default="build/gpu/tests")
    parser.add_argument("--seconds", type=float, default=450.0, help="limit of the whole run")
    parser.add_argument("--test-seconds", type=float, default=120.0, help="limit of one test")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes")
    parser.add_argument("--resume", action="store_true", help="leave out what has an outcome")
    # no positional argument, which would part an option of pytest from its value
    options, of_pytest = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that pytest is ended, too
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        (options.out / NAME).unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.device.run", *of_pytest]
    # in one argument each: pytest would look for its rootdir above a separate one that is a folder
    command += [f"--results={options.out}", f"--test-seconds={options.test_seconds}"]
    command += ["--confcutdir=tests/gpu/device", "--override-ini=testpaths=tests/gpu/device"]
    several = ["-m", "not alone"]
    if options.jobs > 1 and importlib.util.find_spec("xdist"):
        # one test at a time, so that the first ones run first
        several += [f"-n{options.jobs}", "--max-worker-restart=100", "--maxschedchunk=1"]
    deadline = time.monotonic() + options.seconds
    stages = (several, ["-m", "alone"])
    in_time = all(_stage([*command, *stage], options.out, deadline) for stage in stages)
    passed = _summary(options.out)
    if not in_time:
        print(f"cut after {options.seconds:.0f} s; --resume runs what is left")
    return 0 if passed and in_time else 1


def _stage(command: list[str], out: Path, deadline: float) -> bool:
    """Run the tests of a stage, in as many processes as it takes; return whether time sufficed."""
    # each process would start a thread per core, and a pool of compilers
    few = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    while True:
        # all processes of pytest-xdist collect the same, also one that takes another's place
        done = [test for test, (outcome, _) in read(out).items() if outcome != "cut"]
        (out / DONE).write_text(json.dumps(done))
        code = within(deadline - time.monotonic(), command, env={**few, **os.environ})
        if code is None:
            return False
        died = [test for test, (outcome, _) in read(out).items() if outcome == "cut"]
        for test in died:
            _append(out, test=test, outcome="failed", why="its process died or hung")
        if not died and code != LOST_STATUS:
            if code not in (0, 1, 5):  # all passed, some failed, none were collected
                _append(out, test="pytest", outcome="failed", why=f"exit status {code}")
            return True


def read(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of every test that started, and why; "cut" is one without an end."""
    found: dict[str, tuple[str, str]] = {}
    path = folder / NAME
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line at which the process was killed
            continue
        # a test that was skipped passes its teardown, and the first reason says the most
        if found.get(entry["test"], ("", ""))[0] not in ("failed", "skipped"):
            found[entry["test"]] = (entry["outcome"], entry["why"])
    return found


def _append(folder: Path, **entry: object) -> None:
    """Append a line; it begins with the break, since the one before may be half written."""
    with (folder / NAME).open("a") as file:
        file.write("\n" + json.dumps(entry))


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


# --- what pytest calls, in each of its processes


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="folder of the outcomes")
    parser.addoption("--test-seconds", type=float, help="limit of one test; 0: none")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # processes of pytest-xdist report to this one
        config.pluginmanager.register(_Outcomes(config.getoption("--results")))


def pytest_collection_modifyitems(config, items):
    done = set(json.loads((config.getoption("--results") / DONE).read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    seconds = item.config.getoption("--test-seconds")
    with (item.config.getoption("--results") / "hung.txt").open("a") as stacks:
        if seconds:
            faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if LOST in item.stash:
                os._exit(LOST_STATUS)


class _Outcomes:
    """Writes each outcome at once, so that a run which is cut keeps what it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_runtest_logstart(self, nodeid):
        _append(self.folder, test=nodeid, outcome="cut", why="it did not end")

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown" or not report.passed:
            self._write(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(report)

    def _write(self, report) -> None:
        why = ""
        if report.skipped:
            why = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            why = " ".join(str(report.longrepr)[-400:].split())
        _append(self.folder, test=report.nodeid, outcome=report.outcome, why=why)


if __name__ == "__main__":
    sys.exit(main())
