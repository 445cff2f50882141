"""Compiles the machine of machine.h and launches kernels on it, on CPU tensors.

`machine()` may be asked for at any time; tensors made before are known to it only as arguments.
"""

import collections
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils import cpp_extension

from tests.ptx.decode import decode

FOLDER = Path(__file__).parent
BUILT = FOLDER.parents[1] / "build" / "ptx"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC"]
TORCH = [f"-isystem{path}" for path in cpp_extension.include_paths()]
LIBRARIES = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10"]
#: How a parameter is packed.
PACKED = {"f32": "f", "f64": "d"}
PACKED |= {f"{kind}{8 << n}": code for kind in ("b", "u") for n, code in enumerate("BHIQ")}
PACKED |= {f"s{8 << n}": code for n, code in enumerate("bhiq")}


class PtxError(RuntimeError):
    """A kernel did what a kernel must not do."""


class _Kernel(ctypes.Structure):
    _fields_ = [(name, kind) for name, kind in (
        ("code", ctypes.c_void_p), ("length", ctypes.c_int32), ("register_bytes", ctypes.c_int32),
        ("constants", ctypes.c_void_p))]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [(name, kind) for name, kind in (
        ("kernel", ctypes.POINTER(_Kernel)), ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32), ("cluster", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32), ("parameters", ctypes.c_char_p),
        ("seed", ctypes.c_uint64), ("executed", ctypes.c_void_p),
        ("resident", ctypes.c_int32))]  # fmt: skip


class Counts(ctypes.Structure):
    """What a launch has cost; sectors are of 32 bytes, counted once for each access of a warp.

    The different ones count once in a launch: what memory moves where caches hold the rest.
    `by_kind` has how many instructions of each kind the warps ran.
    """

    _fields_ = [(name, ctypes.c_uint64) for name in (
        "sectors_read", "sectors_written", "requests", "bank_conflicts",
        "shared_accesses", "async_bytes_in_flight", "different_sectors_read",
        "different_sectors_written")]  # fmt: skip


@contextlib.contextmanager
def one_process():
    """Let one process compile at a time: the next one finds what it needs."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def place_of(name, command, sources):
    """Return where the file is kept that a command makes of these very sources."""
    digest = hashlib.sha256(" ".join([torch.__version__, *map(str, command)]).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    BUILT.mkdir(parents=True, exist_ok=True)
    return BUILT / f"{name}-{digest.hexdigest()[:16]}"


def compiled(name, command, sources):
    """Run a compiler unless it has run so on the very same sources; return the file it made."""
    target = place_of(name, command, sources)
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [*command, "-o", partial], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
        partial.rename(target)
    return target


class Machine:
    """The machine: its seed, and the name and `Counts` of the last launches."""

    def __init__(self):
        headers = sorted(FOLDER.glob("*.h"))

        def compile_one(source):
            command = [COMPILER, *FLAGS, *TORCH, "-c", str(source)]
            return compiled(source.stem, command, [source, *headers])

        with one_process(), ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sorted(FOLDER.glob("*.cpp"))))
            command = [COMPILER, "-shared", *map(str, objects), *LIBRARIES]
            library = compiled("machine", command, [])
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.library.ptx_operation.restype = ctypes.c_char_p
        names = map(self.library.ptx_operation, itertools.count())
        self.operations = [name.decode() for name in itertools.takewhile(bool, names)]
        self.library.ptx_keep_tensors()
        self.seed = int(os.environ.get("FASTRL_PTX_SEED", "0"))
        self.counts = collections.deque(maxlen=100)
        self.launched = set()
        self._decoded = {}

    def kernel(self, ptx, name):
        if (ptx, name) not in self._decoded:
            found = decode(ptx, name, self.operations)
            code, constants = (x.ctypes.data for x in (found.records, found.constants))
            entry = _Kernel(code, len(found.records), found.register_bytes, constants)
            self._decoded[ptx, name] = found, entry
        return self._decoded[ptx, name]

    def launch(self, ptx, name, grid, threads, parameters, cluster=1, shared=0):
        """Run a kernel on packed parameters, or on values in order."""
        kernel, entry = self.kernel(ptx, name)
        self.launched.add(name)
        if not isinstance(parameters, bytes):
            parameters = self._packed(kernel, parameters)
        resident = (1, 2, 3, 8)[self.seed % 4]
        executed = np.zeros(len(kernel.records), np.uint64)
        given = _Launch(
            ctypes.pointer(entry), grid, threads, cluster, shared, parameters, self.seed,
            executed.ctypes.data, resident,
        )  # fmt: skip
        counts, message = Counts(), ctypes.create_string_buffer(2000)
        if not np.prod(grid):
            return
        if self.library.ptx_run(ctypes.byref(given), ctypes.byref(counts), message, len(message)):
            place, what, where = message.value.decode().split("|", 2)
            number, line = map(int, place.split(":"))
            file = kernel.files[number] if number < len(kernel.files) else ""
            raise PtxError(
                f"{name}: {what} ({where}; {os.path.basename(file)}:{line}; seed {self.seed})"
            )
        found = np.bincount(kernel.records["operation"], executed, len(self.operations))
        counts.by_kind = {self.operations[n]: int(found[n]) for n in found.nonzero()[0]}
        self.counts.append((name, counts))

    def _packed(self, kernel, values):
        data = bytearray(kernel.parameter_bytes)
        for (at, _, kind), value in zip(kernel.parameters, values, strict=True):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.library.ptx_tensor(
                    ctypes.c_uint64(storage.data_ptr()), ctypes.c_uint64(storage.nbytes())
                )
                value = value.data_ptr()
            code = PACKED[kind]
            if code in "BHIQ":
                value = int(value or 0) % 2 ** (8 * struct.calcsize(code))
            struct.pack_into(f"<{code}", data, at, value)
        return bytes(data)


@functools.cache
def machine():
    return Machine()
