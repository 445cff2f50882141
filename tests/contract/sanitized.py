"""Cases of the fuzzer on the CPU backend under AddressSanitizer and UndefinedBehaviorSanitizer.

They run in a separate process, which loads the runtime of AddressSanitizer before anything else. It
sees every step beyond a tensor that owns its memory.
"""

import collections
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ptx import machine
from tests.ptx.cuda_operators import ROOT

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-shared", "-fPIC"]
OF_TORCH = [
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    *(f"-isystem{path}" for path in cpp_extension.include_paths()),
    f"-isystem{sysconfig.get_path('include')}",
]
LIBRARIES = [f"-L{path}" for path in cpp_extension.library_paths()]
LIBRARIES += ["-ltorch", "-ltorch_cpu", "-lc10"]


def run(cases, first=0, **environment):
    """Run cases that give each tensor which an operator takes; optional ones are None in others.

    No tensor is named here: the schemas say which there are.
    """

    def asked(option):
        done = subprocess.run(
            [machine.COMPILER, option], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    # C++ throws through the runtime of AddressSanitizer, which looks for the real one at its start
    runtimes = [asked(f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
    if sys.platform != "linux" or "clang" in asked("--version"):
        pytest.skip("Python loads the runtime of AddressSanitizer as GCC has it, on Linux")
    if not (shutil.which(machine.COMPILER) and all(map(os.path.isabs, runtimes))):
        assert not os.environ.get("CI"), (
            "the compiler comes without the libraries of its sanitizers"
        )
        pytest.skip("the compiler comes without the libraries of its sanitizers")
    options = {"LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(cpu_extension()), str(first), str(cases)],
        env={**os.environ, **options, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    *_, last = re.split(r"^(?=Case\()", done.stderr, flags=re.MULTILINE)  # and what it led to
    assert done.returncode == 0, last[:6000]


def cpu_extension():
    """Compile fastrl._C and return the file; half a minute on two cores."""
    csrc = ROOT / "csrc"
    headers = [*csrc.glob("*.h"), *(csrc / "cpu").rglob("*.h")]
    sources = [csrc / "bind.cpp", *sorted((csrc / "cpu").rglob("*.cpp"))]
    # what setup.py has; -O1 since gcc 12 cannot compile the vector code without optimisation
    command = [machine.COMPILER, *FLAGS, "-O1", "-g1", "-std=c++17"]
    command += ["-ffp-contract=fast", "-fno-math-errno", *OF_TORCH]

    def compiled(source):
        whole = [*command, "-c", str(source)]
        return machine.compiled(f"cpu-{source.stem}", whole, [*headers, source])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    link = [machine.COMPILER, *FLAGS, *map(str, objects), *LIBRARIES]
    return machine.compiled("cpu", link, objects)


def tensors_of(schema):
    """Return the arguments that are tensors: their places, names, and whether they may be None."""
    name = schema.name.partition("::")[2].rstrip("_")  # in place or not, the kernel is the same
    for place, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type):
            yield place, f"{name}.{argument.name}", "Optional" in str(argument.type)


class OperatorArguments(TorchDispatchMode):
    """Notes which tensors the operators are given."""

    def __init__(self):
        super().__init__()
        self.seen = collections.defaultdict(set)

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        if operator.namespace == "fastrl":
            for place, name, _ in tensors_of(operator._schema):
                given = args[place] is not None
                self.seen[name].add(given)
                if name == "logits_policy_loss_fwd.mask":  # which no function leaves out
                    logits = args[0].clone(memory_format=torch.contiguous_format)
                    ignore_index, _, *others = args[place + 1 :]  # temperatures may be masked
                    ids = torch.zeros_like(args[1])
                    operator(logits, ids, None, ignore_index, None, *others)
                    self.seen[name].add(False)
        return operator(*args, **(kwargs or {}))


def wanted():
    """Return the tensors that the operators take, and whether they may be None."""
    from fastrl import library, native

    unused = [*library.ONLY_ON_GPUS]
    unused += [] if native.has_matrix_tiles() else ["mixed_matmul_"]
    names = [name for name in library.OPERATORS if not name.startswith(tuple(unused))]
    space = library.operators("cpu")
    schemas = [getattr(space, name).default._schema for name in names]
    return {name: optional for schema in schemas for _, name, optional in tensors_of(schema)}


def main(built, first, cases):
    torch.ops.load_library(built)
    spec = importlib.machinery.ModuleSpec("fastrl._C", None, origin=str(ROOT / "fastrl" / "_C"))
    sys.modules["fastrl._C"] = importlib.util.module_from_spec(spec)
    import fastrl
    from tests.calls.case import Case
    from tests.calls.combined import assert_value
    from tests.contract.operator_calls import divergence_calls, gathered_calls
    from tests.fuzz.run import Run, perform

    run = Run(int(cases), 20260923, int(first), "cpu", shrink=False)
    with OperatorArguments() as arguments:
        tokens = [torch.zeros(5, dtype=torch.float64)] * 4
        torch.ops.fastrl.objective_eval(*tokens, *fastrl.Objective().arguments)  # for tests
        gathered_calls("cpu")  # which other operators make, unseen
        divergence_calls("cpu")
        # weights of every term, which few cases have
        terms = {"entropy_aggregation": "token-sum", "kl_aggregation": "token-sum"}
        fields = {"entropy_coef": 0.1, "kl_coef": 0.1, **terms}
        case = Case("logits_policy_loss", tokens=3, vocabulary=5, ref="near", fields=fields)
        assert_value("cpu", case)
        report = perform(run, before=lambda case: sys.stderr.write(f"{case}\n"))
    if report.failures:
        sys.exit(str(report))
    asked = wanted().items()
    never = [name for name, _ in asked if True not in arguments.seen[name]]
    always = [name for name, optional in asked if optional and False not in arguments.seen[name]]
    if never or always:
        sys.exit(f"never given: {never}; always given, but optional: {always}")


if __name__ == "__main__":
    main(*sys.argv[1:])
