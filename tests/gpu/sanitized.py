"""Cases of the fuzzer on kernels built under AddressSanitizer and UndefinedBehaviorSanitizer.

They run in a separate process, which loads the runtime of AddressSanitizer before anything else. It
sees every step beyond a tensor that owns its memory.
"""

import collections
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu import host_build
from tests.gpu.host_build import COMPILER, LIBRARIES, OF_TORCH, ROOT, SANITIZERS, SHARED

FLAGS = SANITIZERS["address"]


def run(backend, cases, first=0, **environment):
    """Run cases on the backend `cpu` or `cuda` that give each tensor which an operator takes.

    Optional ones are None in others. No tensor is named here: the schemas say which there are.
    """

    def asked(option):
        done = subprocess.run([COMPILER, option], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    # C++ throws through the runtime of AddressSanitizer, which looks for the real one at its start
    runtimes = [asked(f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
    if sys.platform != "linux" or "clang" in asked("--version"):
        pytest.skip("Python loads the runtime of AddressSanitizer as GCC has it, on Linux")
    if not all(map(os.path.isabs, runtimes)):
        host_build.cannot_run("the compiler comes without the libraries of its sanitizers")
    built = cpu_extension() if backend == "cpu" else host_build.compile_operators(*FLAGS)
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


def cpu_extension():
    """Compile fastrl._C and return the file; half a minute on two cores."""
    csrc = ROOT / "csrc"
    headers = [*csrc.glob("*.h"), *(csrc / "cpu").rglob("*.h")]
    sources = [csrc / "bind.cpp", *sorted((csrc / "cpu").rglob("*.cpp"))]
    # what setup.py has; -O1 since gcc 12 cannot compile the vector code without optimisation
    command = [COMPILER, *FLAGS, *SHARED, "-O1", "-g1", "-std=c++17"]
    command += ["-ffp-contract=fast", "-fno-math-errno", *OF_TORCH]

    def compiled(source):
        whole = [*command, "-c", str(source)]
        return host_build.compiled(f"cpu-{source.stem}", whole, [*headers, source])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    link = [COMPILER, *FLAGS, *SHARED, *map(str, objects), *LIBRARIES]
    return host_build.compiled("cpu", link, [])


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
        if operator.namespace in ("fastrl", "fastrl_cuda"):
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


def wanted(backend):
    """Return the tensors that the operators of a backend take, and whether they may be None."""
    from fastrl import library, native

    if backend == "cuda":
        every = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fastrl_cuda::")]
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        names = [n.partition("::")[2] for n in every if has_kernel(n, "CPU")]
    else:
        unused = [*library.IN_PYTHON, *library.ONLY_ON_GPUS]
        unused += [] if native.has_matrix_tiles() else ["mixed_matmul_"]
        names = [name for name in library.OPERATORS if not name.startswith(tuple(unused))]
    space = library.operators(backend)
    schemas = [getattr(space, name).default._schema for name in names]
    found = {name: optional for schema in schemas for _, name, optional in tensors_of(schema)}
    if backend == "cuda":
        del found["sequence_weights.group_ids"]  # which come in order
    return found


def main(backend, built, first, cases):
    torch.ops.load_library(built)
    if backend == "cpu":
        sys.modules["fastrl._C"] = types.ModuleType("fastrl._C")
    import fastrl
    from tests.contract.operator_calls import divergence_calls, gathered_calls
    from tests.fuzz.run import Run, perform
    from tests.gpu import on_host

    run = Run(int(cases), 20260923, int(first), backend, shrink=False)
    with OperatorArguments() as arguments:
        if backend == "cuda":
            on_host.allow_on_a_cpu(dict.__setitem__, setattr)
            # more tokens than cases have, and what a CPU tensor has no use for
            fastrl.gae(torch.randn(2, 701), torch.randn(2, 701), backend=backend)
            fastrl.library.operators(backend).scale_(torch.randn(7, 1001), torch.tensor(0.5))
        else:  # an operator for tests
            tokens = [torch.zeros(5, dtype=torch.float64)] * 4
            torch.ops.fastrl.objective_eval(*tokens, *fastrl.Objective().arguments)
            gathered_calls(backend)  # which other operators make, unseen
            divergence_calls(backend)
        # weights of every term, which few cases have
        leaf, ids = torch.randn(1, 3, 5, requires_grad=True), torch.zeros(1, 3, dtype=torch.int64)
        terms = {"entropy_aggregation": "token-sum", "kl_aggregation": "token-sum"}
        objective = fastrl.Objective(entropy_coef=0.1, kl_coef=0.1, **terms)
        options = {"ref_logprobs": torch.zeros(1, 3), "objective": objective, "backend": backend}
        fastrl.logits_policy_loss(leaf, ids, torch.ones(1), torch.ones(1, 3), **options)
        report = perform(run, before=lambda case: sys.stderr.write(f"{case}\n"))
    # what CUDA kernels compute is compared elsewhere
    failures = [kind for kind in report.failures if backend == "cpu" or "raised" in kind[2]]
    if failures:
        sys.exit(str(report))
    asked = wanted(backend).items()
    never = [name for name, _ in asked if True not in arguments.seen[name]]
    always = [name for name, optional in asked if optional and False not in arguments.seen[name]]
    if never or always:
        sys.exit(f"never given: {never}; always given, but optional: {always}")


if __name__ == "__main__":
    main(*sys.argv[1:])
