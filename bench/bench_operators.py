"""`pytest bench`: one provider of one case at a time under pytest-benchmark, which keeps a history.

pytest bench --selection cpu --benchmark-autosave -k "gae and eager"
"""

import pytest
import torch

from fastrl.bench.cases import cases
from fastrl.bench.timing import Calls, Plan


def test_operator(benchmark, size, step, name):
    (case,) = cases([size], [step], torch.device("cpu"))
    provider = next(one for one in case.providers if one.name == name)
    calls = Calls(case, torch.device("cpu"), Plan())
    calls.attempt(provider, calls.check)
    found = calls.found[provider.name]
    if found.failure:
        pytest.skip(found.failure)
    benchmark.group = case.name
    benchmark.extra_info.update(error=found.error, peak=found.peak, bytes_moved=case.bytes_moved)
    benchmark.pedantic(
        lambda call: call(),
        setup=lambda: ((calls.call(provider, next(calls.turns)),), {}),
        rounds=20,
        warmup_rounds=3,
    )
