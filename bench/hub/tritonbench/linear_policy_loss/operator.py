"""The DAPO loss from hidden states and an LM head, on policy: matrix product and loss fused.

Fused losses compute their gradients in the forward, so `--mode fwd_bwd` compares equal work.
"""

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
try:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
except ModuleNotFoundError:
    LigerFusedLinearGRPOLoss = None


def parse_op_args(args):
    parser = argparse.ArgumentParser()
    parser.add_argument("--B", type=int, default=8, help="sequences")
    parser.add_argument("--T", type=int, nargs="+", default=[512, 1024, 2048], help="lengths")
    parser.add_argument("--H", type=int, default=1024, help="hidden size")
    parser.add_argument("--V", type=int, default=151_936, help="vocabulary size")
    return parser.parse_args(args)


def eager(hidden, weight, ids, advantages):
    logprobs = (hidden @ weight.T).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio = (logprobs - logprobs.detach()).exp()
    return -(ratio * advantages[:, None]).mean()


class Operator(BenchmarkOperator):
    DEFAULT_PRECISION = "bf16"
    DEFAULT_METRICS = ("latency", "tflops", "speedup", "accuracy")

    def __init__(self, tb_args, extra_args=None):
        super().__init__(tb_args, extra_args)
        args = parse_op_args(self.extra_args)
        self.B, self.H, self.V, self.lengths = args.B, args.H, args.V, args.T
        self.weight = self.normal(self.V, self.H)

    def normal(self, *shape):
        values = torch.randn(shape, device=self.device) * self.H**-0.25
        return values.to(self.dtype).requires_grad_()

    def get_input_iter(self):
        for T in self.lengths:
            ids = torch.randint(self.V, (self.B, T), device=self.device)
            advantages = torch.randn(self.B, device=self.device)
            yield self.normal(self.B, T, self.H), self.weight, ids, advantages

    @register_benchmark(baseline=True)
    def torch_linear_policy_loss(self, hidden, weight, ids, advantages):
        return lambda: eager(hidden, weight, ids, advantages)

    @register_benchmark()
    def inductor_linear_policy_loss(self, hidden, weight, ids, advantages):
        torch._functorch.config.donated_buffer = False  # TritonBench retains the graph
        compiled = torch.compile(eager)
        return lambda: compiled(hidden, weight, ids, advantages)

    @register_benchmark(enabled=LigerFusedLinearGRPOLoss is not None)
    def liger_linear_policy_loss(self, hidden, weight, ids, advantages):
        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo")
        mask = torch.ones_like(ids)
        return lambda: loss(hidden, weight, ids, mask, advantages)[0]

    @register_benchmark(enabled=fastrl is not None)
    def fastrl_linear_policy_loss(self, hidden, weight, ids, advantages):
        mask = torch.ones_like(ids)
        given = hidden, weight, ids, advantages, mask
        return lambda: fastrl.linear_policy_loss(*given, objective="dapo").loss

    @register_x_val(label="(B, T, H, V)")
    def get_x_val(self, example_inputs):
        return (*example_inputs[0].shape, self.V)

    @register_metric()
    def flops(self, fn_name, example_inputs, metrics):
        """Of the matrix products of the mode: one in the forward, two in the backward."""
        products = {"bwd": 2, "fwd_bwd": 3}.get(self.mode.value, 1)
        return products * 2 * example_inputs[0].numel() * self.V

    def get_bwd_fn(self, fwd_fn):
        loss = fwd_fn()
        return lambda: loss.backward(retain_graph=True)

    def get_grad_to_none(self, args):
        return [args[0], args[1]]

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
