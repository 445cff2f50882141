"""`python -m fastrl`: print versions and, for each backend, whether it is usable or why not."""

from __future__ import annotations

import platform
import sys

import torch

import fastrl
from fastrl.backend import BACKENDS, get_backend, unavailable
from fastrl.native import cpu_capability
from fastrl.triton.runtime.registration import INTERPRETED


def report() -> str:
    """Return the text that `python -m fastrl` prints."""
    lines = [
        f"fastrl {fastrl.__version__}, torch {torch.__version__}, "
        f"python {platform.python_version()}, {platform.machine()}",
        f"default backend: {get_backend()}",
    ]
    for name in BACKENDS[1:]:
        reason = unavailable(name)
        state = "usable" if reason is None else f"not usable: {reason}"
        if name == "cpu" and reason is None:
            state += f" ({cpu_capability()}, {torch.get_num_threads()} threads)"
        if name == "triton" and reason is None and INTERPRETED:
            state += " (slow: interpreted because TRITON_INTERPRET is set)"
        lines.append(f"  {name:<10} {state}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
