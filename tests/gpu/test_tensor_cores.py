"""The linear forms as a GPU runs them: one kernel per chunk, GEMMs of 16-bit operands.

The kernels are compiled for a GPU and executed; the GEMMs are a stand-in.
"""

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastrl
from fastrl import Objective
from fastrl.ops._rows import losses
from fastrl.ops._rows.operators import loss_fwd
from tests.calls.case import LINEAR, Case
from tests.calls.combined import assert_value, assert_values
from tests.calls.oracle.bounded import FLOAT32, Bounded
from tests.calls.oracle.head import Entering, LinearHead, on_tensor_cores
from tests.calls.table import ROWS
from tests.fuzz.run import PRETENDED, Run, perform
from tests.gpu.device.pretended import Pretended, execute
from tests.gpu.parts_on_gpus import OF_HIDDEN, OF_LOGITS, on_parts
from tests.ops.linear.linear_head import batch, explicit, linear
from tests.ops.ranks.gloo_ranks import on_ranks

pytestmark = pytest.mark.kernels_alone  # a CPU has no tensor cores

OBJECTIVE = Objective.preset("grpo", kl_coef=0.1, entropy_coef=0.02)


@pytest.fixture(autouse=True)
def as_on_a_gpu(backend, monkeypatch):
    execute(backend, monkeypatch.setitem, monkeypatch.setattr)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name][0] in LINEAR])
def test_values_and_gradients_are_those_of_the_oracle(backend, name):
    function, options = ROWS[name]
    with Pretended():
        assert_values(backend, function, device="cuda", **options)


@pytest.mark.parametrize("function", LINEAR)
def test_drawn_cases(backend, function):
    run = Run(20, seed=20260923, backend=backend, device=PRETENDED, function=function)
    with Pretended():
        report = perform(run)
    assert not report.failures, str(report)


@pytest.mark.parametrize("seed", [2, 3])  # whose teachers have no tail
def test_linear_divergence_of_few_tokens(backend, seed):
    """Beside 77 columns, half of a row of memory has more that nobody writes."""
    head = {"tokens": 4, "vocabulary": 77, "hidden": 8, "dtype": "bfloat16", "teacher": "tokens"}
    with Pretended():
        assert_value(backend, Case("linear_divergence", seed=seed, **head), "cuda")


@pytest.mark.parametrize("cases", [OF_LOGITS, OF_HIDDEN], ids=["logits", "hidden states"])
def test_a_split_vocabulary(backend, cases):
    """On two ranks, whose results have the same bits."""
    first, second = on_ranks(2, on_parts, backend, cases)
    assert all(map(torch.equal, first, second))


def as_array(x):
    return x.detach().double().numpy()


@pytest.mark.parametrize(
    ("dtype", "cast", "kind"),
    [
        (torch.bfloat16, None, "hidden"),
        (torch.float32, torch.bfloat16, "hidden"),
        (torch.float16, None, "hidden"),
        (torch.float32, None, "hidden"),
        (torch.bfloat16, None, "tokens"),
    ],
    ids=str,
)
def test_a_teacher_beside_the_loss_agrees_with_float64(backend, dtype, cast, kind):
    """The gradient of both terms is written in half of each row of logits."""
    operand = cast or (None if dtype == torch.float32 else dtype)
    parameters, tokens, _ = batch(dtype, {"bias": True})
    states, head = torch.randn(4, 25, 16).to(dtype), (torch.randn(311, 16) / 4).to(dtype)

    def exactly(x):  # what a GPU multiplies
        return (x if operand is None else x.to(operand)).detach().double()

    own = {name: x.detach().double() for name, x in parameters.items()}
    own |= {name: exactly(parameters[name]) for name in ("hidden", "weight")}
    values, ids = (exactly(states) @ exactly(head).T).log_softmax(-1).float().topk(5, -1)
    top = fastrl.Teacher.from_top_k(ids, values, beta=0.3)
    of_hidden = fastrl.Teacher.from_hidden
    given, its = (top, top) if kind == "tokens" else (
        of_hidden(states, head, beta=0.3),
        of_hidden(exactly(states), exactly(head), beta=0.3),
    )  # fmt: skip
    options = {"objective": Objective(kl_coef=0.1, teacher_coef=0.7)}
    with contextlib.nullcontext() if cast is None else torch.autocast("cpu", cast):
        result = linear(
            parameters, fastrl.linear_policy_loss, **tokens, **options, teacher=given,
            chunk_tokens=16, backend=backend,
        )  # fmt: skip
    result.loss.backward()
    logits = explicit(own, lambda x: x).requires_grad_()
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tokens.items()}
    exact = fastrl.logits_policy_loss(logits, **wide, **options, teacher=its, backend="reference")
    exact.loss.backward()
    for name, value in {"loss": exact.loss, **exact.metrics}.items():
        found = result.loss if name == "loss" else result.metrics[name]
        assert abs(found - value) <= 2e-5 * max(1, abs(value)), name
    entering = Entering() if operand is None else on_tensor_cores(str(operand)[6:])
    hidden, weight, bias = (as_array(own[name]) for name in ("hidden", "weight", "bias"))
    of_head = LinearHead(hidden.reshape(100, -1), weight, bias, None, FLOAT32, entering)
    slopes = as_array(logits.grad).reshape(100, -1)
    # 3e-5 is for the statistics of both and the formula
    wanted = of_head.gradients(Bounded(slopes, 3e-5 * np.abs(slopes), FLOAT32))
    for name, x in parameters.items():
        bound, got = wanted[name], as_array(x.grad)
        stored = torch.finfo(dtype).eps / 2 * (np.abs(bound.value) + bound.error)
        error = np.abs(got.reshape(bound.shape) - bound.value)
        assert (error <= bound.error + stored).all(), name


class Calls(TorchDispatchMode):
    """Counts operators, and how often something of the weight's size is cast to 16 bits."""

    def __init__(self, weight_shape):
        super().__init__()
        self.weight_shape, self.count, self.casts = weight_shape, Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.count[name] += 1
        narrow = name == "_to_copy" and result.dtype in (torch.bfloat16, torch.float16)
        self.casts += narrow and result.shape == self.weight_shape
        return result


@pytest.mark.parametrize(
    ("dtype", "cast", "casts"),
    [
        (torch.bfloat16, None, 0),
        (torch.float32, torch.bfloat16, 1),
        (torch.float32, torch.float16, 2),  # the gradient multiplies a bfloat16 copy
    ],
    ids=str,
)
def test_a_chunk_takes_one_kernel_and_the_weight_one_cast(backend, dtype, cast, casts, monkeypatch):
    parameters, tokens, _ = batch(dtype)
    arguments, operator = [], losses.rows_loss_fwd
    with monkeypatch.context() as patch, torch.autocast("cpu", cast, enabled=cast is not None):
        recorded = lambda *given: arguments.append(given) or operator(*given)  # noqa: E731
        patch.setattr(losses, "rows_loss_fwd", recorded)
        linear(
            parameters, fastrl.linear_policy_loss, **tokens, objective=OBJECTIVE, compact=False,
            chunk_tokens=25, backend=backend,
        )  # fmt: skip
    products = Counter()
    for name in ("mm", "addmm"):
        run = getattr(torch, name)
        counted = lambda *a, _run=run, **o: products.update(["GEMM"]) or _run(*a, **o)  # noqa: E731
        monkeypatch.setattr(torch, name, counted)
    with Calls(parameters["weight"].shape) as calls:
        loss_fwd(*arguments[0])
    chunks = 4
    assert calls.count["logits_policy_loss_fwd_"] == chunks
    assert not [name for name in calls.count if name.startswith(("token_stats", "policy_loss"))]
    assert products["GEMM"] == 3 * chunks
    assert calls.casts == casts


def test_a_compiled_graph_sees_autocast(backend):
    parameters, tokens, _ = batch()
    given = {**tokens, "objective": OBJECTIVE, "backend": backend}

    def loss():
        return linear(parameters, fastrl.linear_policy_loss, **given).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    seen = []
    for dtype in (torch.bfloat16, None, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            seen.append((loss(), compiled()))
    for eager, graph in seen:
        assert abs(eager - graph) <= 1e-7
    assert len({float(eager) for eager, _ in seen}) == 3  # three precisions
