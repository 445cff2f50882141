"""What holds of the calls of every function: repeats, layouts, autograd, and what is left behind.

Properties of results are in test_properties.py.
"""

import ctypes
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastrl
from fastrl import Objective
from fastrl.reference import row_blocks
from tests.calls.case import LOSSES
from tests.calls.entries import CENTERED, ENTRIES, FEW, OBJECTIVES, entries, outcome
from tests.calls.tokens import laid_out
from tests.ops.closeness import assert_close, assert_same

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph"),
]


FEW_OBJECTIVES = [*(OBJECTIVES[name] for name in FEW), *CENTERED.values()]


def with_few_objectives(entry):
    case = entry.case
    return case.function not in LOSSES or (case.objective, case.fields) in FEW_OBJECTIVES


each = entries(with_few_objectives)
trained = entries(lambda e: e.leaves and with_few_objectives(e))


def total_of(entry, backend, inputs, x):
    """The sum of all results, with `x` for the first leaf."""
    results = entry.call(backend, {**inputs, entry.leaves[0]: x})
    return sum(y.sum() for y in results.values() if y.requires_grad)


def in_one_chunk(entry):
    return {"chunk_tokens": None} if "chunk_tokens" in entry.options else {}


# --- repeats and layouts: no bit differs


@each
def test_two_runs_are_bit_equal(backend, entry):
    inputs = entry.draw(20, 60, torch.float32)
    assert_same(outcome(entry, backend, inputs), outcome(entry, backend, inputs))


@pytest.mark.parametrize("threads", [2, 3])
@each
@pytest.mark.not_on("reference", "triton", "cuda")  # eager torch promises nothing
def test_the_number_of_threads_changes_no_bit(backend, entry, threads):
    inputs, usual = entry.draw(20, 150, torch.float32), torch.get_num_threads()
    outcomes = []
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            outcomes.append(outcome(entry, backend, inputs, **in_one_chunk(entry)))
    finally:
        torch.set_num_threads(usual)
    assert_same(*outcomes)


@pytest.mark.parametrize(
    "layout", ["transposed", "sliced", "strided", "odd", "shifted", "expanded"]
)
@each
def test_the_layout_in_memory_changes_no_bit(backend, entry, layout):
    inputs = entry.draw(4, 6, torch.float32)
    if layout == "expanded":  # a row for all
        inputs = {k: x[:1].expand_as(x).contiguous() for k, x in inputs.items()}
    laid = {k: laid_out(x, layout) for k, x in inputs.items()}
    found, wanted = (outcome(entry, backend, given) for given in (laid, inputs))
    by_torch = backend == "reference" or "hidden" in entry.leaves
    (assert_close if by_torch else assert_same)(found, wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16, torch.float32])
@entries(lambda e: "mask" in e.draw(1, 1, torch.float32))
def test_the_dtype_of_the_mask_changes_no_bit(backend, entry, dtype):
    inputs = entry.draw(4, 6, torch.float32)
    mask = inputs["mask"].to(dtype)
    if dtype.is_floating_point:
        mask[mask == 0] = -0.0
    other = outcome(entry, backend, {**inputs, "mask": mask})
    assert_same(other, outcome(entry, backend, inputs))


# --- autograd


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each
def test_without_autograd_the_results_are_the_same(backend, entry, mode):
    inputs = entry.draw(4, 6, torch.float32)
    wanted = outcome(entry, backend, inputs)
    wanting = {k: x.requires_grad_(k in entry.leaves) for k, x in inputs.items()}
    with mode():
        found = entry.call(backend, wanting)
    assert not any(x.requires_grad for x in found.values())
    assert_same(found, {k: wanted[k] for k in found})


@entries(lambda e: len(e.leaves) > 1)
def test_gradients_only_where_asked(backend, entry):
    inputs = entry.draw(4, 6, torch.float32)
    wanted = outcome(entry, backend, inputs)
    for leaf in entry.leaves:
        found = outcome(entry, backend, inputs, leaves=(leaf,))
        assert_same(found, {k: wanted[k] for k in wanted if k[:2] != "d " or k == f"d {leaf}"})


@each
def test_constants_get_no_gradient_and_no_input_changes(backend, entry):
    inputs = entry.draw(4, 6, torch.float32)
    for name, x in inputs.items():
        x.requires_grad_(x.is_floating_point() and name != "temperature")
    before = {k: x.detach().clone() for k, x in inputs.items()}
    versions = {k: x._version for k, x in inputs.items()}
    totals = [x.sum() for x in entry.call(backend, inputs).values() if x.requires_grad]
    assert bool(totals) == bool(entry.leaves)
    if totals:
        sum(totals).backward()
    assert_same({k: x.detach() for k, x in inputs.items()}, before)
    assert {k: x._version for k, x in inputs.items()} == versions
    assert all(inputs[k].grad is None for k in inputs if k not in entry.leaves)


@trained
def test_constants_made_in_inference_mode_are_like_others(backend, entry):
    """As of a rollout, a frozen head or a frozen backbone."""
    inputs = entry.draw(4, 6, torch.float32)
    with torch.inference_mode():
        constants = {name: x.clone() for name, x in inputs.items()}
    for leaf in entry.leaves:
        given = {**constants, leaf: inputs[leaf]}
        wanted = outcome(entry, backend, inputs, leaves=(leaf,))
        assert_same(outcome(entry, backend, given, leaves=(leaf,)), wanted)


def scaled(kind, x):
    """The sum of x times a factor, by an op that returns a particular upstream gradient."""
    return {
        "zero": lambda: (x * 0.0).sum(),
        "scaled": lambda: (x * -2.0).sum(),
        "expanded": lambda: x.expand(4, *x.shape).sum(),  # a gradient of stride 0
        "strided": lambda: torch.stack([x, x], -1)[..., 0].sum(),  # a view of a longer gradient
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "factor"), [("zero", 0.0), ("scaled", -2.0), ("expanded", 4.0), ("strided", 1.0)]
)
@trained
def test_the_upstream_gradient_enters(backend, entry, kind, factor):
    inputs = entry.draw(3, 5, torch.float32)
    wanted = outcome(entry, backend, inputs)[f"d {entry.leaves[0]}"]
    x = inputs[entry.leaves[0]].requires_grad_()
    results = [y for y in entry.call(backend, inputs).values() if y.requires_grad]
    sum(scaled(kind, y) for y in results).backward()
    torch.testing.assert_close(x.grad, factor * wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factor", [1.0, -2.0])
@trained
def test_a_retained_graph_gives_the_same_gradient_again(backend, entry, factor):
    inputs = entry.draw(3, 5, torch.float32)
    x = inputs[entry.leaves[0]].requires_grad_()
    total = total_of(entry, backend, inputs, x) * factor
    first, second, third = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(3))
    kept = first.clone()
    first.zero_()  # the caller's own
    assert torch.equal(second, kept)
    assert torch.equal(third, kept)


@trained
def test_two_calls_on_the_same_leaf_add_up(backend, entry):
    inputs = entry.draw(3, 5, torch.float32)
    wanted = outcome(entry, backend, inputs)[f"d {entry.leaves[0]}"]
    x = inputs[entry.leaves[0]].requires_grad_()
    sum(total_of(entry, backend, inputs, x) for _ in range(2)).backward()
    total_of(entry, backend, inputs, x).backward()
    torch.testing.assert_close(x.grad, 3 * wanted, rtol=1e-5, atol=1e-7)


@trained
def test_a_second_derivative_is_refused(backend, entry):
    inputs = entry.draw(3, 4, torch.float32)
    x = inputs[entry.leaves[0]].requires_grad_()
    total = total_of(entry, backend, inputs, x)

    def second_derivative():
        (gradient,) = torch.autograd.grad(total * total, x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)

    if backend in entry.refuse_twice:
        with pytest.raises(RuntimeError, match="first derivatives only"):
            second_derivative()
    else:
        assert second_derivative()[0].shape == x.shape


@pytest.mark.parametrize("use_reentrant", [False, True])
@trained
def test_activation_checkpointing(backend, entry, use_reentrant):
    inputs = entry.draw(3, 5, torch.float32)
    x = inputs[entry.leaves[0]].requires_grad_()

    names = [k for k, y in entry.call(backend, inputs).items() if y.requires_grad]

    def loss(leaf):
        results = entry.call(backend, {**inputs, entry.leaves[0]: -leaf.square()})
        return sum(results[name].sum() for name in names)

    (wanted,) = torch.autograd.grad(loss(x), x)
    checkpoint(loss, x, use_reentrant=use_reentrant).backward()
    assert torch.equal(x.grad, wanted)


# --- what is left behind

B, T = 20, 100
CALLS, LIMIT = 4, 2**14  # 2 bytes per token and call


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


@pytest.fixture(scope="module")
def frozen_heap():
    """Collections look at what is made from here on, which makes them fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def kept_by(call):
    """Return the bytes that `CALLS` calls keep, after two that may fill caches."""
    call()
    call()
    gc.collect()
    gc.disable()  # as some trainers have it
    try:
        before = allocated()
        for _ in range(CALLS):
            call()
        return allocated() - before
    finally:
        gc.enable()


def refused(call, error):
    try:
        call()
    except error:
        return
    raise AssertionError("the call should fail")


@entries()
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.not_on("triton", "cuda")  # the executor keeps what it pleases
def test_many_calls_keep_no_memory(backend, entry, monkeypatch):
    """Calls without a gradient, with one that is dropped, with a backward, with one refused."""
    if backend == "reference":  # hundreds of rows per block: with few, a test takes half a minute
        monkeypatch.setattr(row_blocks, "_CPU_BYTES", 2**15)
    inputs = entry.draw(B, T, torch.float32)
    inputs = {k: x.requires_grad_(k in entry.leaves) for k, x in inputs.items()}

    def call():
        return entry.call(backend, inputs, **in_one_chunk(entry))

    def used_in_all_ways():
        with torch.no_grad():
            call()
        call()
        results = call()
        if entry.leaves:
            total = sum(x.sum() for x in results.values() if x.requires_grad)
            torch.autograd.grad(total, inputs[entry.leaves[0]])
        if "reference" in entry.refuse_twice:
            total = sum(x.sum() for x in call().values() if x.requires_grad)
            refused(lambda: total.backward(create_graph=True), RuntimeError)

    kept = kept_by(used_in_all_ways)
    assert kept < LIMIT, f"{CALLS} calls keep {kept} bytes"


def test_a_function_that_fails_keeps_no_memory():
    def fails(logprobs, old_logprobs, ref_logprobs, advantages):
        (logprobs - old_logprobs).exp().sigmoid()
        raise ArithmeticError

    entry, o = ENTRIES["policy_loss function"], Objective(surrogate=fails)
    inputs = entry.draw(B, T, torch.float32)

    def call():
        inputs["logprobs"] = inputs["logprobs"].detach().requires_grad_()
        refused(lambda: entry.call("auto", inputs, objective=o), ArithmeticError)

    kept = kept_by(call)
    assert kept < LIMIT, f"{CALLS} calls keep {kept} bytes"


@pytest.mark.parametrize("name", ["policy_loss grpo", "linear_policy_loss ppo"])
@pytest.mark.not_on("triton", "cuda")
def test_hooks_of_the_caller_see_the_saved_gradients_alone(backend, name):
    # an inner graph whose outputs they return unchanged would never be freed
    entry, seen = ENTRIES[name], []
    inputs = entry.draw(3, 5, torch.float32)
    inputs = {k: x.requires_grad_(k in entry.leaves) for k, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        entry.call(backend, inputs)
    assert len(seen) == 2, [x.shape for x in seen]


def test_every_function_has_an_entry():
    functions = {n for n in fastrl.__all__ if callable(getattr(fastrl, n)) and n.islower()}
    tested = {entry.function.__name__ for entry in ENTRIES.values()}
    # counts are tested by what they are for, in test_micro_batches_are_the_whole_batch
    others = {"get_backend", "set_backend", "reduce_metrics", "global_normalizer"}
    assert functions - tested == others
