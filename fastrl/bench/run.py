"""A run: worker processes measure, and what they find is on disk after every case.

This process leaves the device to those that it starts, so that a provider that dies, hangs or runs
out of memory costs a row of a table, and Ctrl-C keeps everything before it.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import fastrl
from fastrl.bench import child, report
from fastrl.bench.case import Case
from fastrl.bench.conditions import COPY
from fastrl.bench.machine import CEILINGS, machine
from fastrl.bench.report import Results, Row
from fastrl.bench.timing import LATE, LEAST_TIMED, Plan
from fastrl.bench.worker import Settings, work

#: Huge pages for everyone, which fastrl's kernels ask for by themselves, and one heap, which
#: `keep_freed` is about. The user's own values win.
HEAP = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_ARENA_MAX": "1"}
STARTING = 60.0  # seconds that a process may take until its first word
ENDING = 10.0  # seconds at the end in which processes are to end by themselves
DIED = "its process died (out of memory?), hung, or compiled for too long"

# Of an estimate, in seconds: of a case for its process and its inputs, and of torch.compile's first
# call; the time of a call over the least that the machine could need; calls that are not timed.
START, COMPILE, USUAL, CHECKS = 6.0, 15.0, 3.0, 5


class Run:
    """A run of ``settings`` that leaves its results in the folder ``out``.

    Args:
        settings: What is measured.
        out: The folder; it exists.
        command: The command line that made the settings.
        seconds: The limit of the whole run.
        silent: The seconds that one provider may take for its first call, compilation included.
        begin: When the limit began, by the monotonic clock; by default now.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path,
        command: str,
        *,
        seconds: float,
        silent: float,
        begin: float | None = None,
    ) -> None:
        self.settings, self.out, self.silent = settings, out, silent
        self.begin = time.monotonic() if begin is None else begin
        self.end = self.begin + seconds
        self.ending = min(ENDING, 0.1 * seconds)
        self.cases = settings.cases()
        self.names = [case.name for case in self.cases]
        now = datetime.datetime.now().isoformat(timespec="seconds")
        self.about: Row = {
            "command": command,
            "date": now,
            "package": str(Path(fastrl.__file__).resolve().parent),
        }
        self.ceilings: dict[str, float] = {}
        self.found: dict[str, Row] = {}
        self.failed: dict[str, str] = {}  # why a job has no result
        self.partial: dict[str, Row] = {}  # of cases that have timed some of their providers
        self.lost: dict[str, dict[str, str]] = {}  # per job, what ended a process of it, and why
        self.cut: set[str] = set()  # the jobs that time has ended
        self.now = ("", "")  # the job and the provider that are measured
        self.shown: set[str] = set()
        self.estimated = self.previewed = False

    def main(self, *, resume: bool = False) -> Results:
        """Measure everything that time allows and return the results.

        Args:
            resume: Keep what an earlier run has left in the folder.

        Raises:
            KeyboardInterrupt: After the results have been written, if the run was interrupted.
            OSError: The folder cannot be written.
            ValueError: What is kept was measured with other options, or by another version.
        """
        known, settings = machine(torch.device(self.settings.device)), self.settings
        options = {name: str(value) for name, value in vars(settings).items()}
        options = {name: one for name, one in options.items() if name not in ("sizes", "steps")}
        self.about |= {"machine": known, "tiny": settings.tiny, "options": options}
        if resume:
            self._read()
        else:
            for name in ("results.json", "results.md"):
                if (self.out / name).exists():
                    (self.out / name).replace(self.out / f"{name}.before")
        self.shown = {*self.found}
        # the ceilings are for percentages, and for an estimate that a hurried run does not need
        hurried = settings.plan.hurried
        try:
            self._make([*self.names, CEILINGS] if hurried else [CEILINGS, *self.names])
        finally:
            report.write(self.results(), self.out)
        return self.results()

    def _read(self) -> None:
        """Take over what the folder has."""
        if not (self.out / "results.json").exists():
            return
        try:
            before = json.loads((self.out / "results.json").read_text())
            theirs, mine = _conditions(before), _conditions(self.about)
            self.ceilings, self.lost = before[CEILINGS], before["lost"]
            self.failed = {name: why for name, why in before["not_run"].items() if why != LATE}
            for case in before["cases"]:
                late = any(row["failure"] == LATE for row in case["providers"])
                (self.partial if late else self.found)[case["name"]] = case
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--resume: {self.out / 'results.json'} is damaged or of another version "
                f"({type(error).__name__}: {error}); choose another --out"
            ) from error
        for name, value in theirs.items():
            if value != mine.get(name, value):
                raise ValueError(
                    f"--resume: {self.out} was measured with {name} {value!r}, "
                    f"and this run has {mine[name]!r}; choose another --out"
                )

    def results(self) -> Results:
        """Return what the folder has so far, also of earlier runs with other sizes.

        That is the content of ``results.json``: ``command``, ``date``, ``machine``, ``package``,
        ``options``, ``ceilings``, ``cases``, ``not_run`` (the names of cases without a result, and
        why), ``lost`` (what ended a process, by case and provider) and ``complete``.
        """
        found: Results = {"complete": False, "machine": {}, **self.about, CEILINGS: self.ceilings}
        found |= {"cases": [], "not_run": {}, "lost": self.lost}
        for name in dict.fromkeys([*self.found, *self.failed, *self.partial, *self.names]):
            if name in self.found:
                found["cases"].append(self.found[name])
            elif name in self.partial and name not in self.failed:
                found["cases"].append(report.cut(self.partial[name]))
            elif name != CEILINGS:
                found["not_run"][name] = self.failed.get(name, LATE)
        found["complete"] = not found["not_run"] and not report.late(found)
        return found

    def _ended(self) -> set[str]:
        return {*self.found, *self.failed, *self.cut, *([CEILINGS] if self.ceilings else [])}

    def _make(self, jobs: list[str]) -> None:
        """Make jobs, in as many processes as it takes."""
        while left := [job for job in jobs if job not in self._ended()]:
            if time.monotonic() >= self.end - self.ending:
                return
            self._process(left)

    def _process(self, jobs: list[str]) -> None:
        """Let a process make jobs, and find out what became of the last one."""
        call = functools.partial(work, self.settings, self.end - self.ending, jobs, self.lost)
        job, silent, hung = "", True, False
        last = time.monotonic() + STARTING + self.silent
        with child.Process(call, self.out / "worker.log", **HEAP) as process:
            try:
                while (entry := process.heard(min(self.end, last))) is not None:
                    silent, last = False, time.monotonic() + self.silent
                    job = self._take(entry)
                    self._show()
            except TimeoutError:
                hung = True
            said = process.last_line() or "it printed nothing"
        over = time.monotonic() >= self.end - self.ending
        if over or (self.settings.plan.hurried and hung):
            self.cut.add(job or jobs[0])
        elif silent:
            how = "did not start in time" if hung else "ended before its first job"
            raise RuntimeError(f"the worker process {how}: {said}")
        elif job:  # it starts again without the provider that ended it
            provider, known = self.now[1], self.lost.setdefault(job, {})
            if provider and provider not in known:
                known[provider] = DIED
            else:
                self.failed[job] = DIED
        self._show()

    def _take(self, entry: child.Entry) -> str:
        """Take what a process says; return the job that it goes on with, or ''."""
        job = entry["job"]
        self.now = job, entry.get("trying", self.now[1] if len(entry) > 1 else "")
        if "partial" in entry:
            self.partial[job] = entry["partial"]
        if "cut" in entry:
            self.cut.add(job)
        elif "lost" in entry:
            self.lost.setdefault(job, {})[entry["lost"]] = entry["why"]
        elif "failure" in entry:
            self.failed[job] = entry["failure"]
        elif "result" in entry and job == CEILINGS:
            self.ceilings = entry["result"]
        elif "result" in entry:
            self.found[job] = entry["result"]
        else:
            return str(job)
        return ""

    def _show(self) -> None:
        """Print the tables of cases that have ended, and how far the run is."""
        found, ratios = self.results(), not self.settings.tiny
        plan, spent = self.settings.plan, time.monotonic() - self.begin
        if not self.estimated and (self.ceilings or plan.hurried):
            words = in_words(self.cases, plan, self.ceilings, self.end - self.begin)
            sys.stderr.write(f"{words}\n")
            self.estimated = True
        ended = self._ended()
        of_run = [case for case in found["cases"] if case["name"] not in self.shown]
        new = [case for case in of_run if case["name"] in ended]
        first = plan.hurried and not self.shown and not new and not self.previewed
        if first and of_run:
            timed = [row for row in of_run[0]["providers"] if row["seconds"]]
            lines = report.section(of_run[0] | {"providers": timed}, self.ceilings, ratios=ratios)
            lines[0] += " (so far)"
            print("\n".join(lines), flush=True)
            self.previewed = True
        for case in new:
            print("\n".join(report.section(case, self.ceilings, ratios=ratios)), flush=True)
            self.shown.add(case["name"])
        if new:
            report.write(found, self.out)
        count, left = len(ended & {*self.names}), self.end - time.monotonic()
        ahead = min(left, spent / count * (len(self.names) - count)) if count else left
        job, provider = self.now if self.now[0] not in ended else ("", "")
        line = f"[{count}/{len(self.names)}] about {max(0, ahead):.0f} s left: {job} {provider}"
        report.show(line, kept=bool(new))


def _conditions(found: Mapping[str, Row]) -> dict[str, str]:
    """Return all that must not change within one folder of results."""
    known = found.get("machine", {})
    versions: dict[str, str] = {
        name: known[name] for name in ("fastrl", "commit", "torch") if name in known
    }
    versions["machine"] = known["device"].split(",")[0]
    return found["options"] | versions


def seconds(cases: Sequence[Case], plan: Plan, ceilings: Mapping[str, float]) -> float:
    """Return about how long the cases take on a machine that has these ceilings."""
    gemms = ceilings.get("float32 GEMM TFLOP/s", math.inf) * 1e12
    copies = ceilings.get(COPY, math.inf) * 1e9
    total = 0.0
    for case in cases:
        call = USUAL * (case.flops / gemms + case.bytes_moved / copies)
        turns = 2 * plan.rounds * max(call, LEAST_TIMED)
        each = CHECKS * call + min(turns, max(plan.seconds, plan.least * call))
        compiled = sum(one.kind == "compile" for one in case.providers)
        total += START + len(case.providers) * each + COMPILE * compiled
    return total


def in_words(cases: Sequence[Case], plan: Plan, ceilings: Mapping[str, float], limit: float) -> str:
    """Return a line for the user about a run that may take ``limit`` seconds."""
    count = f"{len(cases)} case{'s' * (len(cases) != 1)}"
    if plan.hurried:
        return f"{count}, the most telling first, in at most {limit:.0f} seconds"
    about = seconds(cases, plan, ceilings)
    return (
        f"{count}: about {_time(about / 2)} to {_time(2 * about)}, longer beside other programs; "
        f"the run ends after {_time(limit)} (--seconds)"
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
