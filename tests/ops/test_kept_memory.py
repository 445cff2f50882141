"""Calls keep no memory, even while Python's cyclic collector is off, as some trainers have it."""

import ctypes
import gc

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from tests.ops.inputs import backend_for

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
B, T = 20, 500
CALLS, LIMIT = 20, 2**18  # 1.3 bytes per token and call
ROWS, VOCABULARY, WIDTH = 32, 8_192, 16  # one chunk, 1 MiB of logits


class Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        *((f"field_{i}", ctypes.c_size_t) for i in range(4)),
        ("mapped", ctypes.c_size_t),
        *((f"field_{i}", ctypes.c_size_t) for i in range(5, 7)),
        ("used", ctypes.c_size_t),
        *((f"field_{i}", ctypes.c_size_t) for i in range(8, 10)),
    ]


def allocated():
    """Return the bytes that malloc has given out and not received back."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("needs glibc 2.33 or newer")
    mallinfo2.restype = Heap
    heap = mallinfo2()
    return heap.used + heap.mapped


def kept_by(call):
    """Return the bytes that `CALLS` calls keep, after two that may fill caches."""
    call()
    call()
    gc.collect()
    gc.disable()
    try:
        before = allocated()
        for _ in range(CALLS):
            call()
        return allocated() - before
    finally:
        gc.enable()


def dro(logprobs, old_logprobs, ref_logprobs, advantages):
    log_ratio = logprobs - old_logprobs
    return -log_ratio.exp() * advantages + 0.5 * log_ratio.square()


def fails(logprobs, old_logprobs, ref_logprobs, advantages):
    (logprobs - old_logprobs).exp().sigmoid()
    raise ArithmeticError


OBJECTIVES = {
    "grpo": Objective.preset("grpo", kl_coef=0.1, entropy_coef=0.01),
    "cispo": Objective.preset("cispo", kl_coef=0.1, kl_gradient="bias-corrected"),
    "gspo": Objective.preset("gspo"),
    "gmpo": Objective.preset("gmpo", kl_coef=0.1, kl_gradient="straight-through"),
    "sapo by sequence-token": Objective.preset("sapo", level="sequence-token"),
    "masks": Objective(off_policy_threshold=0.5, top_entropy_quantile=0.5, dual_clip=3.0),
    "correction": Objective(rollout_correction=RolloutCorrection(high=2.0)),
    "function": Objective(surrogate=dro),
    "failing function": Objective(surrogate=fails),
}
FLAT, PADDED = (ROWS,), (B, T)


def leaf(*shape):
    return torch.randn(shape).requires_grad_()


def loss_arguments(objective, shape):
    given = {"old_logprobs": -torch.rand(shape), "objective": objective}
    if objective.kl_coef:
        given["ref_logprobs"] = -torch.rand(shape)
    if objective.rollout_corrections:
        given["rollout_logprobs"] = -torch.rand(shape)
    return given


def policy_loss(objective, backend):
    given = {"entropy": leaf(*PADDED), "backend": backend, **loss_arguments(objective, PADDED)}
    return fastrl.policy_loss(leaf(*PADDED), torch.randn(B), torch.ones(PADDED), **given).loss


def of_rows(rows):
    return torch.randint(8, rows), torch.randn(rows), torch.ones(rows)


def logits_policy_loss(objective, backend):
    given = {"backend": backend, **loss_arguments(objective, PADDED)}
    return fastrl.logits_policy_loss(leaf(B, T, 8), *of_rows(PADDED), **given).loss


def linear_policy_loss(objective, backend):
    given = {"backend": backend, **loss_arguments(objective, (2, ROWS // 2))}
    hidden, weight = leaf(2, ROWS // 2, WIDTH), leaf(VOCABULARY, WIDTH)
    return fastrl.linear_policy_loss(hidden, weight, *of_rows((2, ROWS // 2)), **given).loss


def linear(function, backend, **options):
    hidden, weight = leaf(ROWS, WIDTH), leaf(VOCABULARY, WIDTH)
    return function(hidden, weight, torch.randint(VOCABULARY, FLAT), backend=backend, **options)


def logits_stats(function, backend, **options):
    return function(leaf(B, T, 8), torch.randint(8, PADDED), backend=backend, **options)


LOSSES = (policy_loss, logits_policy_loss, linear_policy_loss)
ALL_STATS = {"outputs": fastrl.TokenStats._fields}
#: One call of every other function; the first result is differentiated if it can be.
OTHERS = {
    "token_logprobs": lambda b: logits_stats(fastrl.token_logprobs, b),
    "token_stats": lambda b: logits_stats(fastrl.token_stats, b, **ALL_STATS).entropy,
    "linear_token_logprobs": lambda b: linear(fastrl.linear_token_logprobs, b),
    "linear_token_stats": lambda b: linear(fastrl.linear_token_stats, b, **ALL_STATS).entropy,
    "gae": lambda b: fastrl.gae(
        torch.randn(B, T), torch.randn(B, T), torch.ones(B, T), gamma=0.9, lam=0.9, backend=b
    ),
    "group_advantages": lambda b: fastrl.group_advantages(
        torch.randn(B * T), group_size=8, backend=b
    ),
    "discounted_returns": lambda b: fastrl.discounted_returns(
        torch.randn(B, T), torch.ones(B, T), gamma=0.9
    ),
    "value_loss": lambda b: (
        fastrl.value_loss(
            leaf(B, T), torch.randn(B, T), torch.ones(B, T), old_values=torch.randn(B, T), clip=0.2
        ).loss
    ),
    "kl_divergence": lambda b: fastrl.kl_divergence(leaf(B, T), torch.randn(B, T)),
    "token_weights": lambda b: fastrl.token_weights(torch.ones(B, T), aggregation="token-mean"),
    "global_normalizer": lambda b: fastrl.global_normalizer(
        torch.ones(B, T), aggregation="token-mean"
    ),
    "masked_mean": lambda b: fastrl.masked_mean(leaf(B, T), torch.ones(B, T)),
    "whiten": lambda b: fastrl.whiten(leaf(B, T), torch.ones(B, T)),
}


def used_in_all_ways(call):
    """Call without a gradient, with one that is dropped, and with a backward."""
    with torch.no_grad():
        call()
    call()
    result = call()
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()


def refused(call, error):
    try:
        call()
    except error:
        return
    raise AssertionError("the call should fail")


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("function", LOSSES)
def test_a_loss_keeps_nothing(backend, function, name):
    objective = OBJECTIVES[name]

    def call():
        return function(objective, backend_for(objective, backend))

    def calls():
        if objective.surrogate is fails:
            refused(call, ArithmeticError)
        else:
            used_in_all_ways(call)
            refused(lambda: call().backward(create_graph=True), RuntimeError)

    kept = kept_by(calls)
    assert kept < LIMIT, f"{CALLS} calls keep {kept} bytes"


@pytest.mark.parametrize("name", OTHERS)
def test_a_function_keeps_nothing(backend, name):
    kept = kept_by(lambda: used_in_all_ways(lambda: OTHERS[name](backend)))
    assert kept < LIMIT, f"{CALLS} calls keep {kept} bytes"


@pytest.mark.parametrize("function", [policy_loss, linear_policy_loss])
def test_hooks_of_the_caller_see_the_saved_gradients_alone(backend, function):
    # an inner graph whose outputs they return unchanged would never be freed
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        function(OBJECTIVES["grpo"], backend)
    assert len(seen) == 2, [x.shape for x in seen]


def test_every_function_is_tested():
    functions = {n for n in fastrl.__all__ if callable(getattr(fastrl, n)) and n.islower()}
    tested = {*OTHERS, *(function.__name__ for function in LOSSES)}
    assert functions - tested == {"get_backend", "set_backend", "reduce_metrics"}
