"""Peak memory of one call, beyond its inputs and the gradient it returns, in a fresh process.

    python bench/memory.py [--sequences 4 --tokens 64 --vocab 151936]

Each line is a separate process: make the inputs, warm up with a small call, reset the kernel's
high-water mark of resident memory, make one call, read the mark.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import resource
import subprocess
import sys
from pathlib import Path

import torch
from bench_logits_policy_loss import providers
from logits import make_inputs
from shapes import Logits

FASTRL = ("fastrl cpu", "fastrl cpu with entropy", "fastrl reference")
PROVIDERS = {
    "float32": (*FASTRL, "eager"),
    "bfloat16": (*FASTRL, "eager in bfloat16", "eager in float32"),
}


def main() -> None:
    options = _options()
    if options.provider:
        print(json.dumps(_measure(options)))
        return
    print(
        f"loss and gradient from logits, {options.sequences * options.tokens} x {options.vocab}\n"
    )
    print("| provider | dtype | logits MB | peak beyond logits and gradient, MB | share |")
    print("| --- | --- | ---: | ---: | ---: |")
    for dtype, names in PROVIDERS.items():
        for provider in names:
            command = [sys.executable, __file__, "--provider", provider, "--dtype", dtype]
            for name in ("sequences", "tokens", "vocab"):
                command += [f"--{name}", str(getattr(options, name))]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            if child.returncode:
                reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
                print(f"| {provider} | {dtype} | - | not run: {reason[:120]} | - |")
                continue
            found = json.loads(child.stdout)
            share = found["beyond"] / found["logits"]
            mega = f"{found['logits'] / 1e6:.1f} | {found['beyond'] / 1e6:.2f}"
            print(f"| {provider} | {dtype} | {mega} | {share:.2%} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", choices=PROVIDERS, default="float32")
    parser.add_argument("--provider", help="measure this one, here")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> dict[str, int]:
    dtype = getattr(torch, options.dtype)
    name = options.provider.removesuffix(" with entropy")
    changes = {} if name == options.provider else {"entropy_coef": 0.01}
    provider = {one.name: one for one in providers(dtype, **changes)}[name]
    provider.run(make_inputs(Logits("warm-up", 2, 8, 4096), dtype, seed=1))
    inputs = make_inputs(
        Logits("measured", options.sequences, options.tokens, options.vocab), dtype, seed=0
    )
    before = _reset_peak()
    gradient = provider.run(inputs)
    beyond = _peak() - before - gradient.nbytes
    return {"logits": inputs["logits"].nbytes, "beyond": beyond}


def _reset_peak() -> int:
    """Return the resident bytes and reset the high-water mark to them, where Linux allows it."""
    if platform.libc_ver()[0] == "glibc":  # freed memory still held would hide what the call takes
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
