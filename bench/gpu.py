"""The benchmark matrix on a GPU, against eager torch and peers.

    python bench/gpu.py --out build/gpu/bench --seconds 450
    python bench/gpu.py --smoke         # the same code on tiny shapes, on a CPU

The protocol is in README.md. In addition: CUDA events surround each full public call, calls rotate
over three input sets so that none stays in the cache, peak memory is what a call allocates, and
GB/s and TFLOP/s count the minimum of work, the same for all providers. Where launches dominate,
the table also has the time of the kernels alone (replayed from a CUDA graph) and of the host.

This process leaves the GPU to those that it starts (gpu_jobs.py). What they find is in
OUT/bench.jsonl and OUT/bench.md after every case; a process that dies or hangs costs one case. The
exit status is 0 if all cases were measured and no call of fastrl failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu_cases import SHAPES, items
from gpu_item import COMPILED, backends
from gpu_journal import NAME, Journal
from gpu_peers import DISTRIBUTIONS
from gpu_report import failures_of_fastrl, head, markdown, section

WORKER = Path(__file__).with_name("gpu_jobs.py")
SILENT_SECONDS = 75.0  # that one provider may take for its first call, compilation included
RESERVED = 45.0  # seconds at the end for the last case, and as many before for the graphs


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its processes end, too
    with tempfile.TemporaryDirectory() as folder:
        out = Path(options.out or ("build/gpu/bench" if not options.smoke else folder))
        out.mkdir(parents=True, exist_ok=True)
        return Run(options, out).main()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="folder of the results; default: build/gpu/bench")
    parser.add_argument("--seconds", type=float, default=450.0, help="limit of the whole run")
    parser.add_argument(
        "--only", default="", help="cases whose name has a match of this expression"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what OUT has a result of")
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="fastrl and eager torch"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --smoke runs the same code on the CPU")
    return options


class Run:
    """A run of the matrix, by processes that may fail."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.options, self.out, self.journal = options, out, Journal(out)
        self.shapes = "smoke" if options.smoke else "gpu"
        self.device = torch.device("cpu" if options.smoke else "cuda")
        self.end = time.monotonic() + options.seconds
        reserved = min(RESERVED, options.seconds / 5)
        self.last_start, self.last_case = self.end - reserved, self.end - 2 * reserved

    def main(self) -> int:
        if not self.options.resume:
            (self.out / NAME).unlink(missing_ok=True)
        self.journal.append(machine=machine(self.device), command=f"python {' '.join(sys.argv)}")
        cases = [item.make() for item in items(SHAPES[self.shapes], self.device)]
        chosen = [
            str(number)
            for number, case in enumerate(cases)
            if re.search(self.options.only, f"{case.label} {case.work}")
        ]
        if not chosen:
            print(f"no case has {self.options.only!r} in its name")
            return 1
        self._make(["anchors", *chosen], self.last_case)
        small = {job: one["result"]["graphs"] for job, one in self._measured().items()}
        graphs = [f"graph {job} {name}" for job, names in small.items() for name in names]
        # ours first: a capture that fails costs a new process
        self._make(sorted(graphs, key=lambda job: " fastrl " not in job), self.last_start)
        self._make(["lengths"], self.last_start)
        for job in [job for job in chosen if job not in self.journal.results()]:
            label = f"{cases[int(job)].label}, {cases[int(job)].work}"
            self.journal.append(job=job, not_run=label)
        self._write()
        text = markdown(self.journal.entries())
        print(text[text.index("### Targets") :])
        print(f"written: {self.out / 'bench.md'} and .jsonl")
        failed = failures_of_fastrl(self.journal.results())
        print("".join(f"FAILED: {line}\n" for line in failed), end="")
        return 0 if len(self._measured()) == len(chosen) and not failed else 1

    def _measured(self) -> dict[str, dict]:
        return {
            job: one
            for job, one in self.journal.results().items()
            if job.isdigit() and "result" in one
        }

    def _make(self, jobs: list[str], until: float) -> None:
        """Make jobs, in as many processes as it takes, and show results as they come."""
        left = [job for job in jobs if job not in self.journal.results()]
        while left and time.monotonic() < until:
            before, heard = len(self.journal.results()), len(self.journal.entries())
            lost = {job: len(self.journal.left_out(job)) for job in left}
            self._process(left, until)
            if time.monotonic() >= self.end:
                return  # what was cut is left for another run
            again = False
            for job in self.journal.unfinished(since=heard):
                # one that a provider ended starts again without that provider
                known = self.journal.left_out(job)
                provider = self.journal.tried(job)
                if len(known) == lost.get(job, 0) and provider and provider not in known:
                    why = "its process died, hung, or compiled for too long"
                    self.journal.append(job=job, lost=provider, why=why)
                elif len(known) == lost.get(job, 0):
                    self.journal.append(job=job, failure="its process died or hung")
                    continue
                again = True
            left = [job for job in left if job not in self.journal.results()]
            if len(self.journal.results()) == before and not again:
                return  # it ended before its first job

    def _process(self, jobs: list[str], until: float) -> None:
        command = [sys.executable, str(WORKER)]
        command += ["--out", str(self.out), "--shapes", self.shapes, "--until", str(until)]
        command += [*([] if self.options.peers else ["--no-peers"]), *jobs]
        shown, heard, last = set(self.journal.results()), len(self.journal.entries()), 0.0
        with (self.out / "bench.log").open("a") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            last = time.monotonic()
            try:
                while running.poll() is None:
                    time.sleep(0.05)
                    entries = len(self.journal.entries())
                    if entries > heard:
                        heard, last = entries, time.monotonic()
                        self._show(shown)
                    if time.monotonic() > min(self.end, last + SILENT_SECONDS):
                        break
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        self._show(shown)

    def _show(self, shown: set[str]) -> None:
        new = {job: one for job, one in self.journal.results().items() if job not in shown}
        for job, one in new.items():
            lines = head(self.journal.entries()) if job == "anchors" else section(job, one, {})
            print("\n".join(lines), flush=True)
        if new:
            shown |= set(new)
            self._write()

    def _write(self) -> None:
        """Replace the table as a whole, so that there is one whenever the run is cut."""
        new = self.out / "bench.md.new"
        new.write_text(markdown(self.journal.entries()))
        new.replace(self.out / "bench.md")


def machine(device: torch.device) -> dict[str, str]:
    """Versions, GPU and clocks that the numbers were measured with."""
    found = {
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "fastrl backends": ", ".join(backends(device)),
        "torch.compile": COMPILED,
    }
    found |= {name: version(name) for name in ("triton", *DISTRIBUTIONS)}
    if device.type == "cuda":
        query = "name,clocks.sm,clocks.mem,power.draw,power.limit,driver_version"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[query] = said.strip()
        except (OSError, subprocess.CalledProcessError) as failure:
            found[query] = f"unknown: {failure}"
    return found


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
