"""What compiled GPU kernels cost, read from their machine code, with no GPU.

NVIDIA cubins are read through the disassembler that the `triton` wheel carries (or one on PATH),
AMD kernels through the assembly that Triton leaves beside them. A hot loop is an innermost loop
that reads or writes global memory; a kernel without one is a single pass over its block, and its
whole code is that pass.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_GLOBAL = ("LDG", "STG", "LDGSTS")
_BULK = ("UBLKCP", "UTMALDG", "UTMASTG", "UBLKRED")
_SPILLS = ("LDL", "STL")
_DOUBLE = re.compile(r"^(DADD|DMUL|DFMA|DSETP|DMNMX)\b|\.F64|64H\b")


class Pass(NamedTuple):
    """One pass of a thread through a loop (or through a kernel without loops)."""

    instructions: int
    mufu: int
    loaded: int  # bytes from global memory
    stored: int
    shared: int  # bytes from shared memory
    narrow: int  # global accesses under 16 bytes
    narrowest: int = 16  # bytes of the narrowest global access, if under 16
    vectors: int = 0  # of a sweep, the bytes that it reads in vectors of 16

    def elements(self, element_bytes: int) -> float:
        """Return how many elements the pass covers, by the bytes it reads.

        A sweep over an unaligned row joins each vector with words of the next, or of the one
        before, which are no elements of their own.
        """
        return (self.vectors or self.loaded or self.shared or self.stored) / element_bytes


class Kernel(NamedTuple):
    name: str
    registers: int
    spills: int  # instructions that spill; for AMD, registers spilled
    spills_in_loops: int  # of these, those in an innermost loop; for AMD, all of them
    double: int  # 64-bit floating point instructions
    cluster_barriers: int  # in loops
    passes: list[Pass]  # through the hot loops
    sweeps: list[Pass]  # through the unrolled loops that read vectors of 16 bytes of a row
    whole: Pass  # through everything


def read(path: Path) -> list[Kernel]:
    """Return the kernels of a `.cubin`, or of the `.amdgcn` assembly beside a `.hsaco`."""
    if path.suffix == ".hsaco":
        return [_amd(path.with_suffix(".amdgcn"))]
    usage = _output("cuobjdump", "-res-usage", str(path))
    registers = dict(re.findall(r"Function (\S+):\s+REG:(\d+)", usage))
    return [
        _nvidia(name, int(registers.get(name, -1)), labels, code)
        for name, labels, code in _functions(_output("nvdisasm", "-c", str(path)))
    ]


def tool(name: str) -> str | None:
    """Return the path of a CUDA tool, from the triton wheel or else from PATH."""
    if importlib.util.find_spec("triton") is not None:
        spec = importlib.util.find_spec("triton.backends.nvidia")
        for place in (spec and spec.submodule_search_locations) or ():
            if (Path(place) / "bin" / name).exists():
                return str(Path(place) / "bin" / name)
    return shutil.which(name)


def _output(name: str, *arguments: str) -> str:
    found = tool(name)
    if found is None:
        raise FileNotFoundError(f"{name} not found: install triton, or put {name} on PATH")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=True).stdout


def _functions(text: str) -> Iterator[tuple[str, dict[str, int], list[str]]]:
    """Return name, labels and instructions of every function in a disassembly."""
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        labels: dict[str, int] = {}
        code: list[str] = []
        for line in part.splitlines():
            if mark := re.match(r"^\s*(\.L_x?_?\w+):", line):
                labels[mark[1]] = len(code)
            elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                code.append(instruction[1].strip())
        if code:
            yield re.match(r"[^,\s]+", part)[0], labels, code


def _nvidia(name: str, registers: int, labels: dict[str, int], code: list[str]) -> Kernel:
    operations = [_operation(instruction) for instruction in code]
    kinds = collections.Counter(operation.partition(".")[0] for operation in operations)
    loops = _loops(labels, code)
    bodies = [operations[begin:end] for begin, end in _innermost(loops)]
    hot = [body for body in bodies if any(_is(operation, _GLOBAL + _BULK) for operation in body)]
    sweeps = [_sweep(body) for body in bodies if _reads_vectors(body)]
    whole = _pass(operations)
    return Kernel(
        name=name,
        registers=registers,
        spills=sum(kinds[kind] for kind in _SPILLS),
        spills_in_loops=sum(_is(operation, _SPILLS) for body in bodies for operation in body),
        double=sum(bool(_DOUBLE.search(operation)) for operation in operations),
        cluster_barriers=sum(
            _is(operation, ("UCGABAR_ARV",)) and any(begin <= i < end for begin, end in loops)
            for i, operation in enumerate(operations)
        ),
        passes=[_pass(body) for body in hot] or [whole],
        sweeps=sweeps,
        whole=whole,
    )


def _vectors(body: list[str]) -> list[str]:
    return [op for op in body if _is(op, ("LDG", "LDS")) and _width(op) >= 16]


def _reads_vectors(body: list[str]) -> bool:
    """Say whether a loop reads several vectors per pass, and takes exponentials of them."""
    exponentials = [op for op in body if op.startswith("MUFU.EX2")]
    return len(_vectors(body)) > 1 and len(exponentials) >= 4 * len(_vectors(body))


def _sweep(body: list[str]) -> Pass:
    vectors = sum(_width(op) for op in _vectors(body))
    return _pass(body)._replace(vectors=vectors)


def _loops(labels: dict[str, int], code: list[str]) -> list[tuple[int, int]]:
    """Return where loops begin and end."""
    found: dict[int, int] = {}
    for end, instruction in enumerate(code):
        target = re.search(r"\bBRA\b.*?(\.L_x?_?\w+)", instruction)
        begin = labels.get(target[1], end) if target else end
        if begin < end:
            found[begin] = max(end + 1, found.get(begin, 0))
    return sorted(found.items())


def _innermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the loops that contain no other loop."""
    return [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] < span[1] for other in spans)
    ]


def _pass(operations: list[str]) -> Pass:
    kinds = collections.Counter(operation.partition(".")[0] for operation in operations)

    def total(*names: str) -> int:
        return sum(_width(operation) for operation in operations if _is(operation, names))

    widths = [_width(operation) for operation in operations if _is(operation, _GLOBAL)]
    return Pass(
        instructions=len(operations) - (kinds["NOP"]),
        mufu=kinds["MUFU"],
        loaded=total("LDG", "LDGSTS"),
        stored=total("STG"),
        shared=total("LDS"),
        narrow=sum(width < 16 for width in widths),
        narrowest=min((16, *widths)),
    )


def _operation(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")[0]


def _is(operation: str, names: tuple[str, ...]) -> bool:
    return operation.partition(".")[0] in names


def _width(operation: str) -> int:
    """Return the bytes that one thread moves."""
    return next((_WIDTHS[part] for part in operation.split(".")[1:] if part in _WIDTHS), 4)


def _amd(path: Path) -> Kernel:
    text = path.read_text()
    fields = dict(re.findall(r"^\s*\.(\w+):\s+(\S+)\s*$", text, flags=re.MULTILINE))
    code = re.findall(r"^\t([a-z]\w+)", text, flags=re.MULTILINE)
    return Kernel(
        name=fields.get("name", path.stem),
        registers=int(fields.get("vgpr_count", -1)),
        # scalar registers move to lanes of vector registers, not to memory
        spills=int(fields.get("vgpr_spill_count", 0)),
        spills_in_loops=int(fields.get("vgpr_spill_count", 0)),
        double=sum("_f64" in operation for operation in code),
        cluster_barriers=0,
        passes=[],
        sweeps=[],
        whole=_pass([]),
    )
