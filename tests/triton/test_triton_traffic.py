"""The bytes that kernels request of logits and gradients, counted in the interpreter."""

import math

import numpy as np
import pytest
import torch

from fastrl import Objective
from fastrl.contract import LossArguments, RowArguments
from fastrl.library import operators
from fastrl.triton.runtime.registration import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
]

N, V = 3, 20_000  # a whole block and a tail
BYTES = 2
GRANULE = 16


class Traffic:
    """The addresses that are loaded from and stored to, in a range of memory."""

    def __init__(self, monkeypatch):
        from triton.runtime.interpreter import InterpreterBuilder

        self.loads, self.stores = [], []
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder, pointers, mask, *others):
            self._note(self.loads, pointers, mask)
            return load(builder, pointers, mask, *others)

        def counted_store(builder, pointers, value, mask, *others):
            self._note(self.stores, pointers, mask)
            return store(builder, pointers, value, mask, *others)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)

    @staticmethod
    def _note(events, pointers, mask):
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        events.append((addresses.astype(np.int64).ravel(), width))

    @staticmethod
    def _bytes(events, begin, end):
        """Every byte of the range that was requested, as often as it was."""
        found = [np.add.outer(at, np.arange(width)).ravel() for at, width in events]
        every = np.concatenate([np.zeros(0, np.int64), *found])
        return every[(every >= begin) & (every < end)] - begin

    def of(self, tensor):
        """How often each byte of a tensor's memory was loaded and stored."""
        begin = tensor.data_ptr()
        size = tensor.untyped_storage().nbytes()
        return tuple(
            np.bincount(self._bytes(events, begin, begin + size), minlength=size)
            for events in (self.loads, self.stores)
        )


@pytest.fixture
def traffic(monkeypatch):
    operators("triton").scale_(torch.zeros(1), torch.ones(()))  # corrects the interpreter first
    return Traffic(monkeypatch)


def one_pass(logits, *, inplace, narrow=False, mask=None):
    shape = logits.shape[:2]
    ids = torch.arange(shape.numel()).view(shape) * 7
    rows = RowArguments(ids, mask, -100, None, 1.0, 1.0, 0.0)
    row = torch.ones(shape)
    loss = LossArguments(row, row, None, None, None, row - 12, row - 12, None)
    arguments = (logits, *rows, *loss, *Objective(kl_coef=0.1).arguments)
    if inplace:
        return operators("triton").logits_policy_loss_fwd_(*arguments, narrow)
    return operators("triton").logits_policy_loss_fwd(*arguments)


def test_one_pass_reads_logits_twice_and_writes_the_gradient_once(traffic):
    """2NV bytes each; the second read, of a row that was read just before, finds it in cache.

    Beyond these, only the token of each row: its logit is read and its gradient stored by itself.
    """
    logits = torch.randn(1, N, V).bfloat16()
    *_, grad = one_pass(logits, inplace=False)
    loads, stores = traffic.of(logits)
    assert loads.sum() == (2 * N * V + N) * BYTES
    assert loads.min() == 2
    assert stores.sum() == 0
    loads, stores = traffic.of(grad)
    assert loads.sum() == 0
    assert stores.sum() == (N * V + N) * BYTES
    assert stores.min() == 1


def test_in_place_the_same_memory_is_read_twice_and_written_once(traffic):
    logits = torch.randn(1, N, V).bfloat16()
    one_pass(logits, inplace=True)
    loads, stores = traffic.of(logits)
    assert loads.sum() == (2 * N * V + N) * BYTES
    assert stores.sum() == (N * V + N) * BYTES


def test_a_narrow_gradient_is_half_of_what_is_read(traffic):
    logits = torch.randn(1, N, V)
    one_pass(logits, inplace=True, narrow=True)
    loads, stores = traffic.of(logits)
    assert loads.sum() == (2 * N * V + N) * 4
    assert stores.sum() == (N * V + N) * 2


def test_rows_that_do_not_count_are_not_read(traffic):
    logits = torch.full((1, N, V), math.nan).bfloat16()
    *_, grad = one_pass(logits, inplace=False, mask=torch.zeros(1, N, dtype=torch.bool))
    loads, _ = traffic.of(logits)
    _, stores = traffic.of(grad)
    assert loads.sum() == 0
    assert (stores == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 1, 4, 7])
@pytest.mark.parametrize("length", [5, 1021])
def test_nothing_is_read_beyond_the_16_bytes_of_a_rows_ends(traffic, start, length, dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    buffer = torch.zeros(64 + N * length, dtype=dtype)
    skip = (-buffer.data_ptr() % GRANULE) // size + 16 + start
    logits = buffer[skip : skip + N * length].view(1, N, length)
    one_pass(logits, inplace=True)
    loads, stores = traffic.of(buffer)
    begin, end = skip * size, (skip + N * length) * size
    place = buffer.data_ptr() % GRANULE
    first = (begin + place) // GRANULE * GRANULE - place
    last = -(-(end + place) // GRANULE) * GRANULE - place
    assert loads[:first].sum() == loads[last:].sum() == 0
    assert stores[:begin].sum() == stores[end:].sum() == 0
    assert (stores[begin:end] >= 1).all()
    assert loads[begin:end].min() >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_factor_of_one_costs_no_traffic_and_others_a_read_and_a_write(traffic, dtype):
    gradient = torch.randn(20_000).to(dtype)
    operators("triton").scale_(gradient, torch.tensor(1.0))
    loads, stores = traffic.of(gradient)
    assert loads.sum() == stores.sum() == 0
    operators("triton").scale_(gradient, torch.tensor(0.5))
    loads, stores = traffic.of(gradient)
    assert (loads == 1).all()
    assert (stores == 1).all()
