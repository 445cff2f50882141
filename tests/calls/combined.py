"""Cases of the fuzzer by their options, and their examination against the oracle."""

import itertools
import math
import random

import pytest
import torch

from tests.calls.case import IN_TORCH, Case
from tests.calls.examine import examine

#: Cases of a row of options, of each of which a fuzzer draws more. Kernels of GPUs take long on a
#: CPU, and so does Triton's compiler.
SOME = {"reference": 100, "cpu": 150, "triton": 4, "cuda": 20}


#: Combinations of a row of options that are made at all; of more, random ones.
MOST = 4000


def each(**options):
    """All combinations of options, of which those that are lists have several values.

    `also` has options that come together; what is None is left out.
    """
    values = [x if isinstance(x, list) else [x] for x in options.values()]
    every, chance = itertools.product(*values), random.Random(20260923)
    if math.prod(map(len, values)) > MOST:
        every = (tuple(map(chance.choice, values)) for _ in range(MOST))
    combined = []
    for chosen in every:
        found = {k: x for k, x in zip(options, chosen, strict=True) if x is not None}
        combined.append(found | found.pop("also", {}))
    return combined


def cases(backend, function, options):
    """The combinations of options that a backend takes, in random order."""
    found = [
        Case(function, **{"threads": torch.get_num_threads(), **one})
        for one in each(**options)
        if backend == "reference" or one.get("dtype") != "float64"
    ]
    return spread(random.Random(20260923).sample(found, len(found)))


def spread(cases):
    """Put first what has a value of an option that no case before it has."""
    seen, new, others = set(), [], []
    for case in cases:
        values = {(name, repr(value)) for name, value in case.options.items() if name != "seed"}
        (others if values <= seen else new).append(case)
        seen |= values
    return new + others


def assert_value(backend, case, device="cpu"):
    """Compare values and gradients of a case with the oracle's."""
    threads = torch.get_num_threads()  # which a case sets
    try:
        found = examine(case, backend, device)
    finally:
        torch.set_num_threads(threads)
    assert not found.refused, case
    assert not found.differences, f"{case}: {'; '.join(map(str, found.differences))}"


def assert_values(backend, function, *, some=1, device="cpu", **options):
    """Compare with the oracle in `some` times the usual number of combinations of options."""
    if function in IN_TORCH and backend in ("triton", "cuda"):
        pytest.skip("plain torch has no kernels")
    for case in cases(backend, function, options)[: some * SOME[backend]]:
        assert_value(backend, case, device)
