"""The operators for TritonBench, on a stand-in of the part of its API that they use.

TritonBench is not on PyPI. The stand-in follows `tritonbench/utils/triton_op.py` of
meta-pytorch/tritonbench at db2155c: what is registered, and how a mode becomes a function.
"""

import enum
import importlib
import types
from pathlib import Path

import pytest
import torch

from tests.integrations.packages import stand_ins

OPERATORS = Path(__file__).parents[2] / "bench" / "hub" / "tritonbench"
Mode = enum.Enum("Mode", {"FWD": "fwd", "BWD": "bwd", "FWD_BWD": "fwd_bwd"})
#: Options for small tensors, and what the metric of the operator is for each pass.
CASES = {
    "token_logprobs": (["--T", "8", "--V", "50", "300"], "gbps"),
    "linear_policy_loss": (["--B", "2", "--T", "4", "8", "--H", "16", "--V", "50"], "flops"),
}


class BenchmarkOperator:
    DEFAULT_PRECISION = "bypass"

    def __init__(self, tb_args, extra_args):
        self.tb_args, self.extra_args, self.device = tb_args, extra_args, tb_args.device
        self.mode, self.dtype = Mode(tb_args.mode), {"bf16": torch.bfloat16}[self.DEFAULT_PRECISION]

    def accuracy(self, fn, baseline_fn):
        given = self.tb_args
        try:
            torch.testing.assert_close(fn(), baseline_fn(), rtol=given.rtol, atol=given.atol)
        except AssertionError:
            return False
        return True

    def function(self, name):
        forward = getattr(self, name)(*self.example_inputs)
        if self.mode is Mode.FWD:
            return forward
        backward = self.get_bwd_fn(forward)
        return backward if self.mode is Mode.BWD else lambda: (forward(), backward())


def given(mode):
    return types.SimpleNamespace(mode=mode, device="cpu", rtol=None, atol=None)


@pytest.fixture
def load(monkeypatch):
    """A function that imports an operator; it returns the class and what was registered."""
    found = types.SimpleNamespace(benchmarks={}, metrics=[], labels=[])

    def register_benchmark(baseline=False, enabled=True):
        return lambda function: found.benchmarks.update({function.__name__: baseline}) or function

    def register_metric():
        return lambda function: found.metrics.append(function.__name__) or function

    def register_x_val(label):
        return lambda function: found.labels.append(label) or function

    api = (BenchmarkOperator, register_benchmark, register_metric, register_x_val)
    held = {"tritonbench.utils.triton_op": {one.__name__: one for one in api}}
    stand_ins(monkeypatch, held | {"tritonbench.operators": {"__path__": [str(OPERATORS)]}})
    return lambda name: (importlib.import_module(f"tritonbench.operators.{name}").Operator, found)


@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
@pytest.mark.parametrize("name", CASES)
def test_ours_agrees_with_the_baseline_and_a_fault_does_not(load, name, mode):
    options, metric = CASES[name]
    kind, found = load(name)
    operator = kind(given(mode), options)
    (baseline,) = [one for one, is_baseline in found.benchmarks.items() if is_baseline]
    assert {f"fastrl_{name}", f"inductor_{name}"} <= set(found.benchmarks)
    assert found.metrics == [metric]
    inputs = list(operator.get_input_iter())
    assert len(inputs) == 2
    for one in inputs:
        operator.example_inputs = one
        assert len(operator.get_x_val(one)) == found.labels[0].count(",") + 1
        eager, ours = operator.function(baseline), operator.function(f"fastrl_{name}")
        assert operator.accuracy(ours, eager)

        def twice(run=eager):  # the gradients add up
            first, second = run(), run()
            return first + second if mode == "fwd" else None

        assert not operator.accuracy(twice, eager)


@pytest.mark.parametrize("name", CASES)
def test_its_metric_counts_the_passes_of_the_mode(load, name):
    options, metric = CASES[name]
    kind, _ = load(name)
    values = []
    for mode in ("fwd", "bwd", "fwd_bwd"):
        operator = kind(given(mode), options)
        latency = types.SimpleNamespace(latency=2.0)  # ms
        values.append(getattr(operator, metric)(None, next(operator.get_input_iter()), latency))
    expected = 8 * 50 * 2 / 2e-3 / 1e9 if metric == "gbps" else 2 * 8 * 16 * 50
    assert values == pytest.approx([expected, 2 * expected, 3 * expected])
