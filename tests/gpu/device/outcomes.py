"""A pytest plugin that writes each outcome at once, so that a run which is cut keeps what it has.

A test that takes longer than `--test-seconds` ends its process and leaves the stacks of all
threads in hung.txt. Tests that have ended are left out.
"""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path

import pytest

NAME = "tests.jsonl"
#: Exit status of a process whose GPU refuses everything after an error.
LOST = 70


def read(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the last outcome of every test that started, and why; "cut" is one without an end."""
    found: dict[str, tuple[str, str]] = {}
    path = folder / NAME
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line at which the process was killed
            continue
        if found.get(entry["test"], ("", ""))[0] != "failed":  # the first reason says the most
            found[entry["test"]] = (entry["outcome"], entry.get("why", ""))
    return found


def append(folder: Path, **entry: object) -> None:
    """Append a line; it begins with the break, since the one before may be half written."""
    with (folder / NAME).open("a") as file:
        file.write("\n" + json.dumps(entry))


def pytest_addoption(parser):
    group = parser.getgroup("gpu")
    group.addoption("--results", help="folder of the outcomes")
    group.addoption("--backends", default="", help="backends, separated by commas or spaces")
    group.addoption("--test-seconds", type=float, default=0.0, help="limit of one test; 0: none")


def pytest_configure(config):
    if config.getoption("--results"):
        config.pluginmanager.register(_Writer(config), "gpu-outcomes")


class _Writer:
    def __init__(self, config):
        self.folder = Path(config.getoption("--results"))
        self.seconds = config.getoption("--test-seconds")
        given = getattr(config, "workerinput", None)
        self.writes = given is None  # a process of pytest-xdist reports to the one that writes
        # all processes must collect the same, also one that replaces a crashed one later
        ended = (test for test, (kind, _) in read(self.folder).items() if kind != "cut")
        self.done = set(ended if given is None else given["done"])
        self.hung = (self.folder / "hung.txt").open("a") if self.seconds else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["done"] = sorted(self.done)

    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.done])
        items[:] = [item for item in items if item.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        if self.hung is not None:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.hung)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logstart(self, nodeid):
        if self.writes:
            append(self.folder, test=nodeid, outcome="cut", why="it did not end")

    def pytest_runtest_logreport(self, report):
        if self.writes and (report.when == "call" or report.outcome != "passed"):
            why = {} if report.passed else {"why": _reason(report)}
            seconds = round(report.duration, 3)
            append(self.folder, test=report.nodeid, outcome=report.outcome, seconds=seconds, **why)

    def pytest_collectreport(self, report):
        if self.writes and report.failed:
            append(self.folder, test=report.nodeid, outcome="failed", why=_reason(report))


def _reason(report) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message[:400] if crash else str(report.longrepr)[-400:]).split())


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
