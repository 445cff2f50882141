"""`make targets`: every GPU kernel compiled for every target, and what its machine code costs.

No GPU is needed. Triton kernels are compiled ahead of time for what budgets/ lists, CUDA kernels by
nvcc where it is installed; the code is left in build/targets/ and read back by
sass.py. The command fails where a kernel spills, computes in double, reads or writes less than
16 bytes at a time where it streams, or exceeds its budget of instructions on sm_90. The budgets of
Triton kernels hold for the Triton versions that torch 2.10 to 2.15 need; where one of these spills
outside of all loops, the kernel's target says so. With another Triton, failures are only notes.

The predicted time is for an H200, the largest of three: bytes over 4.3 TB/s, instructions over the
issue rate, special functions over theirs. It is a bound, not a measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from budgets.cuda import CUDA
from budgets.target import Target, type_of

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "targets"
TRITONS = ("3.6", "3.7", "3.8", "3.9")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
BUDGETED = "sm_90"

# of an H200, per second
BYTES = 4.3e12
ISSUED = 132 * 4 * 32 * 1.755e9  # instructions of single threads
MUFU = 132 * 16 * 1.755e9


class Report(NamedTuple):
    """One kernel for one target; costs are per element of what it streams."""

    name: str
    architecture: str
    kernel: str
    registers: int
    spills: int
    narrow: int  # accesses under 16 bytes beyond those the target allows
    instructions: float | None
    mufu: float | None
    moved: float | None  # bytes
    milliseconds: float | None  # predicted for 1e9 elements
    bound: str
    failures: list[str]
    notes: tuple[str, ...] = ()  # the same of a compiler that the budgets are not for


def triton_targets() -> list[Target]:
    """Return what is compiled of fastrl/triton, which needs Triton to be imported."""
    from budgets import tokens, vocabulary

    return [*tokens.targets(), *vocabulary.targets()]


def triton_source(target: Target) -> Any:
    """Return what Triton compiles for a target."""
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(target.kernel.arg_names):
        given = None if name in target.constants else target.types.get(name, type_of(name))
        signature[name], nones = _signature(given, (place,))
        constants |= nones
        if name in target.constants:
            constants[(place,)] = target.constants[name]
        if name in target.divisible:
            fields = enumerate(given) if isinstance(given, tuple) else ()
            pointers = [(place, i) for i, type_ in fields if str(type_).startswith("*")]
            for path in pointers or [(place,)]:
                attributes[path] = [["tt.divisibility", 16]]
    unknown = ({*target.types} | {*target.constants}) - {*target.kernel.arg_names}
    assert not unknown, f"{target.name}: the kernel has no argument {unknown}"
    return ASTSource(target.kernel, signature, constants, attributes)


def compile_triton(target: Target, architecture: str) -> Path:
    """Compile one target and return its cubin (or hsaco, with its assembly beside it)."""
    import triton
    from triton.backends.compiler import GPUTarget

    amd = architecture.startswith("gfx")
    gpu = (
        GPUTarget("hip", architecture, 64) if amd else GPUTarget("cuda", int(architecture[3:]), 32)
    )
    warps = target.amd_num_warps if amd and target.amd_num_warps else target.num_warps
    options = {"num_warps": warps, "enable_fp_fusion": target.enable_fp_fusion}
    compiled = triton.compile(triton_source(target), target=gpu, options=options)
    path = BUILD / f"triton-{target.name}-{architecture}.{'hsaco' if amd else 'cubin'}"
    path.write_bytes(compiled.asm["hsaco" if amd else "cubin"])
    if amd:
        path.with_suffix(".amdgcn").write_text(compiled.asm["amdgcn"])
    return path


def _signature(types: Any, place: tuple[int, ...]) -> tuple[Any, dict[tuple[int, ...], None]]:
    """Return types in Triton's words, and where an argument, or a field of a tuple, is None."""
    if types is None:
        return "constexpr", {place: None}
    if isinstance(types, str):
        return types, {}
    nones = {(*place, i): None for i, type_ in enumerate(types) if type_ is None}
    return type(types)._make(type_ or "constexpr" for type_ in types), nones


def report_triton(target: Target, architecture: str) -> Report:
    import sass
    import triton

    (kernel,) = sass.read(compile_triton(target, architecture))
    passes = sorted(kernel.passes, key=lambda one: -(one.loaded + one.stored))[: target.loops]
    passes = [kernel.whole] if target.loops == 0 and kernel.passes else passes
    each = None if target.block is None else target.block / (32 * target.num_warps)
    costs = _costs(passes, target.element_bytes, each)
    compiler = ".".join(triton.__version__.split(".")[:2])
    report = _report(target.name, architecture, kernel, passes, costs, target, compiler)
    if compiler not in TRITONS:
        held = f"Triton {compiler}, where the budgets are for {', '.join(TRITONS)}"
        told = tuple(f"{failure} ({held})" for failure in report.failures)
        return report._replace(failures=[], notes=told)
    return report


def cuda_targets() -> list[tuple[Path, str]]:
    """Return the CUDA sources and the architectures to compile them for."""
    sources = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    return [(path, arch) for path in sources for arch in ARCHITECTURES if arch.startswith("sm_")]


def report_cuda(source: Path, architecture: str) -> list[Report]:
    import sass

    path = BUILD / f"cuda-{source.stem}-{architecture}.cubin"
    inputs = [source, *(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc" / "cuda").rglob("*.*h")]
    if not path.exists() or path.stat().st_mtime < max(file.stat().st_mtime for file in inputs):
        command = [nvcc() or "nvcc", "-cubin", f"-arch={architecture}", "-std=c++17", "-O3"]
        command += [f"-I{ROOT / 'csrc'}", "-o", str(path), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    reports = []
    for kernel in sass.read(path):
        budget = next((one for one in CUDA if one.name in kernel.name), Target(source.stem))
        passes = worst_sweeps(kernel) if budget.sweeps else kernel.passes
        found = len(passes) == (budget.sweeps or len(passes))
        if found and budget.sweeps:  # an exponential at least for what counts as an element
            found = all(one.elements(budget.element_bytes) <= one.mufu for one in passes)
        costs = _costs(passes, budget.element_bytes) if found else (None, None)
        name = f"cuda {source.stem}"
        reports.append(_report(name, architecture, kernel, passes, costs, budget))
    return reports


def worst_sweeps(kernel: Any) -> list[Any]:
    """Return the most expensive sweep that only reads and the most expensive that writes."""
    reading = [one for one in kernel.sweeps if not one.stored]
    writing = [one for one in kernel.sweeps if one.stored]
    return [max(some, key=lambda one: one.instructions) for some in (reading, writing) if some]


def nvcc() -> str | None:
    """Return the CUDA compiler: of CUDA_HOME, of PATH, or where it is installed by default."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return str(home / "bin" / "nvcc") if (home / "bin" / "nvcc").exists() else shutil.which("nvcc")


def _costs(
    passes: list[Any], element_bytes: int, each: float | None = None
) -> tuple[float | None, float | None]:
    """Return instructions and special functions per element, over all hot loops together."""
    counted = [(one, each or one.elements(element_bytes)) for one in passes]
    counted = [(one, elements) for one, elements in counted if elements]
    # a loop that only writes is for rows that have no gradient
    counted = [pair for pair in counted if pair[0].loaded or pair[0].shared] or counted
    if not counted:
        return None, None
    return (
        sum(one.instructions / elements for one, elements in counted),
        sum(one.mufu / elements for one, elements in counted),
    )


def _report(
    name: str,
    architecture: str,
    kernel: Any,
    passes: list[Any],
    costs: tuple[float | None, float | None],
    target: Target,
    compiler: str = "",
) -> Report:
    streams = target.instructions is not None
    instructions, mufu = costs if streams else (None, None)
    failures = []
    if kernel.spills > target.spills.get(compiler, 0) or kernel.spills_in_loops:
        failures.append(f"{kernel.spills} spills, {kernel.spills_in_loops} of them in loops")
    if kernel.double:
        failures.append(f"{kernel.double} instructions in double")
    if target.registers is not None and kernel.registers > target.registers:
        failures.append(f"{kernel.registers} registers, budget {target.registers}")
    if target.persistent and kernel.cluster_barriers:
        failures.append(f"{kernel.cluster_barriers} cluster barriers in a loop")
    narrow = max((one.narrow for one in passes), default=0) - target.narrow if streams else 0
    if narrow > 0:
        failures.append(f"{narrow} accesses under 16 bytes in a pass")
    narrowest = min((one.narrowest for one in passes), default=16)
    if streams and narrowest < target.narrowest:
        failures.append(f"an access of {narrowest} bytes in a pass")
    if streams and architecture == BUDGETED:
        for what, cost, budget in (
            ("instructions", instructions, target.instructions),
            ("MUFU", mufu, target.mufu),
        ):
            if budget is not None and not (cost is not None and cost <= budget):
                failures.append(f"{cost} {what} per element, budget {budget}")
    milliseconds, bound = None, ""
    if instructions is not None and architecture.startswith("sm_"):
        seconds = {
            "memory": target.bytes_per_element * 1e9 / BYTES,
            "issue": instructions * 1e9 / ISSUED,
            "MUFU": mufu * 1e9 / MUFU,
        }
        bound = max(seconds, key=seconds.__getitem__)
        milliseconds = seconds[bound] * 1e3
    return Report(
        name=name,
        architecture=architecture,
        kernel=kernel.name,
        registers=kernel.registers,
        spills=kernel.spills,
        narrow=max(narrow, 0),
        instructions=instructions,
        mufu=mufu,
        moved=target.bytes_per_element if streams else None,
        milliseconds=milliseconds,
        bound=bound,
        failures=failures,
    )


def _one(job: tuple[str, Any, str]) -> list[Report]:
    kind, what, architecture = job
    if kind == "cuda":
        return report_cuda(what, architecture)
    targets = {target.name: target for target in triton_targets()}
    return [report_triton(targets[what], architecture)]


def reports(
    architectures: tuple[str, ...], only: str = "", jobs: int = 2, *, quick: bool = False
) -> list[Report]:
    """Compile everything and read it back, in as many processes.

    Quick leaves out, on all architectures but the one with budgets, the further variants of each
    Triton kernel and all of csrc/cuda.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    work: list[tuple[str, Any, str]] = [
        ("triton", target.name, architecture)
        for target in triton_targets()
        for architecture in architectures
    ]
    if nvcc() is not None:
        work += [("cuda", *pair) for pair in cuda_targets() if pair[1] in architectures]
    if quick:
        first = {target.kernel: target.name for target in reversed(triton_targets())}
        work = [job for job in work if job[2] == BUDGETED or job[1] in first.values()]
    work = [job for job in work if only in f"{job[0]} {getattr(job[1], 'stem', job[1])}"]
    print(
        f"{len(work)} compilations in {jobs} processes, of a few seconds each: "
        "minutes, unless Triton's cache has them",
        file=sys.stderr,
    )
    made: list[Report] = []
    begin = said = time.monotonic()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for done, found in enumerate(pool.imap(_one, work), 1):
            made += found
            if time.monotonic() - said > 5:
                said = time.monotonic()
                left = (said - begin) / done * (len(work) - done)
                print(f"{done} of {len(work)}, about {left:.0f} s left", file=sys.stderr)
    return made


def table(found: list[Report]) -> str:
    lines = [
        "| kernel | target | registers | spills | narrow | instructions | MUFU | bytes "
        "| H200 ms / 1e9 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        costs = [f"{cost:.2f}" if cost is not None else "" for cost in (one.instructions, one.mufu)]
        moved = "" if one.moved is None else f"{one.moved:g}"
        predicted = "" if one.milliseconds is None else f"{one.milliseconds:.2f} ({one.bound})"
        lines.append(
            f"| {one.name} | {one.architecture} | {one.registers} | {one.spills} | {one.narrow} "
            f"| {costs[0]} | {costs[1]} | {moved} | {predicted} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--only", default="", help="targets whose name holds this text")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--quick", action="store_true", help="all on sm_90, else one of a kind")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    options = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing to compile (`pip install triton`)")
        return 0
    found = reports(tuple(options.arch), options.only, options.jobs, quick=options.quick)
    if options.json:
        print(json.dumps([report._asdict() for report in found]))
        return 0
    print(table(found))
    if nvcc() is None:
        print("\nnvcc is not installed: csrc/cuda was not compiled")
    for word, lines in (("NOTE", "notes"), ("FAILED", "failures")):
        for one in found:
            for line in getattr(one, lines):
                print(f"{word} {one.name} {one.architecture} {one.kernel}: {line}")
    return int(any(one.failures for one in found))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # nothing is compiled under it
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
