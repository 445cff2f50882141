"""A run gives the same result on several ranks as in one process, with DDP and with FSDP2."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.rank_runs import (
    PARALLEL,
    check_same_metrics,
    check_whole,
    record_gradients,
    run_ranks,
)
from tests.support.train_runs import rows, run, weights


@pytest.fixture
def settings(small):
    """More than one step, with rewards that depend on the completion."""
    return small | {"reward": "small_rewards:by_record", "minibatches": 2, "steps": 2}


def gradients_alone(loop, settings, path, **changes):
    put_back = record_gradients(path)
    try:
        run(loop, settings, **changes)
    finally:
        put_back()
    return torch.load(path)


def check_close(one, other):
    assert len(one) == len(other)
    for step, expected in zip(one, other, strict=True):
        for gradient, right in zip(step, expected, strict=True):
            torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_gradients_and_metrics_do_not_depend_on_the_split(settings, tmp_path, loop):
    settings |= {"kl_coef": 0.05}
    whole = gradients_alone(loop, settings, tmp_path / "whole", name="one")
    assert any(gradient.abs().max() > 1e-3 for gradient in whole[0])
    few = gradients_alone(loop, settings, tmp_path / "few", name="four", tokens_per_micro_batch=60)
    check_close(few, whole)
    directory = Path(settings["out_dir"])
    for parallel in PARALLEL:
        split = settings | {"name": parallel, "parallel": parallel}
        check_whole(run_ranks(2, loop, split, tmp_path, gradients_to=tmp_path / parallel))
        check_close(torch.load(tmp_path / parallel), whole)
        check_same_metrics(rows(directory / parallel), rows(directory / "one"))


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_rank_with_fewer_micro_batches_counts_none_twice(settings, tmp_path, parallel):
    """Three completions, each a micro-batch of its own, on two ranks; and on four."""
    for loop, own in (("grpo", {"group_size": 3, "prompts_per_step": 1}), ("ppo", {})):
        odd = {"prompts_per_step": 3, "tokens_per_micro_batch": 1, "minibatches": 1, **own}
        odd |= {"steps": 1, "learning_rate": 1e-2, "parallel": parallel}
        whole = gradients_alone(loop, settings | odd, tmp_path / "whole", name=f"{loop}-one")
        for world in (2, 4):
            split = settings | odd | {"name": f"{loop}-{world}"}
            path = tmp_path / str(world)
            check_whole(run_ranks(world, loop, split, tmp_path, gradients_to=path))
            check_close(torch.load(path), whole)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_a_run_continues_on_another_number_of_ranks(settings, tmp_path, loop, parallel):
    settings |= {"learning_rate": 1e-3, "save_every": 2, "kl_coef": 0.05, "eval_every": 1}
    settings |= {"warm_start_steps": 5, "warm_start_batch": 8}
    whole = run(loop, settings, name="whole", steps=4).directory
    begun = settings | {"parallel": parallel}
    for world in (1, 4):
        name = f"then-{world}"
        check_whole(run_ranks(2, loop, begun | {"name": name}, tmp_path))
        directory = Path(settings["out_dir"]) / name
        before = rows(directory)
        check_same_metrics(before, rows(whole)[:3])
        resumed = begun | {"name": name, "resume": True, "steps": 4}
        if world == 1:
            run(loop, resumed)
        else:
            check_whole(run_ranks(world, loop, resumed, tmp_path))
        assert rows(directory)[:3] == before
        check_same_metrics(rows(directory), rows(whole))
        one, other = weights(directory), weights(whole)
        assert max(float((one[key] - other[key]).abs().max()) for key in other) < 1e-4


def test_a_run_of_one_process_continues_sharded(settings, tmp_path):
    settings |= {"learning_rate": 1e-3, "save_every": 2, "eval_every": 1}
    for loop in ("grpo", "ppo"):
        whole = run(loop, settings, name=f"{loop}-whole", steps=4).directory
        directory = run(loop, settings, name=loop).directory
        resumed = settings | {"name": loop, "resume": True, "steps": 4, "parallel": "fsdp"}
        check_whole(run_ranks(2, loop, resumed, tmp_path))
        check_same_metrics(rows(directory), rows(whole))
