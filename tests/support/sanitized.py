"""Cases of the fuzzer on kernels built under AddressSanitizer and UndefinedBehaviorSanitizer.

They run in a separate process, which loads the runtime of AddressSanitizer before anything else. It
sees every step beyond a tensor that owns its memory.
"""

import collections
import os
import re
import subprocess
import sys
import sysconfig
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import cuda_host
from tests.support.cuda_host import COMPILER, ROOT, SANITIZERS, SHARED

LIBRARIES = ("vocabulary", "policy_loss", "sequence_weights", "scale", "gae", "group_advantages")
SANITIZED = [*SANITIZERS["address"], *SHARED]


def run(backend, cases, first=0, **environment):
    """Run cases on the backend `cpu` or `cuda` that give every pointer which a kernel takes.

    Optional ones are null in others. No such pointer is named here: they are read from the schemas
    of the operators and from the structs of the launches.
    """

    def asked(option):
        done = subprocess.run([COMPILER, option], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    # C++ throws through the runtime of AddressSanitizer, which looks for the real one at its start
    runtimes = [asked(f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
    if sys.platform != "linux" or "clang" in asked("--version"):
        pytest.skip("Python loads the runtime of AddressSanitizer as GCC has it, on Linux")
    if not all(map(os.path.isabs, runtimes)):
        cuda_host.cannot_run("the compiler comes without the libraries of its sanitizers")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = cpu_extension(pool) if backend == "cpu" else cuda_libraries(pool)
    options = {"LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, backend, built, str(first), str(cases)],
        env={**os.environ, **options, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    *_, last = re.split(r"^(?=Case\()", done.stderr, flags=re.MULTILINE)  # and what it led to
    assert done.returncode == 0, last[:6000]


def cpu_extension(pool):
    """Compile fastrl._C and return the file; half a minute on two cores."""
    csrc = ROOT / "csrc"
    headers = [*csrc.glob("*.h"), *(csrc / "cpu").rglob("*.h")]
    sources = [csrc / "bind.cpp", *sorted((csrc / "cpu").rglob("*.cpp"))]
    # what setup.py has; -O1 since gcc 12 cannot compile the vector code without optimisation
    command = [COMPILER, *SANITIZED, "-O1", "-g1", "-std=c++17", "-fvisibility=hidden"]
    command += ["-ffp-contract=fast", "-fno-math-errno"]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    command += [f"-isystem{path}" for path in includes]

    def compiled(source):
        whole = [*command, "-c", str(source)]
        return cuda_host.compiled(f"cpu-{source.stem}", whole, [*headers, source])

    objects = list(pool.map(compiled, sources))
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    link = [COMPILER, *SANITIZED, *map(str, objects), *libraries, "-ltorch", "-ltorch_cpu", "-lc10"]
    return str(cuda_host.compiled("cpu", link, []))


def cuda_libraries(pool):
    list(pool.map(lambda name: cuda_host.compile_host(name, *SANITIZED), LIBRARIES))
    return ""


def tensors_of(schema):
    """Return the arguments that are tensors: their places, names, and whether they may be None."""
    name = schema.name.partition("::")[2].rstrip("_")  # in place or not, the kernel is the same
    for place, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type):
            yield place, f"{name}.{argument.name}", "Optional" in str(argument.type)


class OperatorArguments(TorchDispatchMode):
    """Notes which tensors the operators are given."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        if operator.namespace in ("fastrl", "fastrl_cuda"):
            for place, name, _ in tensors_of(operator._schema):
                given = args[place] is not None
                self.seen[name].add(given)
                if name == "logits_policy_loss_fwd.mask":  # which no function leaves out
                    logits = args[0].clone(memory_format=torch.contiguous_format)
                    operator(logits, torch.zeros_like(args[1]), None, *args[place + 1 :])
                    self.seen[name].add(False)
        return operator(*args, **(kwargs or {}))


def cpu_pointers():
    """Return the tensors that the kernels of the CPU backend take, and whether they may be None."""
    from fastrl import library, native

    unused = [*library.IN_PYTHON, *library.ONLY_ON_GPUS]
    unused += [] if native.has_matrix_tiles() else ["mixed_matmul_"]
    operators = [name for name in library.OPERATORS if not name.startswith(tuple(unused))]
    schemas = [getattr(torch.ops.fastrl, name).default._schema for name in operators]
    return {name: optional for schema in schemas for _, name, optional in tensors_of(schema)}


def cuda_pointers():
    """Return the pointers of the structs that CUDA kernels take, and whether they may be null."""
    from tests.support.cuda_structs import Struct

    parts = {kind for struct in Struct.__subclasses__() for _, kind in struct._fields_}
    return {
        f"{struct.__name__}.{path}": optional
        for struct in set(Struct.__subclasses__()) - parts
        for path, optional in struct.pointers().items()
    }


def main(backend, built, first, cases):
    seen = collections.defaultdict(set)

    def launched(params):
        given, optional = params.given(), params.pointers()
        if all(given[path] or optional[path] for path in given):  # else there are no tokens
            for path, is_given in given.items():
                seen[f"{type(params).__name__}.{path}"].add(is_given)

    if backend == "cpu":
        torch.ops.load_library(built)
        sys.modules["fastrl._C"] = types.ModuleType("fastrl._C")
    import fastrl
    from tests.fuzz.run import Run, lines_of, perform
    from tests.support import cuda_on_host

    run = Run(int(cases), 20260923, int(first), backend, shrink=False)
    operators = cuda_on_host.register() if backend == "cuda" else None
    with OperatorArguments(seen):
        if backend == "cuda":
            cuda_on_host.allow_on_a_cpu(dict.__setitem__, setattr)
            cuda_host.library_flags, cuda_host.launched = SANITIZED, launched
            # more tokens than cases have, and what a CPU tensor has no use for
            fastrl.gae(torch.randn(2, 701), torch.randn(2, 701), backend=backend)
            cuda_on_host.scale_(torch.randn(7, 1001), torch.tensor(0.5))
        else:  # an operator for tests
            tokens = [torch.zeros(5, dtype=torch.float64)] * 4
            torch.ops.fastrl.objective_eval(*tokens, *fastrl.Objective().arguments)
        report = perform(run, before=lambda index: sys.stderr.write(f"{run.case(index)}\n"))
    del operators
    # what CUDA kernels compute is compared elsewhere
    failures = [kind for kind in report.failures if backend == "cpu" or "raised" in kind[2]]
    if failures:
        sys.exit("\n".join(lines_of(report, run)))
    wanted = cpu_pointers() if backend == "cpu" else cuda_pointers()
    never = [name for name in wanted if True not in seen[name]]
    always = [name for name, optional in wanted.items() if optional and False not in seen[name]]
    if never or always:
        sys.exit(f"never given: {never}; always given, but optional: {always}")


if __name__ == "__main__":
    main(*sys.argv[1:])
