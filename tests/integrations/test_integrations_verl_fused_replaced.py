"""verl's modules with fastrl's fused functions in place: replaced when verl imports them."""

import importlib
import importlib.util
import sys
import types

import pytest
import torch

from fastrl.integrations import verl as ours
from fastrl.integrations.replacing import Replaced
from fastrl.integrations.verl.fused_linear import (
    REPLACEMENTS,
    FusedLinearForPPO,
    linear_cross_entropy,
)
from tests.support.importable import importable, without_modules
from tests.support.verl_fused_formulas import fused, fused_inputs, gradients

FUSED = "verl.utils.experimental.torch_functional"
KERNEL = "verl.utils.kernel.linear_cross_entropy"

PACKAGE = {
    "__init__": "__version__ = '0.9.7'",
    "utils/experimental/torch_functional": """
        import torch

        class FusedLinearForPPO(torch.nn.Module):
            def __init__(self, chunk_size=512):
                super().__init__()

            def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
                return "theirs"
        """,
    "utils/kernel/linear_cross_entropy": """
        import torch

        class LinearCrossEntropy(torch.autograd.Function):
            @staticmethod
            def forward(
                ctx, hidden, weight, labels, temperature=1.0, reduction="none",
                dist_process_group=None,
            ):
                return hidden

        linear_cross_entropy = LinearCrossEntropy.apply
        """,
    "models/forward": """
        def torch_backend(*args):
            from verl.utils.experimental.torch_functional import FusedLinearForPPO
            return FusedLinearForPPO().forward(*args)

        def triton_backend(*args):
            from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
            return linear_cross_entropy(*args)
        """,
    "models/megatron": "from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy",
}


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package with verl's modules of these names, as files that are not imported yet."""
    without_modules(monkeypatch, "verl")
    for path, text in PACKAGE.items():
        file = tmp_path / "verl" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip())
        file.write_text("\n".join(line[indent:] for line in lines))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path / "verl"
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def replaced():
    importlib.import_module("verl")
    return Replaced("verl", REPLACEMENTS)


def test_modules_are_replaced_when_verl_imports_them(package):
    del package
    with replaced() as handle:
        assert handle.names == ()
        assert FUSED not in sys.modules
        forward = importlib.import_module("verl.models.forward")
        hidden, weight, labels, _ = fused_inputs(5, 16, 33)
        for run in (forward.torch_backend, forward.triton_backend):
            found, expected = run(hidden, weight, labels, 0.7), fused(hidden, weight, labels, 0.7)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a.double().flatten(), b, rtol=1e-5, atol=1e-5)
        megatron = importlib.import_module("verl.models.megatron")
        assert megatron.linear_cross_entropy is linear_cross_entropy
        assert set(handle.names) == {
            f"{FUSED}.FusedLinearForPPO.forward",
            f"{KERNEL}.linear_cross_entropy",
        }
    kernel = sys.modules[KERNEL]
    assert megatron.linear_cross_entropy is kernel.linear_cross_entropy
    assert kernel.linear_cross_entropy.__self__ is kernel.LinearCrossEntropy
    assert forward.torch_backend(hidden, weight, labels) == "theirs"


def test_modules_that_verl_has_imported_are_replaced_at_once(package):
    del package
    own = importlib.import_module(FUSED).FusedLinearForPPO
    before = own.forward, own()
    handle = replaced()
    assert handle.names == (f"{FUSED}.FusedLinearForPPO.forward",)
    assert own.forward is FusedLinearForPPO.forward  # also for instances that exist already
    with pytest.raises(RuntimeError, match="runs on fastrl already"):
        replaced()
    assert own.forward is FusedLinearForPPO.forward
    handle.undo()
    assert vars(own)["forward"] is before[0]
    assert before[1](None, None, None) == "theirs"


def test_a_module_that_is_executed_again(package):
    del package
    with replaced() as handle:
        # a copy of the caller's own, which is not the module that verl imports
        spec = importlib.util.find_spec(FUSED)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        assert copy.FusedLinearForPPO()(None, None, None) == "theirs"
        assert handle.names == ()
        forwards = []
        module = importlib.import_module(FUSED)
        for _ in range(2):
            module = importlib.reload(module)
            forwards.append(module.FusedLinearForPPO)
            assert module.FusedLinearForPPO.forward is FusedLinearForPPO.forward
        assert handle.names == (f"{FUSED}.FusedLinearForPPO.forward",)
    assert {own()(None, None, None) for own in forwards} == {"theirs"}


def test_after_undo_nothing_more_is_replaced(package):
    del package
    finders = list(sys.meta_path)
    replaced().undo()
    assert sys.meta_path == finders
    own = importlib.import_module(FUSED).FusedLinearForPPO
    assert own()(None, None, None) == "theirs"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "utils/kernel/linear_cross_entropy",
            ("labels,", "labels, weights,"),
            r"linear_cross_entropy of verl 0.9.7 takes \(hidden, weight, labels, weights, ",
        ),
        (
            "utils/experimental/torch_functional",
            ("temperature=1.0", "temperature=1.0, mask=None"),
            r"FusedLinearForPPO.forward of verl 0.9.7 takes .*mask=None\), fastrl expects",
        ),
    ],
)
def test_other_parameters_are_refused_when_verl_imports_them(package, file, change, message):
    path = package / f"{file}.py"
    path.write_text(path.read_text().replace(*change))
    name = f"verl.{file.replace('/', '.')}"
    with replaced():
        with pytest.raises(NotImplementedError, match=message):
            importlib.import_module(name)
        assert name not in sys.modules
    importlib.import_module(name)


def test_a_verl_without_the_class(package):
    (package / "utils/experimental/torch_functional.py").write_text("")
    importlib.import_module("verl")
    with replaced() as handle:
        importlib.import_module(FUSED)
        assert handle.names == ()


FORWARDS = {"torch": "torch", "liger": "torch", "triton": "triton"}


@pytest.mark.skipif(importable(FUSED) is None, reason="needs verl itself")
@pytest.mark.parametrize("backend", FORWARDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_forward_of_a_model_that_verl_has_patched(backend, tied):
    import transformers

    dense = importlib.import_module("verl.models.transformers.dense_common")
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2
    )
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    ids = torch.randint(97, (2, 11))
    torch.manual_seed(1)
    upstream = torch.randn(22), torch.randn(22)

    def run(kind):
        model._verl_fused_kernels_backend = "liger" if backend == "liger" else "torch"
        forward = getattr(dense, f"forward_with_{kind}_backend")
        out = forward(model, input_ids=ids, temperature=0.7, return_dict=True, use_cache=False)
        outputs = out.log_probs.flatten(), out.entropy.flatten()
        return outputs, gradients(outputs, upstream, list(model.parameters()))

    expected = run("torch")
    with ours.use_fastrl():
        found = run(FORWARDS[backend])
    for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert isinstance(importlib.import_module(KERNEL).linear_cross_entropy, types.MethodType)
