"""`inside_forward` on models that are sharded over ranks equals one process on all batches."""

import pytest
import torch

from tests.support.trl_runs import needed

needed("transformers")
needed("peft")
from tests.support.sharded_heads import CASES, WORLD, expected, rank_main  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(
        rank_main, (str(path / "store"), str(path / "found")), nprocs=WORLD, start_method="spawn"
    )
    return [torch.load(path / f"found.{rank}") for rank in range(WORLD)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("form", ["fused", "primitive"])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_one_process(name, form, parts, found):
    losses, grads = expected(name, form, parts)
    # bfloat16 keeps 8 bits: 2^-8 of each operand of a few layers
    relative, absolute = (0.1, 2e-2) if CASES[name][2] else (1e-4, 1e-6)
    for rank in range(WORLD):
        got_losses, got_grads = found[rank][name, form, parts]
        assert got_losses == pytest.approx(losses[rank], rel=relative, abs=absolute)
        assert got_grads.keys() == grads.keys()
        for parameter, grad in got_grads.items():
            largest = grads[parameter].abs().amax().item()
            torch.testing.assert_close(
                grad, grads[parameter], rtol=relative, atol=max(absolute, relative * largest)
            )
