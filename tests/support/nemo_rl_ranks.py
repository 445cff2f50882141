"""What each of two tensor-parallel ranks computes with NeMo RL's function on fastrl."""

import functools
import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fastrl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs as ours
from tests.integrations.nemo_rl_formulas import from_parallel_hidden_states_to_logprobs as formula

MODULE = "nemo_rl.distributed.model_utils"
H, V = 16, 22
#: positions, sequences, rows of the head on the first rank, temperature
CASES = [(8, 3, 11, None), (8, 3, 11, 0.7), (6, 1, 3, None), (2, 2, 21, None)]


@functools.cache
def tensor_parallel():
    """Two ranks of a mesh: where it has four, their places are not those in the world."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2)).get_group(0)


def inputs(S, B, dtype):
    torch.manual_seed(0)
    hidden, head = torch.randn(S, B, H).to(dtype), torch.randn(V, H).to(dtype)
    return hidden, head, torch.randint(V, (B, S))


def own(size, cut):
    """What this rank has of `size` rows or positions."""
    return slice(0, cut) if dist.get_rank(tensor_parallel()) == 0 else slice(cut, size)


def results(function, given, part, temperature, group=None):
    """Return log-probabilities and the gradients of hidden states and head."""
    hidden, head = (x.detach().clone().requires_grad_() for x in given[:2])
    found = function(
        hidden * 1.0, head, False, given[2], part.start, part.stop, group, chunk_size=3
    )
    if temperature:
        found = found.div_(temperature)  # as NeMo RL does
    torch.manual_seed(1)
    (found * torch.randn(found.shape)).sum().backward()
    return [x.double() for x in (found.detach(), hidden.grad, head.grad)]


def of_the_ranks(function, given, S, cut, temperature):
    hidden, head, ids = given
    part = own(V, cut)
    mine = (hidden[own(S, S // 2)], head[part], ids)
    return results(function, mine, part, temperature, tensor_parallel())


def equal_to_one_process(dtype):
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 3e-2}
    for S, B, cut, temperature in CASES:
        given = inputs(S, B, dtype)
        logprobs, *found = of_the_ranks(ours, given, S, cut, temperature)
        expected, d_hidden, d_head = results(formula, given, slice(0, V), temperature)
        torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, [d_hidden[own(S, S // 2)], d_head[own(V, cut)]], **near)


def equal_to_the_package():
    theirs = getattr(importlib.import_module(MODULE), ours.__name__)
    for S, B, cut, temperature in CASES:
        given = inputs(S, B, torch.float32)
        a, b = (of_the_ranks(f, given, S, cut, temperature) for f in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def without_gradients():
    """In inference, with a frozen head, and with hidden states that are not contiguous."""
    S, B, cut = 8, 3, 11
    hidden, head, ids = inputs(S, B, torch.float32)
    part = own(V, cut)
    mine = hidden[own(S, S // 2)].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    call = (mine, head[part], False, ids, part.start, part.stop, tensor_parallel())
    assert not ours(*call, inference_only=True).requires_grad
    found = ours(*call)
    expected, d_hidden, _ = results(formula, (hidden, head, ids), slice(0, V), None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.manual_seed(1)
    (found * torch.randn(found.shape)).sum().backward()
    torch.testing.assert_close(mine.grad.double(), d_hidden[own(S, S // 2)], rtol=1e-5, atol=1e-5)


def refusals():
    """Every rank raises, also if the indices of only one are wrong."""
    hidden, head, ids = inputs(8, 3, torch.float32)
    mine, part, group = hidden[own(8, 4)], own(V, 11), tensor_parallel()
    start, end = part.start, part.stop
    swapped = (11 - start, V + 11 - end)
    for indices in ((start, end + dist.get_rank(tensor_parallel())), swapped, (0, V)):
        with pytest.raises(ValueError, match=r"in rank order, got .* for \[11, 11\] rows"):
            ours(mine, head[part], False, ids, *indices, group)
    with pytest.raises(ValueError, match=r"\[S / 2, B, H\] of each rank .* for \(8, 3, 16\)"):
        ours(hidden, head[part], False, ids, start, end, group)
