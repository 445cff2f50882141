"""The bytes that kernels load of logits and gradients, and store: counted one by one."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch

import fastrl
from fastrl.library import operators
from tests.gpu.rows import loss_of, make_rows, one_pass, rows_of, saved, token_stats
from tests.ptx.machine import machine

pytestmark = pytest.mark.kernels_alone  # a CPU counts no bytes
GRANULE = 16
#: How often a row is read by the loss in one pass; the second time of Triton's finds it in cache.
READS = {"triton": 2, "cuda": 1}
MOST_WARPS = 16


@contextlib.contextmanager
def counted(*tensors):
    """Yield a list that gets the counts of loads and stores of each byte of the tensors' memory."""
    found, counts = [], []
    watch = machine().library.ptx_watch
    for place, tensor in enumerate(tensors):
        size = tensor.untyped_storage().nbytes()
        counts.append([np.zeros(size, np.uint8) for _ in range(2)])
        pointers = (ctypes.c_void_p(count.ctypes.data) for count in counts[-1])
        watch(place, ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(size), *pointers)
    try:
        yield found
    finally:
        for place in range(len(tensors)):
            watch(place, ctypes.c_uint64(0), ctypes.c_uint64(0), None, None)
    found += counts


def elements(counts, shape, size):
    """Counts of bytes as those of elements, all of whose bytes must count alike."""
    counts = counts[: np.prod(shape) * size].reshape(*shape, size)
    assert (counts == counts[..., :1]).all()
    return counts[..., 0]


def chosen(token_ids, mask, V):
    """The token's logit is read once more than the others, and its gradient written once more."""
    own = torch.zeros(*mask.shape, V, dtype=torch.int64).scatter_(-1, token_ids[..., None], 1)
    return (own * mask[..., None])[0].numpy()


def assert_read(backend, loads, times, chosen):
    """Of the logits of a row one pass reads each equally often.

    Triton's reads the 32 of the token's lane once more, in every warp, over which it sums without
    the token.
    """
    more = loads - times
    if backend == "triton":
        assert ((more >= 0) & (more <= MOST_WARPS)).all()
        assert ((more > 0).sum(-1) <= 32 * chosen.any(-1)).all()
        assert (more[chosen > 0] >= 1).all()
    else:
        assert not more.any()


UNALIGNED = pytest.mark.not_on("triton")  # which reads whole granules at the ends of rows


@pytest.mark.parametrize(
    ("V", "beside"), [(4096, 0), pytest.param(5001, 2, marks=UNALIGNED), (20_000, 0)]
)
@pytest.mark.parametrize("inplace", [True, False])
def test_one_pass_reads_logits_and_writes_the_gradient_once(backend, V, beside, inplace):
    N, reads = 9, READS[backend]
    whole, logits, token_ids, mask = make_rows(V, torch.bfloat16, beside, 1, N)
    loss, rows = loss_of(logits, token_ids, mask), rows_of(token_ids, mask)
    with counted(whole) as found:
        if inplace:
            given = (logits, *rows, *loss[0], *loss[1], False)
            operators(backend).logits_policy_loss_fwd_(*given)
        else:
            one_pass(backend, logits, rows, *loss)
    loads, stores = (elements(x, (N + 1, V + beside), 2) for x in found[0])
    counts, again = mask[0].numpy()[:, None], chosen(token_ids, mask, V)
    assert_read(backend, loads[:N, :V], reads * counts, again)
    assert not loads[:, V:].any()  # nothing beside the rows, nor of one that does not count
    assert not loads[N].any()
    assert not stores[:, V:].any()
    assert (stores[:N, :V] == (1 + again if inplace else 0)).all()


@pytest.mark.parametrize("operator", ["logits_policy_loss_fwd_", "token_stats_bwd_"])
@pytest.mark.parametrize("V", [1000, pytest.param(1001, marks=UNALIGNED)])
def test_a_narrow_gradient_is_half_of_what_is_read(backend, operator, V):
    stride, N = 1008, 4
    memory = torch.randn(N, stride)
    logits = memory.as_strided((1, N, V), (N * stride, stride, 1))
    token_ids, mask = torch.randint(V, (1, N)), torch.tensor([[True, True, True, False]])
    rows, loss = rows_of(token_ids, mask), loss_of(logits, token_ids, mask)
    in_one_pass = operator == "logits_policy_loss_fwd_"
    rest = (*loss[0], *loss[1])
    if not in_one_pass:
        stats = token_stats(backend, logits, rows)
        rest = (*saved(stats), *(torch.randn(1, N) for _ in range(3)))
    with counted(memory) as found:
        getattr(operators(backend), operator)(logits, *rows, *rest, True)
    loads = elements(found[0][0], (N, stride), 4)
    stores = elements(found[0][1], (N, 2 * stride), 2)
    again = chosen(token_ids, mask, V)
    reads = READS[backend]
    counts = mask[0].numpy()[:, None]
    if in_one_pass:
        assert_read(backend, loads[:, :V], reads * counts, again)
    else:
        assert (loads[:, :V] == counts + again).all()
    assert not loads[:, V:].any()
    assert (stores[:, stride : stride + V] == 1 + again).all()
    assert not stores[:, :stride].any()
    assert not stores[:, stride + V :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 1, 4, 7])
@pytest.mark.parametrize("length", [5, 1021])
def test_nothing_is_read_beyond_the_16_bytes_of_a_rows_ends(backend, start, length, dtype):
    size, N = dtype.itemsize, 3
    buffer = torch.zeros(64 + N * length, dtype=dtype)
    skip = (-buffer.data_ptr() % GRANULE) // size + 16 + start
    logits = buffer[skip : skip + N * length].view(1, N, length)
    token_ids, mask = torch.zeros(1, N, dtype=torch.int64), torch.ones(1, N, dtype=torch.bool)
    loss, rows = loss_of(logits, token_ids, mask), rows_of(token_ids, mask)
    with counted(buffer) as found:
        operators(backend).logits_policy_loss_fwd_(logits, *rows, *loss[0], *loss[1], False)
    loads, stores = found[0]
    begin, end = skip * size, (skip + N * length) * size
    place = buffer.data_ptr() % GRANULE
    first = (begin + place) // GRANULE * GRANULE - place
    last = -(-(end + place) // GRANULE) * GRANULE - place
    assert loads[:first].sum() == loads[last:].sum() == 0
    assert stores[:begin].sum() == stores[end:].sum() == 0
    assert (stores[begin:end] >= 1).all()
    assert loads[begin:end].min() >= READS[backend]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_factor_of_one_costs_no_traffic_and_others_a_read_and_a_write(backend, dtype):
    gradient = torch.randn(20_000).to(dtype)
    for factor, times in ((1.0, 0), (0.5, 1)):
        with counted(gradient) as found:
            operators(backend).scale_(gradient, torch.tensor(factor))
        for counts in found[0]:
            assert (counts == times).all()


@pytest.mark.not_on("triton")  # whose blocks overlap at their ends
def test_each_token_is_moved_once_in_vectors(backend, monkeypatch):
    tokens, others = torch.randn(2, 384), torch.randn(2, 384)
    with counted(tokens) as found:
        fastrl.gae(tokens, others, backend=backend)
    assert (found[0][0] == 1).all()
    given = {"mask": torch.ones(2, 384), "old_logprobs": others, "backend": backend}
    with counted(tokens) as found:
        fastrl.policy_loss(tokens, others, **given)
    assert (found[0][0] == 1).all()
