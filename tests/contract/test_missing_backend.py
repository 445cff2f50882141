"""Without a compiled backend, plain PyTorch computes, and one warning says what is missing."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fastrl import native

SETUP = """
import importlib.metadata, sys, warnings
sys.modules["fastrl._C"] = None  # as if it were not there
importlib.metadata.distributions = lambda **options: []
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    import fastrl, torch
    assert caught == []
    logits, ids = torch.randn(2, 5), torch.tensor([0, 3])
    row = torch.ones(1, 2)
"""
SHOW = """
for one in caught:
    if one.category is fastrl.MissingBackendWarning:
        print(one.filename, one.message)
"""
CALLS = {
    "two functions": "fastrl.token_logprobs(logits, ids); fastrl.gae(row, row, row)",
    "a loss in python": "fastrl.logits_policy_loss("
    "logits[None], ids[None], row[0, :1], row, objective=lambda new, old, ref, a: -new * a)",
}
#: What no missing backend would run: compiled calls choose in the trace, no kernel takes float64 or
#: tensors on meta, and the last two choose plain PyTorch.
SILENT = """
    torch.compile(fastrl.token_logprobs, fullgraph=True, backend="eager")(logits, ids)
    fastrl.token_logprobs(logits.double(), ids)
    fastrl.backend.resolve("auto", torch.device("meta"), torch.float32)
    fastrl.token_logprobs(logits, ids, backend="reference")
    fastrl.set_backend("reference")
    fastrl.token_logprobs(logits, ids)
"""


def printed(calls):
    code = f"{SETUP}    {calls.strip()}\n{SHOW}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", CALLS)
def test_the_first_call_says_what_is_missing(what):
    (line,) = printed(CALLS[what])
    assert line.startswith(
        "<string> fastrl computes on cpu with plain PyTorch"
    )  # the caller's line
    assert "cpu: the compiled extension is not built: install a C++ compiler" in line
    assert "FASTRL_BUILD=cpu pip install" in line


def test_a_call_that_no_missing_backend_would_run_says_nothing():
    assert printed(SILENT) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_gpu_both_backends_are_named():
    (line,) = printed("fastrl.backend.resolve('auto', torch.device('cuda'), torch.bfloat16)")
    assert "on cuda with plain PyTorch" in line
    assert "triton: " in line
    assert "; cuda: " in line


@pytest.mark.parametrize(
    ("supported", "reason"),
    [(12080, "compiled with CUDA 13, and the NVIDIA driver supports CUDA 12.8"), (13000, None)],
)
def test_a_driver_older_than_the_cuda_extension_is_named(supported, reason, monkeypatch):
    def ask(pointer):
        pointer._obj.value = supported

    driver = types.SimpleNamespace(cuDriverGetVersion=ask)
    monkeypatch.setattr(native.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    extension = types.SimpleNamespace(CUDART_VERSION=13000)
    monkeypatch.setitem(sys.modules, "fastrl._C_cuda", extension)
    found = native._driver_too_old()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("editable", [True, False])
def test_a_checkout_that_hides_a_compiled_installation_is_named(tmp_path, monkeypatch, editable):
    installed, metadata = tmp_path / "installed", tmp_path / "fastrl_kernels-0.1.0.dist-info"
    (installed / "fastrl").mkdir(parents=True)
    (installed / "fastrl" / "_C.abi3.so").touch()
    if not editable:
        metadata = installed / metadata.name
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: fastrl-kernels\nVersion: 0.1.0\n")
    if editable:
        origin = {"url": installed.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    found = [importlib.metadata.PathDistribution(metadata)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found)
    # an editable installation finds its own module for this package
    spec = types.SimpleNamespace(origin=str(installed / "fastrl" / "_C.abi3.so"))
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: spec)
    said = native._load("fastrl._C", "a C++ compiler", "FASTRL_BUILD=cpu")
    here = Path(native.__file__).parent
    assert said == (
        f"{here} has no compiled extension and hides the installed fastrl in {installed}/fastrl, "
        "which has one: run Python in another folder, or `pip install --no-build-isolation -e .` "
        f"in {here.parent}"
    )
    shutil.rmtree(installed / "fastrl")
    said = native._load("fastrl._C", "a C++ compiler", "FASTRL_BUILD=cpu")
    assert said.endswith(
        "install a C++ compiler, then `FASTRL_BUILD=cpu pip install --no-build-isolation -e .` in "
        f"{here.parent}"
    )


def test_a_torch_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    said = native._load("fastrl._C", "a C++ compiler", "FASTRL_BUILD=cpu")
    assert said == "fastrl needs torch 2.10 or later, and this is torch 2.9.1+cpu"
    (needed,) = [one for one in _requirements() if one.startswith("torch")]
    assert needed == "torch>=2.10"


def _requirements():
    text = (Path(native.__file__).parents[1] / "pyproject.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("dependencies = ")]
    return json.loads(line.removeprefix("dependencies = "))
