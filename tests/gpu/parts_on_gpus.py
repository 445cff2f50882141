"""The ranks of a split vocabulary as GPUs run them: the kernels of a backend, GEMMs of 16 bits."""

import operator

import torch.distributed as dist

import fastrl
from tests.gpu import test_tensor_cores as alone
from tests.ops.linear.tensor_cores import multiply_as_on_a_gpu
from tests.ops.ranks.vocabulary_ranks import columns
from tests.ptx import backends

SPLIT = (150, 161)
CASES = {
    "bf16": ("lora", {"chunk_tokens": 32}),
    "fp16": ("plain", {"chunk_tokens": 50, "compact": False}),
    "fp32 under bf16 autocast": ("scale, softcap, temperature", {"chunk_tokens": 64}),
    "fp32": ("temperature per row", {}),
}


def gpu_on_ranks(backend):
    """Compare the loss and its gradients with float64; return the loss of each case."""
    multiply_as_on_a_gpu(setattr)
    backends.use(backend, operator.setitem, setattr)
    return [_compare(precision, backend) for precision in CASES]


def _compare(precision, backend):
    head, how = CASES[precision]
    parameters, multiplied, tokens, options, operand = alone.in_precision(
        precision, alone.HEADS[head]
    )
    own, split = columns(SPLIT), ("weight", "bias", "lora_b")
    part = {
        name: x.detach()[own if name in split else slice(None)].clone().requires_grad_()
        for name, x in parameters.items()
    }
    options = {**options, "objective": alone.OBJECTIVE}
    with alone.autocast(alone.PRECISIONS[precision][-1]):
        result = alone.linear(
            part, fastrl.linear_policy_loss, **tokens, **options, **how, backend=backend,
            vocab_group=dist.group.WORLD,
        )  # fmt: skip
    (result.loss * 0.5).backward()
    exact, logits = alone.exact_loss(
        multiplied, fastrl.logits_policy_loss, **alone.double(tokens), **options
    )
    (exact.loss * 0.5).backward()
    assert abs(result.loss - exact.loss) <= 2e-5 * max(1, abs(exact.loss)), precision
    for name, x in parameters.items():
        x.grad = multiplied[name].grad.to(x.dtype)
    bounds = alone.budgets(parameters, multiplied, logits.grad, operand)
    for name, x in part.items():
        place = own if name in split else slice(None)
        assert x.grad.dtype == x.dtype
        error = (x.grad.double() - multiplied[name].grad[place]).abs()
        excess = float((error / bounds[name][place]).amax())
        assert excess <= 1, f"{precision}, {name}: error is {excess:.2f} times its budget"
    return result.loss.detach(), part["hidden"].grad
