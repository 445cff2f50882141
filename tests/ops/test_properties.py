"""What holds of the results of every function: masks, packing, micro-batches, broken numbers.

Properties of calls (repeats, autograd, memory) are in test_properties_of_calls.py.
"""

import math

import pytest
import torch

import fastrl
from fastrl.contract import METRICS
from tests.calls.entries import cut, entries, outcome, pack, per_token, sequences_of
from tests.ops.closeness import assert_close, assert_same
from tests.ops.inputs import widest

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

#: Values that a masked position may have without changing a result.
POISONS = (float("nan"), float("inf"), float("-inf"), 1e30, -1e30)
#: The sequences whose micro-batch splits must agree.
LENGTHS = (1, 3, 7, 50, 2, 9, 100, 11)


def has_mask(entry):
    return "mask" in entry.draw(1, 1, torch.float32)


masked = entries(has_mask)


def poisoned(entry, inputs, poison, names):
    """The inputs with the poison at masked tokens, and in what a masked sequence has."""
    off, dirty = ~inputs["mask"], dict(inputs)
    for name in names:
        x = inputs[name]
        where = off.all(1) if name in entry.per_sequence else off
        dirty[name] = x.masked_fill(
            where.view(*where.shape, *[1] * (x.dim() - where.dim())), poison
        )
    return dirty


@pytest.mark.parametrize("poison", POISONS, ids=str)
@masked
def test_masked_values_are_inert(backend, entry, poison):
    inputs = entry.draw(5, 6, torch.float32)
    names = [*per_token(entry, inputs), *entry.per_sequence]
    dirty = poisoned(entry, inputs, poison, names)
    off = ~inputs["mask"]
    if "token_ids" in dirty:
        dirty["token_ids"] = dirty["token_ids"].masked_fill(off, 10**9)
    for name in {"terminated", "truncated"} & dirty.keys():
        dirty[name] = dirty[name] ^ (off & (torch.rand(5, 6) < 0.5))
    found = outcome(entry, backend, dirty)
    assert_same(found, outcome(entry, backend, inputs))
    for name, x in found.items():
        if x.shape[:2] == off.shape:
            assert (x[off] == 0).all(), name


@pytest.mark.not_on("triton")  # long
@masked
def test_one_masked_value_is_inert(backend, entry):
    """Beside usual numbers, which another poison does not hide."""
    inputs = entry.draw(3, 4, torch.float32)
    clean = outcome(entry, backend, inputs)
    for name in [*per_token(entry, inputs), *entry.per_sequence]:
        for poison in (math.nan, math.inf):
            dirty = poisoned(entry, inputs, poison, [name])
            assert_same(outcome(entry, backend, dirty), clean, (name, poison))


@pytest.mark.parametrize("form", ["padded", "packed"])
@masked
def test_nothing_but_masked_tokens_gives_zero(backend, entry, form):
    inputs = entry.draw(4, 5, torch.float32)
    inputs["mask"][:] = False
    for name in [*per_token(entry, inputs), *entry.per_sequence]:
        inputs[name] = torch.full_like(inputs[name], math.nan)
    if form == "packed":
        inputs = cut(entry, inputs, [5, 0, 2, 3])
    given = [{}]
    if entry.joins == "loss":
        given.append({"normalizer": normalizer(entry, torch.ones(3, 5))})
    for more in given:
        for name, x in outcome(entry, backend, inputs, **more).items():
            assert (x == 0).all(), name


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
@entries()
def test_a_batch_without_tokens(backend, entry, shape):
    inputs = entry.draw(*shape, torch.float32)
    for name, x in outcome(entry, backend, inputs).items():
        assert (x == 0).all(), name
        if name.startswith("d "):
            assert x.shape == inputs[name[2:]].shape


@entries(lambda e: has_mask(e) and "dim" not in e.options)
def test_packed_equals_padded(backend, entry):
    """Also where sequences are empty, and whatever lies beyond the end of a padded one."""
    # of four sequences, which kernels take together if their lengths are equal, some are longer
    lengths = [3, 0, 7, 1, 1, 2, 3, 5, 4, 4, 4, 4, 5, 0]
    shape = (len(lengths), 7)
    inputs = entry.draw(*shape, widest(backend))
    inputs["mask"] &= torch.arange(7) < torch.tensor(lengths)[:, None]
    names = per_token(entry, inputs)
    wanted = outcome(entry, backend, poisoned(entry, inputs, math.nan, names))
    found = outcome(entry, backend, cut(entry, inputs, lengths))
    assert_close(found, pack(wanted, shape, lengths))


def together(parts):
    """What the outcomes of packed micro-batches are as one."""
    found = {}
    for name, x in parts[0].items():
        each = [part[name] for part in parts]
        if name in ("loss", "d weight"):
            found[name] = sum(each)
        elif x.dim():
            found[name] = torch.cat(each)
    if f"metric {METRICS[0]}" in parts[0]:
        names = [name for name in METRICS if f"metric {name}" in parts[0]]  # kl may be absent
        metrics = [{name: part[f"metric {name}"] for name in names} for part in parts]
        reduced = fastrl.reduce_metrics(metrics)
        found |= {f"metric {name}": x for name, x in reduced.items()}
    return found


@pytest.mark.not_on("triton")  # many programs
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("size", [1, 3])
@entries(lambda e: e.joins != "batch")
def test_micro_batches_are_the_whole_batch(backend, entry, size, form):
    """Each padded to its own length, with the global normalizer if its results are added up."""
    T = max(LENGTHS)
    inputs = entry.draw(len(LENGTHS), T, widest(backend))
    ragged, more = "mask" in inputs and "dim" not in entry.options, {}
    if "mask" in inputs:
        inputs["mask"] = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
        inputs["mask"][3, ::2] = False
        inputs["mask"][4] = False
    if entry.joins == "loss":
        more = {"normalizer": normalizer(entry, inputs["mask"])}
    whole = pack(outcome(entry, backend, inputs), (len(LENGTHS), T), LENGTHS)
    parts = []
    for first in range(0, len(LENGTHS), size):
        lengths = LENGTHS[first : first + size]
        width = max(lengths) if ragged else T
        part = sequences_of(inputs, slice(first, first + size), width)
        part = cut(entry, part, lengths) if ragged and form == "packed" else part
        found = outcome(entry, backend, part, **more)
        parts.append(pack(found, (len(lengths), width), lengths))
    found = together(parts)
    assert_close(found, {name: whole[name] for name in found})
    products = {"hidden", "teacher.hidden"} & inputs.keys()  # a BLAS may add otherwise
    if backend == "cpu" and entry.joins == "sequences" and not products:
        assert_same(found, {name: whole[name] for name in found})


def normalizer(entry, mask):
    """The denominators of a whole batch."""
    given = {k: x for k, x in entry.options.items() if k in ("objective", "group_size")}
    if "objective" not in given:
        given["aggregation"] = entry.options["aggregation"]
    return fastrl.global_normalizer(mask, **given)


def broken_inputs(entry):
    """The inputs and the numbers at a counted token that must reach the result."""
    for name in per_token(entry, entry.draw(1, 1, torch.float32)):
        unused = name == "entropy" and not entry.options["objective"].entropy_coef
        if name not in ("temperature", "bootstrap_values") and not unused:
            yield name, math.nan
        if name in entry.infinite:
            yield from ((name, math.inf), (name, -math.inf))


def in_the_loss(inputs):
    """Changes with which no token of a loss is dropped, nor the one that is looked at clipped."""
    weights = {"policy_weights", "advantages"} & inputs.keys()
    changed = {name: inputs[name].abs() + 0.1 for name in weights}
    if "logprobs" in inputs and "old_logprobs" in inputs:
        changed["old_logprobs"] = inputs["logprobs"].clone()
    if "rollout_top_k.logprobs" in inputs:
        ids, logprobs = (inputs[f"rollout_top_k.{name}"] for name in ("token_ids", "logprobs"))
        present = torch.arange(ids.shape[-1]).expand_as(ids).clone()
        changed["rollout_top_k.token_ids"] = present
        changed["rollout_top_k.logprobs"] = torch.full_like(logprobs, -4.0)
    return changed


@pytest.mark.parametrize("form", ["padded", "packed"])
@entries(lambda e: e.joins != "batch" and e.function is not fastrl.token_weights)
def test_a_broken_number_reaches_the_results_of_its_token_alone(backend, entry, form):
    """Comparisons with NaN are false, so that a NaN could look like a clipped number."""
    inputs = entry.draw(3, 4, torch.float32)
    inputs |= {k: torch.ones(3, 4, dtype=torch.bool) for k in ("mask",) if k in inputs}
    inputs |= {k: torch.zeros(3, 4) for k in ("terminated", "truncated") if k in inputs}
    inputs |= in_the_loss(inputs)
    clean = outcome(entry, backend, inputs)
    for name, bad in broken_inputs(entry):
        dirty = {**inputs, name: inputs[name].clone()}
        dirty[name][1, 2] = bad
        if form == "packed" and "mask" in inputs and "dim" not in entry.options:
            dirty = cut(entry, dirty, [4, 4, 4])
        found = outcome(entry, backend, dirty)
        of_loss = "loss" in found
        if of_loss:
            assert not found["loss"].isfinite(), (name, bad)
        for key, x in found.items():
            if x.dim() == 0 or key == "d weight":
                continue
            x = x.reshape(clean[key].shape)
            assert torch.equal(x[[0, 2]], clean[key][[0, 2]]), (name, bad, key)
            if key.startswith("d "):
                moves = (
                    bad != bad and name != "entropy" and entry.function is not fastrl.masked_mean
                )
                reaches = moves and key[2:] == entry.leaves[0]
            else:
                beside = ("divergence", "teacher_entropy", "result")
                own = key in beside if name.startswith("teacher") else key != "teacher_entropy"
                reaches = not of_loss and x.is_floating_point() and own
            at = x[1, 2] if x.dim() > 1 else x[1]
            finite = at.isfinite()
            # of logits it reaches those that the row has kept
            spared = finite.all() if "kept" in inputs and x.dim() > 2 else finite.any()
            assert not reaches or not spared, (name, bad, key)
