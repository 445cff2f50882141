"""Which faults the tests near them do not see: `python -m tests.mutants --only fastrl/ops`.

mutmut and cosmic-ray make faults by rules from the syntax tree of Python. They take no list, which
is a measure only if it stays the same, and know no C++; hence this program.

Each fault of `faults.diff` is put into a temporary copy of the working tree, where its tests run
until one fails. Those tests must pass without it. A fault with which they take ten times as long
counts as seen.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.faults import ROOT, faults

NOT_COMPILED = re.compile(r"^\S+\.(cpp|h|cuh):\d+:\d+: (fatal )?error:", re.MULTILINE)
PATIENCE = 60  # seconds beside ten times those of the tests alone
BUILD = 1800  # seconds of a compilation


def copied(folder):
    """Copy the files that git does not ignore, and the compiled extensions; return the folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("fastrl/_C*.so")]
    for name in filter(None, [*listed.split("\0"), *built]):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "tmp").mkdir()
    return folder


def is_compiled(fault):
    return fault.path.startswith("csrc/cpu/")  # csrc/cuda and what it shares: by its tests


def tested(folder, fault, limit):
    """Run the tests of a fault in a copy.

    Returns:
        Their exit status, None after ``limit`` seconds; the output; their seconds.
    """
    build = ["setup.py", "build_ext", "--inplace"]
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
    env = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # Python takes a file of the same second for unchanged
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "FASTRL_BUILD": "cpu",
    }
    if fault.path.startswith("fastrl/triton/"):
        env["FASTRL_TESTED"] = "triton"
    elif any(name.startswith("tests/gpu/") for name in fault.tests):
        env["FASTRL_TESTED"] = "reference cpu cuda"
    for arguments, most in ((build, BUILD), (pytest, limit))[not is_compiled(fault) :]:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=most)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, f"no end after {most:.0f} s", most
        if process.returncode:
            break
    return process.returncode, output, time.monotonic() - start


def outcome(folder, fault, limit):
    """What becomes of a fault: seen, seen by its time, SURVIVES, or does not compile."""
    path = folder / fault.path
    text = path.read_text()
    path.write_text(fault.applied(text))
    try:
        status, output, _ = tested(folder, fault, limit)
    finally:
        path.write_text(text)
    if NOT_COMPILED.search(output):
        return "does not compile"
    return {None: "seen by its time", 0: "SURVIVES"}.get(status, "seen")


def tried(chosen, jobs, folder):
    """Yield each fault with its outcome."""
    copies = SimpleQueue()
    for number in range(min(jobs, len(chosen))):
        copies.put(copied(folder / str(number)))

    def in_copy(function, fault, *arguments):
        copy = copies.get()
        try:
            return fault, function(copy, fault, *arguments)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        alone = {fault.tests: fault for fault in chosen}.values()
        limits = {}
        try:
            runs = [pool.submit(in_copy, tested, fault, BUILD) for fault in alone]
            for done in as_completed(runs):
                fault, (status, output, seconds) = done.result()
                if status != 0:
                    raise SystemExit(f"{output}\nthe tests must pass without a fault")
                limits[fault.tests] = PATIENCE + 10 * seconds
                print(f"{seconds:.0f} s without a fault: {' '.join(fault.tests)}", flush=True)
            runs = [pool.submit(in_copy, outcome, fault, limits[fault.tests]) for fault in chosen]
            for done in as_completed(runs):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main():
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATH", help="files or folders")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    options = parser.parse_args()
    chosen = [fault for fault in faults() if fault.path.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"--only must name files of the list, got {' '.join(options.only)}")
    left, survived = len(chosen), []
    for compiled in (False, True):  # in copies of their own, which keep objects, but of any fault
        group = [fault for fault in chosen if is_compiled(fault) == compiled]
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            for fault, how in tried(group, options.jobs, Path(folder)) if group else ():
                left -= 1
                if not how.startswith("seen"):
                    survived.append((fault, how))
                place = f"{fault.path}:{fault.line()}"
                print(f"[{left} left, {len(survived)} survive] {place} {how}", flush=True)
    for fault, how in survived:
        print(f"\n{fault.path}:{fault.line()} {how}\n-{fault.old}\n+{fault.new}")
    print(f"\n{len(survived)} of {len(chosen)} faults survive")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
