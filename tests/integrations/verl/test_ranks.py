"""verl's functions of a vocabulary that Megatron's tensor-parallel ranks share, on two ranks."""

import importlib
import itertools
import sys
import types

import pytest
import torch
import torch.distributed as dist

from fastrl.integrations.replacing import Replaced
from fastrl.integrations.verl.fused_linear import linear_cross_entropy
from fastrl.integrations.verl.vocabulary_parallel import REPLACEMENTS
from tests.integrations.compared import close
from tests.integrations.packages import importable, stand_ins
from tests.integrations.verl import formulas
from tests.integrations.verl.cases import fused_inputs, gradients
from tests.ops.ranks.gloo_ranks import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
]
MODULE = "verl.utils.megatron.tensor_parallel"
T, V = 37, 50


def vocab_parallel_entropy(vocab_parallel_logits): ...
def vocab_parallel_entropy_with_chunking(vocab_parallel_logits, chunk_size=2048): ...
def vocab_parallel_sum_pi_squared(vocab_parallel_logits): ...
def vocab_parallel_log_probs_from_logits(logits, labels): ...


def stand_in():
    """A module of verl with the functions above, and with the group of all ranks as Megatron's."""
    mpu = types.SimpleNamespace(get_tensor_model_parallel_group=lambda: dist.group.WORLD)
    functions = {item.name: globals()[item.name] for item in REPLACEMENTS}
    stand_ins(pytest.MonkeyPatch(), {MODULE: {"mpu": mpu, **functions}})
    return sys.modules[MODULE]


def installed():
    importlib.import_module("verl")
    module = importlib.import_module(MODULE)
    module.mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    return module


def columns(cut):
    return slice(0, cut) if dist.get_rank() == 0 else slice(cut, V)


def logits_of(dtype, grad=True):
    """All logits, and this rank's part of them."""
    generator = torch.Generator().manual_seed(1)
    whole = (3 * torch.randn(1, T, V, generator=generator)).to(dtype)
    part = whole[..., columns(V // 2)]
    return whole.clone().requires_grad_(grad), part.clone().requires_grad_(grad)


def of_logits(logits, labels):
    """Log-probabilities and entropies by verl's formulas, `[T]`."""
    found = formulas.logprobs_from_logits(logits, labels), formulas.entropy_from_logits(logits)
    return [x.flatten() for x in found]


def near(dtype):
    return 1e-5 if dtype == torch.float32 else 1e-2


def values_and_gradients(place):
    """The properties that verl's tests check, for each dtype and shape; no logits are altered."""
    vp, labels, upstream = place(), torch.randint(V, (1, T)), torch.randn(T)
    with Replaced("verl", REPLACEMENTS) as replaced:
        assert len(replaced.names) == 4
        names, shapes = (
            ("log_probs_from_logits", "entropy", "entropy_with_chunking"),
            ((1, T), (T,)),
        )
        dtypes = (torch.float32, torch.bfloat16)
        for dtype, name, shape in itertools.product(dtypes, names, (*shapes, (1, 1, T))):
            whole, part = logits_of(dtype)
            given = (labels.reshape(shape),) if name == names[0] else ()
            found = getattr(vp, f"vocab_parallel_{name}")(part.reshape(*shape, -1), *given)
            assert (found.shape, found.dtype) == (shape, torch.float32)
            expected = of_logits(whole, labels)[0 if given else 1]
            close(found.flatten(), expected)
            (a,) = gradients((found,), (upstream,), (part,))
            (b,) = gradients((expected,), (upstream,), (whole,))
            close(a, b[..., columns(V // 2)], near(dtype))
            assert torch.equal(part, logits_of(dtype)[1])
        for dtype in dtypes:
            whole, part = logits_of(dtype, grad=False)
            found = vp.vocab_parallel_sum_pi_squared(part)
            close(found, formulas.calculate_sum_pi_squared_from_logits(whole))
            assert torch.equal(part, logits_of(dtype)[1])


def of_one_tensor(place):
    """Entropy and log-probabilities of the same logits, either first, with gradients of either.

    The engine divides its logits in place before.
    """
    vp, labels, upstream = place(), torch.randint(V, (1, T)), torch.randn(2, T)
    functions = (
        lambda x: vp.vocab_parallel_log_probs_from_logits(x, labels),
        lambda x: vp.vocab_parallel_entropy(x),
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    orders, uses = ((0, 1), (1, 0)), ((0,), (1,), (0, 1))
    with Replaced("verl", REPLACEMENTS):
        for dtype, order, used in itertools.product(dtypes, orders, uses):
            whole, part = logits_of(dtype)
            logits, given = (part * 1).mul_(1), [upstream[i] for i in used]
            found = {i: functions[i](logits) for i in order}
            results, wanted = [found[i].flatten() for i in used], of_logits(whole, labels)
            (b,) = gradients([wanted[i] for i in used], given, (whole,))
            if dtype == torch.float32 and order == (1, 0) and used == (0, 1):
                # so it does in verl: the forward of Megatron's loss overwrites float32 logits
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    gradients(results, given, (part,))
                continue
            (a,) = gradients(results, given, (part,))
            close(a, b[..., columns(V // 2)], near(dtype))
            unchanged = torch.equal(logits, part)
            assert unchanged == (dtype != torch.float32 or 0 not in used)


@pytest.mark.parametrize("function", [values_and_gradients, of_one_tensor])
@pytest.mark.parametrize("place", [stand_in, installed])
def test_functions_of_logits(function, place):
    if place is installed and importable(MODULE) is None:
        pytest.skip("needs verl and Megatron")
    on_ranks(2, function, place)


def labels_outside():
    """A label of -100 gives 0, and one outside the vocabulary an error on every rank."""
    vp, labels = stand_in(), torch.randint(V, (1, T))
    labels[0, 3] = -100
    with Replaced("verl", REPLACEMENTS):
        whole, part = logits_of(torch.float32)
        found = vp.vocab_parallel_log_probs_from_logits(part, labels)
        expected = of_logits(whole, labels.clamp(min=0))[0].index_fill(0, torch.tensor(3), 0)
        close(found.flatten(), expected)
        labels[0, 3] = V
        with pytest.raises(ValueError, match=rf"must lie in \[0, {V}\)"):
            vp.vocab_parallel_log_probs_from_logits(part, labels)


def heads_in_parts():
    """The gradient of the hidden states is this rank's part of the sum, which Megatron adds up."""
    hidden, weight, labels, upstream = fused_inputs(T, 40, V)
    expected = formulas.linear(hidden, weight, labels, 1.5)
    d_hidden, d_weight = gradients(expected, upstream, (hidden, weight))
    for cut in (V // 2, 3):
        part = weight.detach()[columns(cut)].clone().requires_grad_()
        states = hidden.detach().transpose(0, 1).clone().requires_grad_()  # [T, 1, H]
        found = linear_cross_entropy(states, part, labels, 1.5, "none", dist.group.WORLD)
        close(found, expected)
        total, d_part = gradients(found, upstream, (states, part))
        close(d_part, d_weight[columns(cut)])
        total = total.transpose(0, 1).contiguous()
        assert (total - d_hidden).abs().max() > 1e-2
        dist.all_reduce(total)
        close(total, d_hidden)
    # without a split, part and whole are the same, as with a tensor-parallel size of 1
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = linear_cross_entropy(hidden, weight, labels, 1.5, "none", alone)
    close(gradients(found, upstream, (hidden, weight)), (d_hidden, d_weight))


@pytest.mark.parametrize("function", [labels_outside, heads_in_parts])
def test_labels_and_heads(function):
    on_ranks(2, function)
