"""A run: worker processes measure, and what they find is on disk after every case.

This process leaves the device to those that it starts, so that a provider that dies, hangs or runs
out of memory costs a row of a table, and Ctrl-C keeps everything before it.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastrl.bench import child, report
from fastrl.bench.estimate import in_words
from fastrl.bench.journal import CEILINGS, NAME, Journal
from fastrl.bench.machine import machine
from fastrl.bench.settings import Settings

WORKER = "fastrl.bench.worker"
#: Huge pages for everyone, which fastrl's kernels ask for by themselves, and one heap, which
#: `keep_freed` is about. The user's own values win.
HEAP = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_ARENA_MAX": "1"}
STARTING = 60.0  # seconds that a process may take until its first line
ENDING = 10.0  # seconds at the end in which processes are to end by themselves
DIED = "its process died (out of memory?), hung, or compiled for too long"


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
        self.settings, self.out, self.command, self.silent = settings, out, command, silent
        self.journal, self.begin = Journal(out), time.monotonic() if begin is None else begin
        self.end = self.begin + seconds
        self.ending = min(ENDING, 0.1 * seconds)
        self.cases = settings.cases()
        self.names = [case.name for case in self.cases]
        self.cut: set[str] = set()  # the jobs of this run that time has ended
        self.shown: set[str] = set()
        self.estimated = self.previewed = False

    def main(self, *, resume: bool = False) -> report.Results:
        """Measure everything that time allows and return the results.

        Args:
            resume: Keep what an earlier run has left in the folder.

        Raises:
            KeyboardInterrupt: After the results have been written, if the run was interrupted.
            OSError: The folder cannot be written.
            ValueError: What is kept was measured with other options, or by another version.
        """
        now = datetime.datetime.now().isoformat(timespec="seconds")
        known = machine(torch.device(self.settings.device))
        conditions = self._conditions(known)
        if resume:
            self._check_same(conditions)
        else:
            for name in (NAME, "results.json", "results.md"):
                if (self.out / name).exists():
                    (self.out / name).replace(self.out / f"{name}.before")
        about = {"machine": known, "command": self.command, "date": now, "package": child.PACKAGE}
        self.journal.append(**about, tiny=self.settings.tiny, conditions=conditions)
        self.shown = set(self.journal.results())
        # the ceilings are for percentages, and for an estimate that a hurried run does not need
        hurried = self.settings.plan.hurried
        try:
            self._make([*self.names, CEILINGS] if hurried else [CEILINGS, *self.names])
        finally:
            found = self.results()
            report.write(found, self.out)
        return found

    def _conditions(self, known: dict[str, str]) -> dict[str, Any]:
        """Return all that must not change within one folder of results."""
        options = json.loads(self.settings.to_json())
        kept = {name: one for name, one in options.items() if name not in ("sizes", "steps")}
        versions = {name: known.get(name, "") for name in ("fastrl", "commit", "torch")}
        return {**kept, **versions, "machine": known["device"].split(",")[0]}

    def _check_same(self, conditions: dict[str, Any]) -> None:
        for entry in self.journal.entries():
            before = entry.get("conditions", conditions)
            for name in conditions.keys() & before.keys():
                if before[name] != conditions[name]:
                    raise ValueError(
                        f"--resume: {self.out} was measured with {name} {before[name]!r}, "
                        f"and this run has {conditions[name]!r}; choose another --out"
                    )

    def results(self) -> report.Results:
        """Return what the folder has so far, also of earlier runs with other sizes."""
        before = [job for job in self.journal.results() if job != CEILINGS]
        return report.results(self.journal.entries(), [*dict.fromkeys([*before, *self.names])])

    def _make(self, jobs: list[str]) -> None:
        """Make jobs, in as many processes as it takes."""
        while left := [job for job in jobs if job not in {*self.journal.results(), *self.cut}]:
            if time.monotonic() >= self.end - self.ending:
                return
            entries, ended = len(self.journal.entries()), len(self.journal.results())
            lost = {job: len(self.journal.left_out(job)) for job in left}
            ended_itself = self._process(left)
            unfinished = self.journal.unfinished(since=entries)
            over = time.monotonic() >= self.end - self.ending
            if over or (self.settings.plan.hurried and not ended_itself):
                cut = unfinished or left[:1]
            else:
                cut = [job for job in unfinished if self.journal.partial().get(job, {}).get("cut")]
            self.cut |= {*cut}
            self._show()
            again = bool(cut)
            for job in unfinished:
                if job in cut:
                    continue
                # one that a provider ended starts again without that provider
                known, provider = self.journal.left_out(job), self.journal.tried(job)
                if len(known) == lost.get(job, 0) and provider and provider not in known:
                    self.journal.append(job=job, lost=provider, why=DIED)
                elif len(known) == lost.get(job, 0):
                    self.journal.append(job=job, failure=DIED)
                    continue
                again = True
            if len(self.journal.results()) == ended and not again:
                raise RuntimeError(f"the worker process ended before its first job: {self._said()}")

    def _process(self, jobs: list[str]) -> bool:
        """Let a process make jobs; return whether it ended by itself."""
        command = child.command(WORKER, self.settings.to_json(), str(self.out), child.PACKAGE)
        command += [str(self.end - self.ending), *jobs]
        heard, last = self.journal.size(), time.monotonic() + STARTING
        with self._log().open("w") as log:
            running = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**HEAP, **os.environ},
                start_new_session=True,
            )
            try:
                while running.poll() is None:
                    time.sleep(0.05)
                    if (size := self.journal.size()) > heard:
                        heard, last = size, time.monotonic()
                        self._show()
                    if time.monotonic() > min(self.end, last + self.silent):
                        break
                ended_itself = running.poll() is not None
            finally:
                child.end(running)
        return ended_itself

    def _show(self) -> None:
        """Print the tables of cases that have ended, and how far the run is."""
        found, ratios = self.results(), not self.settings.tiny
        finished = {*self.journal.results(), *self.cut}
        if not self.estimated and (found[CEILINGS] or self.settings.plan.hurried):
            plan, seconds = self.settings.plan, self.end - self.begin
            sys.stderr.write(f"{in_words(self.cases, plan, found[CEILINGS], seconds)}\n")
            self.estimated = True
        of_run = [case for case in found["cases"] if case["name"] not in self.shown]
        new = [case for case in of_run if case["name"] in finished]
        for case in new:
            print("\n".join(report.section(case, found[CEILINGS], ratios=ratios)), flush=True)
        first = self.settings.plan.hurried and not self.shown and not new
        if first and of_run and not self.previewed:
            timed = [row for row in of_run[0]["providers"] if row["seconds"]]
            lines = report.section(of_run[0] | {"providers": timed}, found[CEILINGS], ratios=ratios)
            lines[0] += " (so far)"
            print("\n".join(lines), flush=True)
            self.previewed = True
        self.shown |= {case["name"] for case in new}
        if new:
            report.write(found, self.out)
        ended = len(finished & {*self.names})
        spent, left = time.monotonic() - self.begin, self.end - time.monotonic()
        ahead = min(left, spent / ended * (len(self.names) - ended)) if ended else left
        job = next((job for job in self.journal.unfinished() if job not in self.cut), "")
        provider = self.journal.tried(job)
        line = f"[{ended}/{len(self.names)}] about {max(0, ahead):.0f} s left: {job} {provider}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns  # 80 where a terminal has no size
            sys.stderr.write(f"\r{line[: width - 1]:<{width - 1}}\r")
        elif new:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _log(self) -> Path:
        return self.out / "worker.log"

    def _said(self) -> str:
        lines = self._log().read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"
