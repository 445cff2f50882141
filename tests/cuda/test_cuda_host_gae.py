"""GAE on the CUDA kernel in its host build: the operator's own tests, long rows, the sanitizers."""

import pytest
import torch

import fastrl
from tests.ops.test_gae import *  # noqa: F403
from tests.support.cuda_host import assert_program_passes
from tests.support.cuda_on_host import backend, registered  # noqa: F401


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("gae", sanitizer, warp=warp)


@pytest.mark.parametrize("bootstrap", [None, "sequence", "token"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_of_many_chunks(backend, rows, bootstrap):  # noqa: F811
    length = 2600 // rows  # the host build has chunks of 256 tokens
    inputs = {name: torch.randn(rows, length) for name in ("rewards", "values")}
    inputs["mask"] = torch.rand(rows, length) < 0.8
    inputs["truncated"] = torch.rand(rows, length) < 0.001
    if bootstrap:
        shape = (rows,) if bootstrap == "sequence" else (rows, length)
        inputs["bootstrap_values"] = torch.randn(shape)
    result = fastrl.gae(**inputs, gamma=1.0, lam=0.99, backend=backend)
    again = fastrl.gae(**inputs, gamma=1.0, lam=0.99, backend=backend)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = fastrl.gae(**double, gamma=1.0, lam=0.99, backend="reference")
    torch.testing.assert_close(result.advantages.double(), exact.advantages, rtol=0, atol=2e-5)
    torch.testing.assert_close(result.returns.double(), exact.returns, rtol=0, atol=2e-5)
    assert torch.equal(result.advantages, again.advantages)


@pytest.mark.parametrize("packed", [False, True])
def test_a_nan_stays_in_its_sequence(backend, packed):  # noqa: F811
    rewards, values = torch.randn(1, 1200), torch.randn(1, 1200)
    clean = fastrl.gae(rewards.view(4, 300), values.view(4, 300), backend=backend)
    rewards[0, 700] = float("nan")
    if packed:
        bounds = torch.tensor([0, 300, 600, 900, 1200], dtype=torch.int32)
        dirty = fastrl.gae(rewards[0], values[0], cu_seqlens=bounds, backend=backend)
    else:
        dirty = fastrl.gae(rewards.view(4, 300), values.view(4, 300), backend=backend)
    dirty = dirty.advantages.reshape(4, 300)
    assert torch.equal(dirty[[0, 1, 3]], clean.advantages[[0, 1, 3]])
    assert dirty[2, :101].isnan().all()
    assert torch.equal(dirty[2, 101:], clean.advantages[2, 101:])
