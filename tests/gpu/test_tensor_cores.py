"""The linear forms as a GPU runs them: one kernel per chunk, GEMMs of 16-bit operands.

The kernels are compiled for a GPU and executed; the GEMMs are a stand-in.
"""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastrl
from fastrl import Objective
from fastrl.ops._rows import losses
from fastrl.ops._rows.operators import loss_fwd
from tests.gpu.device import linear_workloads as workloads
from tests.ops.linear.linear_head import HEADS, batch, explicit, linear
from tests.ops.linear.tensor_cores import tensor_cores  # noqa: F401

# which have no tensor cores
pytestmark = [pytest.mark.kernels_alone, pytest.mark.usefixtures("tensor_cores")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OBJECTIVE = Objective.preset("grpo", kl_coef=0.1, entropy_coef=0.02)
#: dtypes of hidden states and weight, and of autocast
PRECISIONS = {
    "bf16": (BF16, BF16, None),
    "fp16": (F16, F16, None),
    "fp32 weight under bf16 autocast": (BF16, F32, BF16),
    "fp32 under bf16 autocast": (F32, F32, BF16),
    "fp32 under fp16 autocast": (F32, F32, F16),
    "fp32": (F32, F32, None),
}


def autocast(dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def in_precision(name, head=()):
    """Parameters as they come, and those which the GEMMs of a GPU multiply, in float64."""
    of_hidden, of_weight, cast = PRECISIONS[name]
    parameters, tokens, options = batch(F32, head)
    dtypes = {"hidden": of_hidden, "weight": of_weight}
    parameters = {
        k: x.detach().to(dtypes.get(k, F32)).requires_grad_() for k, x in parameters.items()
    }
    operand = cast or (of_hidden if of_hidden == of_weight and of_hidden != F32 else None)
    multiplied = {
        k: (x.to(operand) if operand and k in dtypes else x).detach().double().requires_grad_()
        for k, x in parameters.items()
    }
    return parameters, multiplied, tokens, options, operand


def budgets(parameters, multiplied, slopes, operand):
    """Bounds of the errors of the gradients, each a sum of |dL/dlogits| |operand|.

    dL/dlogits is rounded to bfloat16, by 2^-8 of it at most, and what it is multiplied by is, too,
    if that is float16 or a factor of LoRA. The gradient of a parameter in 16 bits is rounded once
    more. 3e-5 is for sums in float32 and statistics.
    """
    rounded = 0 if operand is None else 1 + (operand == F16 or "lora_a" in multiplied)
    rounding = 3e-5 + rounded * 2.0**-8
    g = slopes.flatten(0, 1).abs()
    h = multiplied["hidden"].detach().flatten(0, 1).abs()
    bounds = {"hidden": g @ multiplied["weight"].detach().abs(), "weight": g.t() @ h}
    bounds["bias"] = g.sum(0)
    if "lora_a" in multiplied:
        a, b = (multiplied[f"lora_{x}"].detach().abs() for x in "ab")
        bounds["lora_a"] = 2 * (g @ b).t() @ h
        bounds["lora_b"] = 2 * g.t() @ (h @ a.t())
        bounds["hidden"] = bounds["hidden"] + 2 * (g @ b) @ a
    for k, x in parameters.items():
        info = torch.finfo(x.dtype)
        stored = info.eps * x.grad.abs().double() + info.eps * info.smallest_normal
        bounds[k] = rounding * bounds[k].reshape(x.shape) + stored + 1e-9
    return bounds


def assert_within(parameters, multiplied, bounds):
    for key, x in parameters.items():
        assert x.grad.dtype == x.dtype
        excess = ((x.grad.double() - multiplied[key].grad).abs() / bounds[key]).amax()
        assert excess <= 1, f"{key}: error is {float(excess):.2f} times its budget"


def exact_loss(multiplied, function, *arguments, **options):
    """Apply a function of logits in float64; return its result and the logits' gradient."""
    kept = []

    def of_logits(logits, *others, **given):
        logits.retain_grad()
        kept.append(logits)
        return function(logits, *others, **given)

    result = explicit(multiplied, of_logits, *arguments, **options)
    return result, kept[0]


def double(values):
    return {
        k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for k, x in values.items()
    }


@pytest.mark.parametrize(
    ("precision", "head"),
    [(precision, "lora") for precision in PRECISIONS]
    + [("bf16", head) for head in HEADS if head != "lora"]
    + [("fp32", "scale, softcap, temperature")],
)
def test_the_loss_and_its_gradients_agree_with_float64(backend, precision, head):
    parameters, multiplied, tokens, options, operand = in_precision(precision, HEADS[head])
    given = {**tokens, **options, "objective": OBJECTIVE}
    with autocast(PRECISIONS[precision][-1]):
        result = linear(
            parameters, fastrl.linear_policy_loss, **given, chunk_tokens=16, backend=backend
        )
    (result.loss * 0.5).backward()
    exact, logits = exact_loss(
        multiplied, fastrl.logits_policy_loss, **double(tokens), **options, objective=OBJECTIVE
    )
    (exact.loss * 0.5).backward()
    assert abs(result.loss - exact.loss) <= 2e-5 * max(1, abs(exact.loss))
    bounds = budgets(parameters, multiplied, logits.grad, operand)
    assert_within(parameters, multiplied, bounds)
    for key, value in result.metrics.items():
        assert abs(value - exact.metrics[key]) <= 2e-5 * max(1, abs(exact.metrics[key])), key


@pytest.mark.not_on("triton")  # whose roundings are the same
@pytest.mark.parametrize("head", workloads.HEADS)
@pytest.mark.parametrize("precision", workloads.PRECISIONS)
def test_the_budgets_of_the_tests_for_a_gpu(backend, precision, head, monkeypatch):
    given = workloads.PRECISIONS[precision]
    operand = given.operand(torch.device("cuda"))
    monkeypatch.setattr(workloads.Precision, "operand", lambda self, device: operand)
    for compact in (True, False):
        shape = (2, 33, 64, 1001)
        work = workloads.linear_work(given, shape, compact=compact, **workloads.HEADS[head])
        workloads.assert_policy_loss(work, backend)
        workloads.assert_token_stats(work, backend)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_statistics_and_their_gradients_agree_with_float64(backend, precision, compact):
    parameters, multiplied, tokens, _, operand = in_precision(precision)
    ids, mask = tokens["token_ids"], tokens["mask"]
    names = ("logprobs", "entropy", "logsumexp")
    upstream = torch.randn(3, *ids.shape)

    def total(stats):
        return sum((x * w).sum() for x, w in zip(stats, upstream, strict=False) if x is not None)

    with autocast(PRECISIONS[precision][-1]):
        stats = linear(
            parameters, fastrl.linear_token_stats, ids, mask=mask, outputs=names, compact=compact,
            chunk_tokens=33, backend=backend,
        )  # fmt: skip
    total(stats).backward()
    exact, logits = exact_loss(
        multiplied, fastrl.token_stats, ids, mask=mask, outputs=names, backend="reference"
    )
    total(exact).backward()
    for name in names:
        assert (getattr(stats, name) - getattr(exact, name)).abs().amax() <= 2e-5
    assert_within(parameters, multiplied, budgets(parameters, multiplied, logits.grad, operand))


@pytest.mark.not_on("cuda")  # which takes Triton's kernels on a GPU, but the CPU's here
@pytest.mark.parametrize(
    ("precision", "teacher"),
    [
        ("bf16", "hidden"),
        ("fp32 weight under bf16 autocast", "hidden"),
        ("fp16", "hidden"),
        ("fp32", "hidden"),
        ("bf16", "tokens"),
    ],
)
def test_a_teacher_beside_the_loss_agrees_with_float64(backend, precision, teacher):
    """The gradient of both terms is written in half of each row of logits."""
    parameters, multiplied, tokens, _, operand = in_precision(precision, HEADS["bias"])
    of_hidden, of_weight, cast = PRECISIONS[precision]
    states, head = torch.randn(4, 25, 16).to(of_hidden), (torch.randn(311, 16) / 4).to(of_weight)
    # what a GPU multiplies
    exact = [(x.to(operand) if operand else x).double() for x in (states, head)]
    given = {**tokens, "objective": Objective(kl_coef=0.1, teacher_coef=0.7)}
    if teacher == "hidden":
        own = fastrl.Teacher.from_hidden(states, head, beta=0.3)
        its = fastrl.Teacher.from_hidden(*exact, beta=0.3)
    else:
        values, ids = (exact[0] @ exact[1].T).log_softmax(-1).float().topk(5, -1)
        own = its = fastrl.Teacher.from_top_k(ids, values, beta=0.3)
    with autocast(cast):
        result = linear(
            parameters, fastrl.linear_policy_loss, **given, teacher=own, chunk_tokens=16,
            backend=backend,
        )  # fmt: skip
    result.loss.backward()
    wanted, logits = exact_loss(
        multiplied, fastrl.logits_policy_loss, **double(given), teacher=its, backend="reference"
    )
    wanted.loss.backward()
    assert abs(result.loss - wanted.loss) <= 2e-5 * max(1, abs(wanted.loss))
    assert_within(parameters, multiplied, budgets(parameters, multiplied, logits.grad, operand))
    for name in ("divergence", "teacher_entropy", "teacher_agreement"):
        assert abs(result.metrics[name] - wanted.metrics[name]) <= 2e-5, name


class Calls(TorchDispatchMode):
    """Counts operators, and how often something of the weight's size is cast to 16 bits."""

    def __init__(self, weight_shape):
        super().__init__()
        self.weight_shape, self.count, self.casts = weight_shape, Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.count[name] += 1
        narrow = name == "_to_copy" and result.dtype in (BF16, F16)
        self.casts += narrow and result.shape == self.weight_shape
        return result


@pytest.mark.parametrize(
    "precision", ["bf16", "fp32 under bf16 autocast", "fp32 under fp16 autocast"]
)
def test_a_chunk_takes_one_kernel_and_the_weight_one_cast(backend, precision, monkeypatch):
    parameters, _, tokens, _, operand = in_precision(precision)
    arguments = arguments_of_the_operator(monkeypatch, parameters, tokens, precision, backend)
    products = Counter()
    for name in ("mm", "addmm"):
        run = getattr(torch, name)
        counted = lambda *a, _run=run, **o: products.update(["GEMM"]) or _run(*a, **o)  # noqa: E731
        monkeypatch.setattr(torch, name, counted)
    with Calls(parameters["weight"].shape) as calls:
        loss_fwd(*arguments)
    chunks = 4
    assert calls.count["logits_policy_loss_fwd_"] == chunks
    assert not [name for name in calls.count if name.startswith(("token_stats", "policy_loss"))]
    assert products["GEMM"] == 3 * chunks
    of_weight = PRECISIONS[precision][1]
    of_gradient = operand == F16  # which multiplies a bfloat16 copy
    assert calls.casts == (operand != of_weight) + of_gradient


def arguments_of_the_operator(monkeypatch, parameters, tokens, precision, backend):
    """Return the arguments with which the public function calls the operator."""
    found, operator = [], losses.rows_loss_fwd
    with monkeypatch.context() as patch, autocast(PRECISIONS[precision][-1]):
        recorded = lambda *arguments: found.append(arguments) or operator(*arguments)  # noqa: E731
        patch.setattr(losses, "rows_loss_fwd", recorded)
        linear(
            parameters, fastrl.linear_policy_loss, **tokens, objective=OBJECTIVE, compact=False,
            chunk_tokens=25, backend=backend,
        )  # fmt: skip
    return found[0]


def test_a_compiled_graph_sees_autocast(backend):
    parameters, _, tokens, *_ = in_precision("fp32 under bf16 autocast")
    given = {**tokens, "objective": OBJECTIVE, "backend": backend}

    def loss():
        return linear(parameters, fastrl.linear_policy_loss, **given).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    seen = []
    for dtype in (BF16, None, BF16, F16):
        with autocast(dtype):
            seen.append((loss(), compiled()))
    for eager, graph in seen:
        assert abs(eager - graph) <= 1e-7
    assert len({float(eager) for eager, _ in seen}) == 3  # three precisions
