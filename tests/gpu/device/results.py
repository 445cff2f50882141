"""A pytest plugin that writes each outcome at once, so that a run which is cut keeps what it has.

    pytest -p tests.gpu.device.results --results build/gpu ...

`build/gpu/tests.jsonl` gets a line when a test starts and one when it ends. A test that takes
longer than `--test-seconds` ends its process and leaves the stacks of all threads in
`build/gpu/hung.txt`.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

NAME = "tests.jsonl"
#: Exit status of a process whose GPU refuses everything after an error.
LOST = 70


class Outcome(NamedTuple):
    """How a test ended: passed, failed, skipped, or cut (it started and did not end)."""

    test: str
    outcome: str
    why: str = ""


def read(folder: Path) -> dict[str, Outcome]:
    """Return the last outcome of every test that started."""
    found: dict[str, Outcome] = {}
    path = folder / NAME
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line at which the process was killed
            continue
        one = Outcome(entry["test"], entry["outcome"], entry.get("why", ""))
        before = found.get(one.test)
        if before is None or before.outcome != "failed":  # the first reason says the most
            found[one.test] = one
    return found


def append(folder: Path, **entry: object) -> None:
    """Append a line."""
    with (folder / NAME).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def summary(folder: Path) -> tuple[list[str], bool]:
    """Return lines for people, and whether every test passed or said why it cannot run."""
    found = list(read(folder).values())
    counts = Counter(one.outcome for one in found)
    skipped = Counter(one.why for one in found if one.outcome == "skipped")
    lines = [f"{count} skipped: {why}" for why, count in skipped.most_common()]
    lines += [f"{o.outcome}: {o.test}: {o.why}" for o in found if o.outcome in ("failed", "cut")]
    kinds = ("passed", "failed", "skipped", "cut")
    lines.append(", ".join(f"{counts[kind]} {kind}" for kind in kinds))
    return lines, bool(counts["passed"]) and not counts["failed"] and not counts["cut"]


def pytest_addoption(parser):
    group = parser.getgroup("gpu")
    group.addoption("--results", help="folder for tests.jsonl")
    group.addoption("--resume", action="store_true", help="leave out tests that have an outcome")
    group.addoption(
        "--backends", default="", help="backends to test, separated by commas or spaces"
    )
    group.addoption("--test-seconds", type=float, default=0.0, help="limit of one test; 0: none")


def pytest_configure(config):
    if config.getoption("--results"):
        config.pluginmanager.register(_Writer(config), "gpu-results")


class _Writer:
    def __init__(self, config):
        self.folder = Path(config.getoption("--results"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seconds = config.getoption("--test-seconds")
        given = getattr(config, "workerinput", None)
        self.writes = given is None  # a process of pytest-xdist reports to the one that writes
        # all processes must collect the same, also one that replaces a crashed one later
        if given is not None:
            self.done = set(given["done"])
        else:
            ended = (one for one in read(self.folder).values() if one.outcome != "cut")
            self.done = {one.test for one in ended} if config.getoption("--resume") else set()
        self.hung = (self.folder / "hung.txt").open("a") if self.seconds else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["done"] = sorted(self.done)

    def pytest_collection_modifyitems(self, config, items):
        left_out = [item for item in items if item.nodeid in self.done]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        if self.hung is not None:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.hung)
        try:
            return (yield)
        finally:
            if self.hung is not None:
                faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logstart(self, nodeid):
        if self.writes:
            append(self.folder, test=nodeid, outcome="cut", why="it did not end")

    def pytest_runtest_logreport(self, report):
        if self.writes and (report.when == "call" or report.outcome != "passed"):
            why = {} if report.passed else {"why": _reason(report)}
            seconds = round(getattr(report, "duration", 0.0), 3)
            append(self.folder, test=report.nodeid, outcome=report.outcome, seconds=seconds, **why)

    def pytest_collectreport(self, report):
        if self.writes and report.failed:
            why = str(report.longrepr).strip().splitlines()[-1:]
            append(self.folder, test=report.nodeid, outcome="failed", why="".join(why))


def _reason(report) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:400]


def end_process(config, test: str, why: str) -> None:
    """Fail a test and end this process, in which nothing more can run, if another takes its place.

    pytest will not report the test: it may be in its teardown, after its body was reported.
    """
    folder = config.getoption("--results", None)
    if not folder:
        return
    if not hasattr(config, "workerinput"):  # pytest-xdist reports the test of a lost process
        append(Path(folder), test=test, outcome="failed", why=why)
    os._exit(LOST)
