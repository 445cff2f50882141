"""The text of PTX: kernels, statements, operands."""

import functools
import re

#: The bits of a type, and whether it is a pair.
BITS = re.compile(r"[a-z]+(\d+)(x2)?$")


@functools.cache
def entries(ptx):
    """Return the text of each kernel by name, and the source files by number."""
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M)}
    found = re.finditer(r"\.entry\s+(\S+)\((.*?)\)(.*?)\n\{\n(.*?)\n\}", ptx, re.S)
    return {one[1]: (one[2], one[4]) for one in found}, files


def parameters_of(text):
    """Return offset, bytes and type of each parameter."""
    found, at = [], 0
    for line in filter(None, (part.strip() for part in text.split(",\n"))):
        kind = re.search(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)", line)
        count = re.search(r"\[(\d+)\]$", line)
        bytes_ = int(BITS.match(kind[2])[1]) // 8
        align = int(kind[1] or bytes_)
        at = -(-at // align) * align
        size = int(count[1]) * bytes_ if count else bytes_
        found.append((at, size, kind[2]))
        at += size
    return found


def statements(body):
    """Yield instructions, labels, braces and directives, without comments."""
    for raw in body.splitlines():
        line = raw.split("//", 1)[0].strip()
        while line:
            label = re.match(r"([$\w]+:)(?=\s|$)", line)
            if label:
                yield label[1]
                line = line[label.end() :].strip()
            elif line[0] in "{}":
                yield line[0]
                line = line[1:].strip()
            else:
                one, _, line = line.partition(";")
                yield one.strip()
                line = line.strip()


def operands_of(text):
    """Split the operands: names, lists of names, and addresses as (base, offset)."""
    found = []
    for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,\[{]*", text):
        one = one.strip()
        if one.startswith("{"):
            found.append([name.strip() for name in one[1:-1].split(",")])
        elif one.startswith("["):
            base, _, offset = one[1:-1].replace(" ", "").partition("+")
            found.append((base, int(offset or "0", 0)))
        elif one:
            found.append(one.replace(" ", ""))
    return found


def renamed(operand, local):
    if isinstance(operand, list):
        return [local.get(one, one) for one in operand]
    if isinstance(operand, tuple):
        return (local.get(operand[0], operand[0]), operand[1])
    return local.get(operand, operand)


def names_of(line):
    """Yield the registers of a line, once each."""
    seen = [line.guard] if line.guard else []
    for operand in line.operands:
        if isinstance(operand, list):
            seen += operand
        elif isinstance(operand, tuple):
            seen.append(operand[0])
        else:
            seen += operand.split("|")
    return dict.fromkeys(seen)
