"""The fallback takes few passes over the logits, and no memory of their size but the gradient's."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastrl
from fastrl.reference import row_blocks

B, T, V = 4, 16, 512
WITHOUT_WORK = ("empty", "empty_like", "new_empty", "gather", "scatter", "index_select")


class Passes(TorchDispatchMode):
    """Counts the elements of rows of logits that operators touch, and tensors of all rows."""

    def __init__(self):
        super().__init__()
        self.elements, self.names, self.allocated = 0, [], 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        outputs = operator(*args, **(kwargs or {}))
        name = operator._schema.name.partition("::")[2]
        if operator.is_view:
            return outputs
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        returned = outputs if isinstance(outputs, tuple | list) else [outputs]
        made = [x for x in returned if isinstance(x, torch.Tensor)]
        sizes = [x.numel() for x in (*given, *made) if x.dim() == 3 and x.shape[-1] == V]
        if sizes and name not in WITHOUT_WORK:
            self.elements += max(sizes)
            self.names.append(name)
        memory = {x.untyped_storage().data_ptr() for x in given}
        new = [x for x in made if x.untyped_storage().data_ptr() not in memory]
        self.allocated += sum(x.numel() >= B * T * V for x in new)
        return outputs

    @property
    def passes(self):
        return self.elements / (B * T * V)


def drawn(dtype=torch.float32, peak=0.0):
    logits = torch.randn(B, T, V)
    logits[..., 0] += peak
    return logits.to(dtype), torch.randint(V, (B, T))


def loss(logits, ids, mask=None):
    old, mask = torch.full((B, T), -6.0), torch.ones(B, T) if mask is None else mask
    advantages = torch.randn(B)
    options = {"old_logprobs": old, "backend": "reference"}
    return fastrl.logits_policy_loss(logits, ids, advantages, mask, **options).loss


def logprobs(logits, ids, **options):
    return fastrl.token_logprobs(logits, ids, **options, backend="reference")


def entropies(logits, ids):
    return fastrl.token_stats(logits, ids, outputs=("entropy",), backend="reference").entropy


@pytest.fixture
def several_blocks(monkeypatch):
    monkeypatch.setattr(row_blocks, "_CPU_BYTES", 8 * V * 4 // torch.get_num_threads())


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize(
    ("function", "peak", "forward", "backward"),
    [
        (logprobs, 0.0, 3, 2),  # softmax, largest logit, largest p; softmax, times the slope
        (logprobs, 30.0, 6, 2),  # without the largest: divided, its 1 removed, summed
        (entropies, 0.0, 6, 6),  # t = z - max, p t, sum
        (loss, 0.0, 6, 1),  # the p of the forward times the slope
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_and_memory(function, peak, forward, backward, dtype):
    logits, ids = drawn(dtype, peak)
    converted = dtype != torch.float32
    leaf = logits.requires_grad_()
    with Passes() as first:
        result = function(leaf, ids)
    assert first.passes <= forward + converted, first.names
    assert first.allocated == (function is loss)
    with Passes() as second:
        result.sum().backward()
    assert second.passes <= backward + 2 * converted, second.names
    assert second.allocated == (function is not loss or converted)


@pytest.mark.usefixtures("several_blocks")
def test_options_cost_a_pass_only_where_they_are_used():
    logits, ids = drawn()
    with Passes() as plain:
        logprobs(logits, ids, temperature=torch.ones(B, T))
    assert plain.passes <= 5, plain.names  # z - max, times 1 / temperature
    mask = torch.zeros(B, T)
    mask[0] = 1
    with Passes() as masked:
        logprobs(logits, ids, mask=mask)
    assert masked.passes <= 3 / B, masked.names  # masked rows are left out
