"""NeMo RL's log-probabilities from hidden states on fastrl, on one rank and on two."""

import functools
import importlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fastrl.integrations import nemo_rl
from fastrl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs as ours
from tests.integrations import nemo_rl_formulas
from tests.integrations.packages import importable, stand_ins, without_modules
from tests.ops.ranks.gloo_ranks import on_ranks

HOME = "nemo_rl.distributed.model_utils"
NAME = ours.__name__
formula = getattr(nemo_rl_formulas, NAME)
on_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture
def package(monkeypatch):
    """A package with NeMo RL's module, made of the transcription."""
    stand_ins(monkeypatch, {"nemo_rl": {"__version__": "0.7.0"}, HOME: {NAME: formula}})
    return importlib.import_module(HOME)


def inputs(S=8, B=3, V=22, dtype=torch.float32):
    torch.manual_seed(0)
    hidden, head = torch.randn(S, B, 16).to(dtype), torch.randn(V, 16).to(dtype)
    return hidden, head, torch.randint(V, (B, S))


def results(function, given, temperature=None, part=None, group=None):
    """Return log-probabilities and the gradients of hidden states and head."""
    hidden, head = (x.detach().clone().requires_grad_() for x in given[:2])
    part = part or slice(0, len(head))
    found = function(
        hidden * 1.0, head, False, given[2], part.start, part.stop, group, chunk_size=3
    )
    if temperature:
        found.div_(temperature)  # as NeMo RL does
    torch.manual_seed(1)
    (found * torch.randn(found.shape)).sum().backward()
    return [x.double() for x in (found.detach(), hidden.grad, head.grad)]


def same(a, b, dtype):
    """Log-probabilities of 16 bits are not rounded, gradients are."""
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-5)
    near = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 3e-2)
    torch.testing.assert_close(a[1:], b[1:], rtol=near[0], atol=near[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("shape", [{}, {"B": 1}, {"S": 1}, {"S": 2, "V": 1}])
def test_values_and_gradients(shape, temperature, dtype):
    a, b = (results(f, inputs(**shape, dtype=dtype), temperature) for f in (ours, formula))
    same(a, b, dtype)


@functools.cache
def tensor_parallel():
    """Two ranks of a mesh: where it has four, their places are not those in the world."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2)).get_group(0)


def own(size, cut):
    """What this rank has of `size` rows or positions."""
    return slice(0, cut) if dist.get_rank(tensor_parallel()) == 0 else slice(cut, size)


#: positions, sequences, rows of the head on the first rank, temperature
CASES = [(8, 3, 11, None), (8, 3, 11, 0.7), (6, 1, 3, None), (2, 2, 21, None)]


def equal_to_one_process(dtype, theirs=None):
    """Or to the package's function, on the same ranks."""
    for S, B, cut, temperature in CASES:
        hidden, head, ids = inputs(S, B, dtype=dtype)
        part, places = own(22, cut), own(S, S // 2)
        mine = (hidden[places], head[part], ids)
        found = results(ours, mine, temperature, part, tensor_parallel())
        if theirs is None:
            logprobs, d_hidden, d_head = results(formula, (hidden, head, ids), temperature)
            expected = [logprobs, d_hidden[places], d_head[part]]
        else:
            theirs = getattr(importlib.import_module(HOME), NAME)
            expected = results(theirs, mine, temperature, part, tensor_parallel())
        same(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_gloo
def test_a_head_on_two_ranks(dtype):
    on_ranks(4, equal_to_one_process, dtype)


@pytest.mark.slow
@pytest.mark.skipif(importable(HOME) is None, reason="needs NeMo RL itself")
@on_gloo
def test_a_head_on_two_ranks_of_the_package():
    on_ranks(2, equal_to_one_process, torch.float32, HOME)


def without_gradients():
    """In inference, with a frozen head, and with hidden states that are not contiguous."""
    (hidden, head, ids), part, places = inputs(), own(22, 11), own(8, 4)
    mine = hidden[places].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    call = (mine, head[part], False, ids, part.start, part.stop, tensor_parallel())
    assert not ours(*call, inference_only=True).requires_grad
    found = ours(*call)
    torch.manual_seed(1)
    (found * torch.randn(found.shape)).sum().backward()
    expected, d_hidden, _ = results(formula, (hidden, head, ids))
    same([found.double(), mine.grad.double()], [expected, d_hidden[places]], torch.float32)


def refusals():
    """Every rank raises, also if the indices of only one are wrong."""
    (hidden, head, ids), part, group = inputs(), own(22, 11), tensor_parallel()
    mine, (start, end) = hidden[own(8, 4)], (part.start, part.stop)
    swapped = (11 - start, 33 - end)
    for indices in ((start, end + dist.get_rank(group)), swapped, (0, 22)):
        with pytest.raises(ValueError, match=r"in rank order, got .* for \[11, 11\] rows"):
            ours(mine, head[part], False, ids, *indices, group)
    with pytest.raises(ValueError, match=r"\[S / 2, B, H\] of each rank .* for \(8, 3, 16\)"):
        ours(hidden, head[part], False, ids, start, end, group)


@pytest.mark.slow
@pytest.mark.parametrize("function", [without_gradients, refusals])
@on_gloo
def test_other_calls_on_two_ranks(function):
    on_ranks(2, function)


def test_inference_needs_no_gradient():
    hidden, head, ids = inputs()
    arguments = (hidden.requires_grad_(), head, False, ids, 0, 22, None)
    assert not ours(*arguments, inference_only=True).requires_grad


def test_the_function_is_replaced_and_restored(package):
    own = getattr(package, NAME)
    with nemo_rl.use_fastrl() as replaced:
        assert getattr(package, NAME) is ours
        assert replaced.names == (f"{HOME}.{NAME}",)
    assert getattr(package, NAME) is own


def test_refusals(package, monkeypatch):
    def changed(tensor_parallel_hidden_states, output_weight): ...

    stand_ins(monkeypatch, {"nemo_rl": {"__version__": "0.7.0"}, HOME: {NAME: changed}})
    with pytest.raises(NotImplementedError, match=r"nemo_rl 0.7.0 takes \(tensor_parallel"):
        nemo_rl.use_fastrl()
    without_modules(monkeypatch, "nemo_rl")
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    with pytest.raises(ImportError, match="nemo_rl is not importable"):
        nemo_rl.use_fastrl()
