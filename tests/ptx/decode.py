"""Reads PTX into the instructions of machine.h: operands as places in a warp's registers.

What the operations of the machine do not cover is refused by name.
"""

import collections
import dataclasses
import re

import numpy as np

from tests.ptx.syntax import (
    BITS,
    entries,
    names_of,
    operands_of,
    parameters_of,
    renamed,
    statements,
)

#: An instruction as machine.h has it.
RECORD = np.dtype(
    [
        ("operation", "i4"),
        ("guard", "i4"),
        ("negated", "i4"),
        ("d", "i4", 4),
        ("s", "i4", 6),
        ("extra", "i4", 4),
        ("offset", "i8"),
        ("file", "i4"),
        ("line", "i4"),
    ],
    align=True,
)
PREDICATE, LANES = 4, 32
SPECIAL = {f"%{name}": place for place, name in enumerate(
    ("tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "ntid.x", "nctaid.x", "nctaid.y",
     "nctaid.z", "laneid", "cluster_ctarank", "cluster_nctarank", "shared64",
     "shared32"))}  # fmt: skip
SPACES = {"param": 0, "global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3}
ORDERS, NARROW = {"relaxed", "acquire", "release", "acq_rel"}, {"cta", "cluster"}
#: What says how a value is cached or rounded by default, and changes nothing here.
IGNORED = {"cs", "cg", "ca", "uni", "L2::cache_hint", "aligned"}


class RefusedError(ValueError):
    """Of PTX that the machine does not execute."""


@dataclasses.dataclass
class Kernel:
    """One kernel, as machine.h executes it."""

    name: str
    records: np.ndarray
    constants: np.ndarray  # a row of lanes each
    register_bytes: int
    parameters: list  # (offset, bytes, type)
    files: list

    @property
    def parameter_bytes(self):
        offset, size, _ = self.parameters[-1] if self.parameters else (0, 0, "")
        return offset + size


def decode(ptx, name, operations):
    """Decode one kernel; `operations` are the names that the machine knows, in its order."""
    kernels, files = entries(ptx)
    parameters, body = kernels[name]
    return _Reader(name, parameters_of(parameters), files, operations).read(body)


@dataclasses.dataclass
class _Line:
    """An instruction whose operands are still names."""

    parts: list
    guard: str
    negated: bool
    operands: list  # each a name, a list of names, or (base, offset)
    place: tuple


class _Reader:
    def __init__(self, name, parameters, files, operations):
        self.name, self.parameters = name, parameters
        self.files = [files.get(i, "") for i in range(max(files, default=0) + 1)]
        self.operations = {known: i for i, known in enumerate(operations)}
        self.widths, self.labels, self.lines = {}, {}, []
        self.constants, self.bytes = {}, {}

    def read(self, body):
        self._split(body)
        self._allocate()
        records = np.zeros(len(self.lines), RECORD)
        for i, line in enumerate(self.lines):
            records[i] = self._record(line)
        words = np.zeros((len(self.constants), 2 * LANES), np.uint32)
        for (value, width), place in self.constants.items():
            row = words[place]
            if width == PREDICATE:
                row[0] = value & 0xFFFFFFFF
            elif width == 64:
                row.view(np.uint64)[:] = value & (2**64 - 1)
            elif width == 32:
                row[:LANES] = value & 0xFFFFFFFF
            else:
                row.view(np.uint16)[:LANES] = value & 0xFFFF
        return Kernel(self.name, records, words, self._end, self.parameters, self.files)

    # --- text to lines

    def _split(self, body):
        scopes, place, serial = [{}], (0, 0), 0
        for text in statements(body):
            if text.startswith(".loc"):
                numbers = text.split()
                place = (int(numbers[1]), int(numbers[2]))
            elif text == "{":
                serial += 1
                scopes.append({})
            elif text == "}":
                scopes.pop()
            elif text.startswith(".reg"):
                self._declare(text, scopes[-1], serial)
            elif text.startswith((".pragma", ".section", ".file")):
                continue
            elif text.endswith(":"):
                label = text[:-1]
                self.labels[label if len(scopes) == 1 else f"{label}@{serial}"] = len(self.lines)
            elif text.startswith("."):
                raise RefusedError(f"{self.name}: {text}")
            else:
                self.lines.append(self._line(text, scopes, serial, place))

    def _declare(self, text, scope, serial):
        _, kind, names = text.replace(",", " ").split(maxsplit=2)
        width = PREDICATE if kind == ".pred" else int(BITS.match(kind[1:])[1])
        for name in names.split():
            many = re.match(r"(%?\w+)<(\d+)>", name)
            if many:
                for i in range(int(many[2])):
                    self.widths[f"{many[1]}{i}"] = width
            else:
                scope[name] = f"{name}@{serial}"
                self.widths[scope[name]] = width

    def _line(self, text, scopes, serial, place):
        guard, negated = "", False
        if text.startswith("@"):
            guard, text = text[1:].split(None, 1)
            negated, guard = guard.startswith("!"), guard.lstrip("!")
        opcode, _, rest = text.partition(" ")
        opcode, _, rest = (opcode + " " + rest).replace("\t", " ").partition(" ")
        local = {name: full for scope in scopes for name, full in scope.items()}
        operands = [renamed(one, local) for one in operands_of(rest)]
        if (
            opcode.startswith("bra")
            and len(scopes) > 1
            and f"{operands[0]}@{serial}" in self.labels
        ):
            operands[0] = f"{operands[0]}@{serial}"
        parts = [part for part in opcode.split(".") if part not in IGNORED]
        return _Line(parts, local.get(guard, guard), negated, operands, place)

    # --- registers to places: those of one basic block take turns

    def _allocate(self):
        starts = {*self.labels.values()}
        block, blocks, last = 0, {}, {}
        self.uses = collections.Counter(name for line in self.lines for name in names_of(line))
        for i, line in enumerate(self.lines):
            block += i in starts
            for name in names_of(line):
                if name in self.widths:
                    blocks.setdefault(name, set()).add(block)
                    last[name] = i
            block += line.parts[0] == "bra"
        self._end = len(SPECIAL) * 2 * LANES * 4
        free, ending = {}, {}
        for i, line in enumerate(self.lines):
            for name in names_of(line):
                if name not in self.widths or name in self.bytes:
                    continue
                width = self.widths[name]
                if free.get(width) and len(blocks[name]) == 1:
                    self.bytes[name] = free[width].pop()
                else:
                    self.bytes[name] = self._end
                    self._end += max(64, LANES * width // 8 if width != PREDICATE else 64)
                if len(blocks[name]) == 1:
                    ending.setdefault(last[name], []).append(name)
            for name in ending.get(i, ()):  # after it was read: a result never overlaps an operand
                free.setdefault(self.widths[name], []).append(self.bytes[name])

    def _constant(self, value, width):
        return -1 - self.constants.setdefault((value, width), len(self.constants))

    def _operand(self, name, width):
        """Return the place of a register, or of a constant of so many bits."""
        if name == "_":
            return 0x7FFFFFFF
        if name in self.bytes:
            return self.bytes[name]
        if name in SPECIAL:
            return SPECIAL[name] * 2 * LANES * 4
        if name.startswith(("0f", "0F")):
            return self._constant(int(name[2:], 16), 32)
        number = re.fullmatch(r"(-?)(0x[0-9a-fA-F]+|\d+)U?", name)
        if number:
            value = int(number[2], 0) * (-1 if number[1] else 1)
            return self._constant(value, width)
        if name.startswith(self.name):  # a parameter's address
            return self._constant(self.parameters[int(name.rpartition("_")[2])][0], width)
        if re.search(r"(fastrl_sharedE|global_smem)$", name):
            return SPECIAL[f"%shared{width}"] * 2 * LANES * 4
        raise RefusedError(f"{self.name}: the operand {name}")

    # --- lines to records

    def _record(self, line):
        record = np.zeros((), RECORD)
        record["guard"] = self.bytes[line.guard] if line.guard else -1
        record["negated"] = line.negated
        record["file"], record["line"] = line.place
        name = self._fill(record, line)
        if name not in self.operations:
            raise RefusedError(f"{self.name}: {'.'.join(line.parts)} ({name})")
        record["operation"] = self.operations[name]
        return record

    def _fill(self, record, line):
        """Set the operands of a record and return the name of its operation."""
        kind, operands = line.parts[0], line.operands
        if kind in ("ld", "st", "atom", "mbarrier", "cp", "ldmatrix", "stmatrix"):
            return self._memory(record, line)
        if kind == "bra":
            record["offset"] = self.labels[operands[0]]
            return "bra"
        if kind == "cvta":
            line = dataclasses.replace(line, parts=["mov", line.parts[-1]])
            kind = "mov"
        if kind == "mov":
            return self._move(record, line)
        if kind in ("bar", "barrier") and len(operands) > 1:
            raise RefusedError(f"{self.name}: {'.'.join(line.parts)} of some threads")
        if kind in ("bar", "barrier", "fence", "nanosleep", "ret", "exit"):
            for i, one in enumerate(operands):
                record["s"][i] = self._operand(one, 32)
            return ".".join(line.parts)
        destination, *sources = operands
        if isinstance(destination, str) and "|" in destination:
            destination, second = destination.split("|")
            if kind == "setp":
                record["d"][1] = self._operand(second, 32)
            elif self.uses[second] > 1:
                raise RefusedError(f"{self.name}: the predicate of {'.'.join(line.parts)}")
        record["d"][0] = self._operand(destination, 32)
        if kind == "cvt":
            record["extra"][:2] = (
                self.widths[destination],
                self._width_of(sources[0], line.parts[-1]),
            )
        for i, (one, width) in enumerate(zip(sources, self._source_widths(line), strict=False)):
            record["s"][i] = self._operand(one, width)
        return ".".join(line.parts)

    def _width_of(self, name, type_):
        return self.widths.get(name, 32 if name in SPECIAL else int(BITS.match(type_)[1]))

    def _source_widths(self, line):
        kind, type_ = line.parts[0], line.parts[-1]
        if type_ == "pred":
            return [PREDICATE] * 3
        width = int(BITS.match(type_)[1]) * (2 if type_.endswith("x2") else 1)
        if kind in ("shl", "shr", "bfe", "shfl"):
            return [width, 32, 32, 32]
        if kind == "bfi":
            return [width, width, 32, 32]
        if kind in ("mad", "mul") and "wide" in line.parts:
            return [width, width, 2 * width]
        if kind == "selp":
            return [width, width, PREDICATE]
        if kind == "vote":
            return [PREDICATE, 32]
        return [width] * 4

    def _move(self, record, line):
        destination, source = line.operands
        if isinstance(source, list) or isinstance(destination, list):
            many = source if isinstance(source, list) else destination
            wide = destination if isinstance(source, list) else source
            width = int(BITS.match(line.parts[-1])[1])
            places = [self._operand(one, width // len(many)) for one in many]
            name, one = ("pack", "d") if isinstance(source, list) else ("unpack", "s")
            record[one][0] = self._operand(wide, width)
            record["s" if one == "d" else "d"][: len(places)] = places
            return f"{name}.b{width}"
        type_ = line.parts[-1]
        width = PREDICATE if type_ == "pred" else int(BITS.match(type_)[1])
        record["d"][0], record["s"][0] = (
            self._operand(destination, width),
            self._operand(source, width),
        )
        return "mov.pred" if width == PREDICATE else f"mov.b{width}"

    def _address(self, record, operand):
        base, offset = operand
        record["s"][0] = self._operand(base, 64)
        record["extra"][3] = self.widths.get(base, 64)
        record["offset"] = offset

    def _plain(self, operand):
        """Return the register of an address that has no place for an offset in a record."""
        base, offset = operand
        if offset:
            raise RefusedError(f"{self.name}: [{base}+{offset}]")
        return base

    def _memory(self, record, line):
        """extra: space, bytes of an element, bits of its registers (signed: < 0) and base."""
        parts, operands = line.parts, line.operands
        kind = parts[0]
        if kind == "cp" or parts[:2] == ["st", "async"] or kind == "mbarrier":
            return self._asynchronous(record, line)
        space = next((part for part in parts if part in SPACES), None)
        if space is None:
            raise RefusedError(f"{self.name}: {'.'.join(parts)} without a space")
        type_ = parts[-1]
        bytes_ = int(BITS.match(type_)[1]) // 8
        record["extra"][:2] = SPACES[space], bytes_
        order = "".join("." + part for part in parts if part in ORDERS)
        if order and NARROW & {*parts}:  # says nothing to other blocks
            order = ".relaxed"
        if kind in ("ld", "st", "atom"):
            others = {*parts[1:-1]} - {*SPACES, *ORDERS, *NARROW, "gpu", "sys", "v2", "v4"}
            if others - ({"add", "max", "cas"} if kind == "atom" else set()):
                raise RefusedError(f"{self.name}: {'.'.join(parts)}")
        if kind in ("ldmatrix", "stmatrix"):
            data, address = operands if kind == "ldmatrix" else reversed(operands)
            self._address(record, address)
            places = [self._operand(one, 32) for one in data]
            if kind == "ldmatrix":
                record["d"][: len(data)] = places
            else:
                record["s"][1 : 1 + len(data)] = places
            return ".".join(part for part in parts if part not in ("shared", "shared::cta"))
        if kind == "atom":
            self._address(record, operands[1])
            record["d"][0] = self._operand(operands[0], 8 * bytes_)
            for i, one in enumerate(operands[2:]):
                record["s"][1 + i] = self._operand(one, 8 * bytes_)
            what = next(part for part in parts if part in ("add", "max", "cas"))
            return f"atom{order.replace('.relaxed', '')}.{what}.{type_}"
        data, address = operands if kind == "ld" else reversed(operands)
        data = data if isinstance(data, list) else [data]
        self._address(record, address)
        widths = [self.widths.get(one, max(16, 8 * bytes_)) for one in data]
        record["extra"][2] = -widths[0] if type_.startswith("s") else widths[0]
        places = [self._operand(one, width) for one, width in zip(data, widths, strict=True)]
        if kind == "ld":
            record["d"][: len(places)] = places
        else:
            record["s"][1 : 1 + len(places)] = places
        return f"{kind}{order}.v{len(data)}"

    def _asynchronous(self, record, line):
        parts, operands = line.parts, line.operands
        if parts[:2] == ["st", "async"]:
            data = operands[1] if isinstance(operands[1], list) else [operands[1]]
            self._address(record, operands[0])
            record["s"][1] = self._operand(self._plain(operands[2]), 32)
            record["s"][2 : 2 + len(data)] = [self._operand(one, 32) for one in data]
            return f"st.async.v{len(data)}.{parts[-1]}"
        if parts[0] == "cp":
            for i, (one, width) in enumerate(zip(operands[:4], (32, 64, 32, 32), strict=True)):
                name = self._plain(one) if isinstance(one, tuple) else one
                record["s"][i] = self._operand(name, width)
            return ".".join(part for part in parts if "::" not in part)
        at = next(i for i, one in enumerate(operands) if isinstance(one, tuple))
        self._address(record, operands[at])
        if at and operands[0] != "_":
            record["d"][0] = self._operand(operands[0], 64)
        for i, one in enumerate(operands[at + 1 :]):
            record["s"][1 + i] = self._operand(one, 32)
        return ".".join(part for part in parts if "::" not in part)
