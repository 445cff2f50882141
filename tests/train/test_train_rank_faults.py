"""What goes wrong on one rank of several ends all of them, named, with nothing lost."""

import signal
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import gradients
from fastrl.train.config import GrpoConfig
from fastrl.train.distributed import optimizer_shards, process_group, ranks
from fastrl.train.run import checkpoint, start
from fastrl.train.run.checkpoint import latest
from tests.support.pair_runs import pair_settings, run_pairs
from tests.support.rank_runs import PARALLEL, check_same_metrics, check_whole, run_ranks
from tests.support.train_runs import rows, run

REWARDS = """
import os, random, signal
import numpy, torch
calls, second = 0, os.environ.get("RANK") == "1"
def points(prompts, completions, records):
    global calls
    calls += 1
    return [sum(map(ord, text)) % 7 for text in completions]
def fails_on_one(prompts, completions, records):
    if second and calls == 4:  # two on trial, one before the first step, one in it
        raise KeyError("no such answer")
    return points(prompts, completions, records)
def interrupts_one(prompts, completions, records):
    if second and calls == 4:
        signal.raise_signal(signal.SIGTERM)
    return points(prompts, completions, records)
def draws(prompts, completions, records):
    for _ in range(2 + second):
        random.random(), torch.rand(1), numpy.random.rand()
    return points(prompts, completions, records)
"""


@pytest.fixture
def settings(small):
    (Path(small["out_dir"]).parent / "rank_rewards.py").write_text(REWARDS)
    yield small | {"reward": "small_rewards:by_record", "minibatches": 2, "steps": 2}
    sys.modules.pop("rank_rewards", None)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_an_error_on_one_rank_ends_all_with_its_message_and_a_checkpoint(
    settings, tmp_path, parallel
):
    settings |= {"reward": "rank_rewards:fails_on_one", "steps": 4, "parallel": parallel}
    one, other = run_ranks(2, "grpo", settings | {"name": "a"}, tmp_path)
    directory = Path(settings["out_dir"]) / "a"
    saved = latest(directory / "checkpoints")
    assert saved.name == "step-000001"
    assert one.error == other.error
    assert one.error == (
        "RewardError: reward fails_on_one: raised KeyError: 'no such answer'; "
        f"--resume continues from {saved}"
    )
    assert run("grpo", settings, name="a", resume=True).step == 4
    whole = run("grpo", settings, name="whole").directory
    check_same_metrics(rows(directory), rows(whole))


def test_a_signal_to_one_rank_stops_all_after_the_step(settings, tmp_path):
    settings |= {"reward": "rank_rewards:interrupts_one", "steps": 50, "name": "a"}
    ended = run_ranks(2, "grpo", settings, tmp_path)
    check_whole(ended)
    assert [end.steps for end in ended] == [2, 2]
    assert latest(Path(settings["out_dir"]) / "a" / "checkpoints").name == "step-000002"


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_random_numbers_of_a_reward_leave_the_ranks_equal(settings, tmp_path, loop):
    settings |= {"reward": "rank_rewards:draws", "epochs": 2}
    one, other = run_ranks(2, loop, settings, tmp_path)
    assert one.error is None
    assert one == other


def out_of_memory_on_one(rank):
    """The second rank fails alone, in the second step."""
    ranks.SECONDS_FOR_OTHERS = 2.0
    loop = sys.modules["fastrl.train.grpo"]
    calls, policy_loss = [], loop.policy_loss

    def limited(*arguments, **options):
        calls.append(rank)
        if rank == 1 and len(calls) == 3:  # two minibatches per step
            raise torch.OutOfMemoryError("no memory left")
        return policy_loss(*arguments, **options)

    loop.policy_loss = limited


@pytest.mark.parametrize("parallel", PARALLEL)
def test_an_error_in_the_middle_of_common_work_does_not_hang(settings, tmp_path, parallel):
    settings |= {"parallel": parallel, "name": "a"}
    one, other = run_ranks(2, "grpo", settings, tmp_path, before=out_of_memory_on_one)
    checkpoints = Path(settings["out_dir"]) / "a" / "checkpoints"
    saved = {"ddp": "step-000001", "fsdp": "step-000000"}[parallel]
    assert latest(checkpoints).name == saved
    assert other.error == "OutOfMemoryError: no memory left"
    assert one.error == (
        "RankError: another rank has failed, and its message tells why; "
        f"--resume continues from {checkpoints / saved}"
    )
    assert run("grpo", settings, resume=True).step == 2


def killed(who, call):
    """Kill rank ``who`` in the ``call``-th loss; there are two per step."""
    ranks.SECONDS_FOR_OTHERS = 2.0
    loop = sys.modules["fastrl.train.grpo"]
    calls, policy_loss = [], loop.policy_loss

    def kill(*arguments, **options):
        calls.append(call)
        if ranks.index() == who and len(calls) == call:
            signal.raise_signal(signal.SIGKILL)
        return policy_loss(*arguments, **options)

    loop.policy_loss = kill


def second_killed(rank):
    killed(1, 3)


def first_killed(rank):
    killed(0, 3)


def second_killed_at_the_start(rank):
    """In the exchange after loading."""
    ranks.SECONDS_FOR_OTHERS = 2.0
    if rank == 1:
        start.sharded = lambda *arguments: signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_rank_that_is_killed_is_named_by_the_others(settings, tmp_path, parallel):
    settings |= {"parallel": parallel, "name": "a"}
    one, other = run_ranks(2, "grpo", settings, tmp_path, before=second_killed)
    saved = last_of(settings)
    assert saved.name == {"ddp": "step-000001", "fsdp": "step-000000"}[parallel]
    assert other is None
    assert one.error == (
        "RankError: another rank has ended without a message (the system may have killed it for "
        f"lack of memory), or did not answer in time; --resume continues from {saved}"
    )
    assert run("grpo", settings, resume=True).step == 2


def test_the_first_rank_that_is_killed_is_named_too(settings, tmp_path):
    one, other = run_ranks(2, "grpo", settings | {"name": "a"}, tmp_path, before=first_killed)
    assert one is None
    assert other.error.startswith(
        "RankError: the first rank has ended; its message tells why, unless the system killed it"
    )
    assert last_of(settings).name == "step-000000"
    assert run("grpo", settings, name="a", resume=True).step == 2


def test_a_rank_that_is_killed_before_the_first_step_is_named(settings, tmp_path):
    before = second_killed_at_the_start
    one, other = run_ranks(2, "grpo", settings | {"name": "a"}, tmp_path, before=before)
    assert other is None
    assert one.error.startswith("RankError: another rank has ended without a message")


def second_killed_in_a_checkpoint(rank):
    """In the first exchange of the checkpoint after the second step."""
    ranks.SECONDS_FOR_OTHERS = 2.0
    save = checkpoint.save

    def kill(*arguments, step, **options):
        if rank == 1 and step == 2:
            signal.raise_signal(signal.SIGKILL)
        return save(*arguments, step=step, **options)

    checkpoint.save = kill


def test_a_rank_that_is_killed_in_a_checkpoint_loses_no_step(settings, tmp_path):
    before = second_killed_in_a_checkpoint
    settings |= {"save_every": 1, "steps": 4}
    one, other = run_ranks(2, "grpo", settings | {"name": "a"}, tmp_path, before=before)
    assert other is None
    assert one.error.startswith("RankError: another rank has ended without a message")
    assert one.error.endswith("step-000002")
    assert run("grpo", settings, name="a", resume=True).step == 4


def second_killed_in_restoring(rank):
    """While the sharded state of the optimizer is loaded."""
    ranks.SECONDS_FOR_OTHERS = 2.0
    if rank == 1:
        checkpoint.sharded_like = lambda *arguments: signal.raise_signal(signal.SIGKILL)


def test_a_rank_that_is_killed_does_not_make_a_checkpoint_look_damaged(settings, tmp_path):
    settings |= {"parallel": "fsdp", "name": "a"}
    check_whole(run_ranks(2, "grpo", settings | {"steps": 1}, tmp_path))
    settings |= {"resume": True}
    before = second_killed_in_restoring
    one, other = run_ranks(2, "grpo", settings, tmp_path, before=before)
    assert other is None
    assert one.error.startswith("RankError: another rank has ended without a message")


def test_ranks_that_cannot_be_joined_are_one_sentence(monkeypatch):
    def alone(*arguments, **options):
        raise torch.distributed.DistStoreError("1/2 clients joined")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(process_group, "rendezvous", alone)
    message = "the ranks could not be joined: 1/2 clients joined"
    with pytest.raises(ranks.RankError, match=message), process_group.joined(GrpoConfig()):
        pass


def raised_on_one(rank):
    """An error of the second rank alone, which names what gloo's would."""
    ranks.SECONDS_FOR_OTHERS = 2.0
    if rank == 1:
        loop = sys.modules["fastrl.train.grpo"]

        def fails(*arguments, **options):
            raise RuntimeError("cannot open igloo/kernel.so")

        loop.policy_loss = fails


def test_an_error_of_one_rank_is_not_taken_for_the_end_of_another(settings, tmp_path):
    one, other = run_ranks(2, "grpo", settings | {"name": "a"}, tmp_path, before=raised_on_one)
    assert other.error == "RuntimeError: cannot open igloo/kernel.so"
    assert one.error.startswith("RankError: another rank has failed, and its message tells why")


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_reward_model_scores_on_all_ranks_and_is_kept_by_the_first(settings, tmp_path, parallel):
    judge = run_pairs(pair_settings(tmp_path), steps=1, name="judge").directory
    settings |= {"reward": "reward_model", "reward_model": str(judge), "parallel": parallel}
    check_whole(run_ranks(2, "grpo", settings | {"name": "a", "steps": 1}, tmp_path))
    check_whole(run_ranks(2, "grpo", settings | {"name": "a", "resume": True}, tmp_path))
    alone = run("grpo", settings, name="alone").directory
    check_same_metrics(rows(alone.with_name("a"))[2:], rows(alone)[2:])
    kept = [(alone.with_name(name) / "reward-model.json").read_text() for name in ("a", "alone")]
    assert kept[0] == kept[1]


def spoiled_on_one(rank):
    """After the second step, the weights of the second rank are others."""
    apply = gradients.apply

    def spoil(optimizer, config, step):
        norm = apply(optimizer, config, step)
        if rank == step == 1:
            optimizer.param_groups[0]["params"][0].data[0, 0] += 1e-6
        return norm

    gradients.apply = spoil


def test_ranks_whose_weights_differ_save_no_checkpoint(settings, tmp_path):
    settings |= {"minibatches": 1, "save_every": 1, "name": "a", "steps": 4}
    one, other = run_ranks(2, "grpo", settings, tmp_path, before=spoiled_on_one)
    assert one.error == other.error
    assert one.error.startswith("ValueError: the weights of the ranks differ after step 2")
    assert one.error.endswith("--resume continues from " + str(last_of(settings)))
    assert last_of(settings).name == "step-000001"


def no_space_on_one(rank):
    """The shards of the second rank cannot be written in the second checkpoint."""
    save, calls = optimizer_shards.save, []

    def full(*arguments, **options):
        calls.append(rank)
        if rank == 1 and len(calls) == 2:
            options["storage_writer"].write_data = no_space
        return save(*arguments, **options)

    optimizer_shards.save = full


def no_space(*arguments):
    raise OSError(28, "No space left on device")


def test_a_shard_that_cannot_be_written_loses_nothing(settings, tmp_path):
    settings |= {"parallel": "fsdp", "save_every": 1, "name": "a", "steps": 4}
    one, other = run_ranks(2, "grpo", settings, tmp_path, before=no_space_on_one)
    checkpoints = Path(settings["out_dir"]) / "a" / "checkpoints"
    assert one.error == other.error
    assert one.error.startswith(f"CheckpointError: {checkpoints}/step-000002 could not be written")
    assert "No space left on device" in one.error
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000", "step-000001"]
    assert run("grpo", settings, resume=True).step == 4


def test_shards_of_a_checkpoint_are_safetensors_and_checked(settings, tmp_path):
    settings |= {"parallel": "fsdp", "name": "a"}
    check_whole(run_ranks(2, "grpo", settings, tmp_path))
    shards = sorted((last_of(settings) / "optimizer").iterdir())
    assert [path.suffix for path in shards] == [".safetensors"] * 2
    with shards[1].open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ValueError, match=f"{shards[1].name} is damaged"):
        run("grpo", settings, resume=True, steps=3)


def last_of(settings):
    return latest(Path(settings["out_dir"]) / "a" / "checkpoints")
