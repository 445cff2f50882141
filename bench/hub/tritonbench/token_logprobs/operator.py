"""log softmax(logits)[token], with gradient: what every RL loss of a language model starts from."""

import argparse

import torch
import torch._functorch.config
from tritonbench.utils.triton_op import (
    BenchmarkOperator,
    register_benchmark,
    register_metric,
    register_x_val,
)

try:
    import fastrl
except ModuleNotFoundError:
    fastrl = None


def parse_op_args(args):
    parser = argparse.ArgumentParser()
    parser.add_argument("--T", type=int, default=8192, help="tokens")
    parser.add_argument(
        "--V", type=int, nargs="+", default=[32_000, 128_256, 151_936], help="vocabulary sizes"
    )
    return parser.parse_args(args)


def eager(logits, ids):
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


class Operator(BenchmarkOperator):
    DEFAULT_PRECISION = "bf16"
    DEFAULT_METRICS = ("latency", "gbps", "speedup", "accuracy")
    is_compute_bound = False

    def __init__(self, tb_args, extra_args=None):
        super().__init__(tb_args, extra_args)
        args = parse_op_args(self.extra_args)
        self.T, self.vocabularies = args.T, args.V

    def get_input_iter(self):
        for V in self.vocabularies:
            logits = torch.randn(self.T, V, dtype=self.dtype, device=self.device)
            ids = torch.randint(V, (self.T,), device=self.device)
            yield logits.requires_grad_(), ids

    @register_benchmark(baseline=True)
    def torch_token_logprobs(self, logits, ids):
        return lambda: eager(logits, ids)

    @register_benchmark()
    def inductor_token_logprobs(self, logits, ids):
        torch._functorch.config.donated_buffer = False  # TritonBench retains the graph
        compiled = torch.compile(eager)
        return lambda: compiled(logits, ids)

    @register_benchmark(enabled=fastrl is not None)
    def fastrl_token_logprobs(self, logits, ids):
        return lambda: fastrl.token_logprobs(logits, ids)

    @register_x_val(label="(T, V)")
    def get_x_val(self, example_inputs):
        return tuple(example_inputs[0].shape)

    @register_metric()
    def gbps(self, fn, example_inputs, metrics):
        """Of the least traffic: the logits are read once, in the backward too, and written once."""
        passes = {"bwd": 2, "fwd_bwd": 3}.get(self.mode.value, 1)
        logits = example_inputs[0]
        return passes * logits.numel() * logits.element_size() / metrics.latency * 1e-6

    def get_bwd_fn(self, fwd_fn):
        logprobs = fwd_fn()
        return lambda: logprobs.sum().backward(retain_graph=True)

    def get_grad_to_none(self, args):
        return [args[0]]

    def accuracy(self, fn, baseline_fn):
        """Compare results in a forward, gradients where there is a backward."""
        if not self.mode.value.endswith("bwd"):
            return super().accuracy(fn, baseline_fn)
        inputs, found = self.get_grad_to_none(self.example_inputs), []
        for run in (fn, baseline_fn):
            for x in inputs:
                x.grad = None
            run()
            found.append([x.grad for x in inputs])
        near, pairs = self.tb_args.atol or 1e-2, zip(*found, strict=True)
        return all(bool((x - y).abs().max() <= near * y.abs().max()) for x, y in pairs)
