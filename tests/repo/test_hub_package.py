"""The package for Hugging Face `kernels`, generated and loaded without a network."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrl
from tests.integrations.packages import needed

ROOT = Path(__file__).parents[2]
GENERATE = [sys.executable, str(ROOT / "bench" / "hub" / "generate.py")]

LOAD = """
import os, socket, sys
from operator import setitem
from pathlib import Path

def refuse(*_):
    raise OSError("this test has no network")

socket.getaddrinfo = socket.socket.connect = refuse
import kernels, torch
sys.modules["fastrl"] = None  # an import of it raises
hub = kernels.get_local_kernel(Path(sys.argv[1]))
torch.manual_seed(0)
ids, mask, row = torch.randint(300, (2, 5)), torch.ones(2, 5), torch.randn(2, 5)

def logprobs(package, backend):
    logits = torch.linspace(-4, 4, 3000).view(2, 5, 300).requires_grad_()
    value = package.token_logprobs(logits, ids, temperature=0.7, backend=backend)
    return value, *torch.autograd.grad((value * row).sum(), logits)
"""
EXECUTED = """
del sys.modules["fastrl"]
import fastrl
from tests.ptx import backends
for package in (fastrl, hub):
    module = sys.modules[package.__name__ + ".backend"]
    backends.use("triton", setitem, setattr, module)
given, expected = logprobs(hub, "triton"), logprobs(fastrl, "triton")
assert all(map(torch.equal, given, expected))
for x, y in zip(given, logprobs(fastrl, "reference")):
    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
assert {package.__name__ + ".triton.vocabulary.token_stats" for package in (fastrl, hub)} <= set(
    sys.modules
)
"""
IN_PLAIN_TORCH = """
def losses(package):
    hidden = torch.linspace(-1, 1, 80).view(2, 5, 8).requires_grad_()
    weight = torch.linspace(-1, 2, 2400).view(300, 8).requires_grad_()
    logits, taken = hidden @ weight.T, logprobs(package, "reference")[0]
    advantages = package.group_advantages(row[:, 0], group_size=2).advantages
    values = (
        package.gae(row, row, mask).advantages.sum(),
        package.policy_loss(taken, advantages, mask, old_logprobs=row - 6).loss,
        package.logits_policy_loss(logits, ids, advantages, mask).loss,
        package.linear_policy_loss(hidden, weight, ids, advantages, mask, objective="dapo").loss,
        package.linear_token_logprobs(hidden, weight, ids).sum(),
    )
    return *values, *torch.autograd.grad(sum(values), (hidden, weight))

given = losses(hub)
del sys.modules["fastrl"]
import fastrl
fastrl.set_backend("reference")
assert all(map(torch.equal, given, losses(fastrl)))
spaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
assert {hub.__name__, "fastrl", "fastrl_triton"} <= spaces
for named in (hub, fastrl):
    assert set(named.__all__) == set(fastrl.__all__)
    assert all(hasattr(named, name) for name in named.__all__)
try:
    hub.set_backend("cpu")
except ValueError as error:
    assert "Triton kernels alone" in str(error), error
else:
    raise AssertionError("there is no CPU backend in the package")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    needed("kernels")
    out = tmp_path_factory.mktemp("checkout") / "build" / "hub"
    subprocess.run([*GENERATE, str(out)], check=True, timeout=60)
    return out


def run(code, package):
    command = [sys.executable, "-W", "ignore", "-c", LOAD + code, str(package)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_its_kernels_compute_what_ours_do(package):
    run(EXECUTED, package)


def test_every_function_is_there_beside_an_installed_fastrl(package):
    run(IN_PLAIN_TORCH, package)


def test_its_card_lists_what_is_public_and_how_to_load_it(package):
    card = (package / "build" / "CARD.md").read_text()
    assert re.findall(r"^- `([a-zA-Z]\w*)`$", card, flags=re.MULTILINE) == [
        name for name in fastrl.__all__ if name != "__version__"
    ]
    assert 'get_kernel("REPOSITORY", version=0' in card
    assert "NAMES" not in card


def test_the_code_of_the_page_runs(package):
    page = (ROOT / "docs" / "hub.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    run(f"os.chdir({str(package.parents[1])!r})\n{code}assert fastrl.gae is hub.gae", package)


def test_it_imports_itself_relatively_and_else_only_torch_and_triton(package):
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    modules = sorted(package.glob("build/*/**/*.py"))
    assert len(modules) > 200
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            assert {name.partition(".")[0] for name in names} <= allowed, path


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_its_metadata_holds(package, backend):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    variant = package / "build" / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id.isidentifier()
    assert str(metadata.backend.backend_type) == backend
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert f'NAMESPACES = {{"triton": "{metadata.id}"}}' in (variant / "library.py").read_text()


@pytest.mark.filterwarnings("ignore:fastrl computes on cpu with plain PyTorch")
def test_its_benchmarks_agree_with_eager_torch(package, monkeypatch):
    from kernels.backends import CPU
    from kernels.cli.benchmark import discover_benchmark_classes, run_benchmark_class

    monkeypatch.setattr("kernels.cli.benchmark._backend", CPU)
    (script,) = package.glob("benchmarks/benchmark*.py")
    classes = discover_benchmark_classes(script, package)
    assert [one.__name__ for one in classes] == ["LinearPolicyLoss", "TokenLogprobs"]
    for one in classes:
        timings, _ = run_benchmark_class(one, 1, 0, str(package), True, "local")
        assert all(timing.verified for timing in timings.values())


def test_a_folder_with_files_is_left_alone(package):
    done = subprocess.run([*GENERATE, str(package)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "OUT must be a new or empty folder" in done.stderr
