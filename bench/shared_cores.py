"""Tokens per second of the embedded GRPO run, alone and beside busy processes, by OpenMP's waiting.

    python bench/shared_cores.py [--rounds 3] [--busy 0 2] [--spin default 0 300]

OpenMP's threads wait for one another by spinning, which takes the cores from whatever would let
them go on. GOMP_SPINCOUNT bounds the spinning of libgomp, which torch ships: `default` is 300,000
turns, 0 is none (OMP_WAIT_POLICY=passive). Each run is a process of its own; the settings take
turns, and every line says how loaded the machine was before each run. `make train` sets 300.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="processes beside it")
    parser.add_argument("--spin", nargs="+", default=["default", "0", "300"])
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores\n")
    print("| busy processes | GOMP_SPINCOUNT | tokens/s, median | of each run (load before) |")
    print("| ---: | ---: | ---: | --- |")
    for busy in given.busy:
        runs: dict[str, list[tuple[float, float]]] = {spin: [] for spin in given.spin}
        for i in range(given.rounds):
            for spin in given.spin if i % 2 == 0 else given.spin[::-1]:
                load = os.getloadavg()[0]
                runs[spin].append((_tokens_per_second(spin, busy, given.steps), load))
        for spin, found in runs.items():
            median = statistics.median(rate for rate, _ in found)
            each = ", ".join(f"{rate:.0f} ({load:.1f})" for rate, load in found)
            print(f"| {busy} | {spin} | {median:.0f} | {each} |", flush=True)


def _tokens_per_second(spin: str, busy: int, steps: int) -> float:
    """The median over the steps of a run, but for the first."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        env.pop(name, None)
    if spin != "default":
        env["GOMP_SPINCOUNT"] = spin
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fastrl.train.grpo", "--steps", str(steps)]
        command += ["--warm_start_steps", "30", "--out", f"{folder}/run"]
        beside = [subprocess.Popen(BUSY) for _ in range(busy)]
        try:
            subprocess.run(command, env=env, check=True, capture_output=True)
        finally:
            for process in beside:
                process.kill()
                process.wait()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("tokens_per_second") for line in lines]
    return statistics.median([rate for rate in rates if rate is not None][1:])


if __name__ == "__main__":
    main()
