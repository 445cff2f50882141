"""Runs from end to end: they learn, are resumed to the bit, and log what they did."""

import json
import shutil
from dataclasses import fields

import pytest

pytest.importorskip("transformers")

from fastrl.train.optimizers import learning_rate
from fastrl.train.run_log import RunLog
from tests.support.train_runs import LOOPS, equal, rows, run, saved

pytestmark = pytest.mark.usefixtures("unreported")

PLAIN = {"grpo": {"kl_coef": 0.0}, "ppo": {"kl_coef": 0.01}}
HALF = {"weights": "bfloat16", "precision": "bfloat16"}

ROLLOUT = """
import torch
from fastrl.train.rollout import Completion
def two_turns(prompts, group_size, complete, tokenizer):
    asked = [prompt.token_ids for prompt in prompts for _ in range(group_size)]
    tool = tokenizer("=5")["input_ids"]
    answers = complete(asked)
    begun = [ids + one.token_ids.tolist() + tool for ids, one in zip(asked, answers)]
    return [
        Completion(
            torch.cat([one.token_ids, torch.tensor(tool), two.token_ids]),
            torch.cat([one.logprobs, torch.full((2,), torch.nan), two.logprobs]),
            two.ended,
            torch.tensor([True] * len(one.token_ids) + [False] * 2 + [True] * len(two.token_ids)),
        )
        for one, two in zip(answers, complete(begun))
    ]
"""


@pytest.mark.parametrize("loop", LOOPS)
def test_the_reward_rises(small, loop):
    many = {"grpo": {"group_size": 4}, "ppo": {"prompts_per_step": 64, "kl_coef": 0.001}}[loop]
    summary = run(loop, small, steps=15, learning_rate=3e-3, warmup_steps=0, **many)
    logged = rows(summary.directory)
    assert logged[1]["reward"] < 0.3
    assert logged[-1]["reward"] > 0.7
    assert summary.held_out[1] > 0.7


@pytest.mark.parametrize(
    ("loop", "own"),
    [
        ("grpo", {"reward": ("small_rewards:noise",)}),
        ("grpo", {"kl_coef": 0.05, "schedule": "cosine"}),
        ("grpo", {"kl_coef": 0.05, "lora_rank": 2}),
        ("grpo", {"kl_coef": 0.05, **HALF}),
        ("grpo", {"sampling_rounds": 3, "reward": ("small_rewards:by_record",)}),
        ("ppo", {}),
        ("ppo", {"value_model": "separate", "kl_target": 1e-4}),
        ("ppo", {"value_model": "separate", **HALF}),
        ("ppo", {"lora_rank": 2, "weights": "bfloat16"}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(small, tmp_path, capsys, loop, own):
    small |= {"steps": 4, "save_every": 2, "eval_every": 3, "learning_rate": 1e-3, **own}
    whole = run(loop, small).directory
    again = shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "step-000004")
    with (again / "metrics.jsonl").open("a") as file:  # damaged, and killed while it wrote
        file.write('{"step": 1.\n{"step": 5, "rew')
    small["out"] = str(again)
    assert run(loop, small, resume=True).step == 4
    assert "jsonl line 6 is damaged; the run continues without it" in capsys.readouterr().out
    assert rows(again) == rows(whole)
    assert [row["step"] for row in rows(again)] == [0, 1, 2, 3, 4]
    assert equal(saved(again), saved(whole))
    if own.get("kl_target"):
        assert len({row["kl_coef"] for row in rows(again)[1:]}) == 4


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_is_resumed_for_more_steps(small, tmp_path, loop):
    small |= {"steps": 2, "save_every": 100, "eval_every": 100, "warmup_steps": 1, **PLAIN[loop]}
    long = small | {"steps": 4, "out": str(tmp_path / "long")}
    for schedule in ("constant", "linear"):
        own = {"schedule": schedule}
        part = run(loop, small, out=str(tmp_path / schedule), **own).directory
        run(loop, small, out=str(part), steps=4, resume=True, **own)
        config = LOOPS[loop][1](**long, **own)
        rates = [row["learning_rate"] for row in rows(part)[3:]]
        assert rates == [learning_rate(config, step) for step in (2, 3)]
    assert rates[0] > rates[1]
    whole = run(loop, long, schedule="constant").directory
    logged = rows(tmp_path / "constant")
    del logged[2]["held_out_reward"]  # measured because the first part ended there
    assert logged == rows(whole)
    assert equal(saved(tmp_path / "constant"), saved(whole))


@pytest.mark.parametrize("kind", [kind for _, kind in LOOPS.values()])
def test_settings_that_change_no_result_may_change_and_no_others(tmp_path, kind):
    free = {"device", "track", "steps", "eval_every", "save_every", "save_minutes", "loss", "out"}
    free |= {"tokens_per_micro_batch", "tokens_per_generation", "gradient_checkpointing"}
    free |= {"offload_checkpoints", "mlp_tile", "attention", "reward_timeout", "reward_failed"}
    config = kind(out=str(tmp_path), resume=True)
    names = {f.name for f in fields(kind)} - {"resume", "plan"}
    assert names >= free | {"seed", "learning_rate", "model", "prompts", "precision", "optimizer"}
    for name in names:
        (tmp_path / "config.json").write_text(json.dumps(config.to_json() | {name: "before"}))
        if name in free:
            RunLog(config).close()
        else:
            expected = f"^{name} must remain 'before' when a run is resumed, got"
            with pytest.raises(ValueError, match=expected):
                RunLog(config)
    for settings in ({}, config.to_json() | {"of_tomorrow": 1}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="the run has other settings than this version: "):
            RunLog(config)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_logged(small, loop):
    rewards = ("small_rewards:by_record=0", "small_rewards:digits=2")
    summary = run(loop, small, reward=rewards, steps=3, eval_every=2)
    logged = [json.loads(line) for line in (summary.directory / "metrics.jsonl").open()]
    assert [row["step"] for row in logged] == [0, 1, 2, 3]
    assert ["held_out_reward" in row for row in logged] == [True, False, True, True]
    assert summary.held_out == (logged[0]["held_out_reward"], logged[3]["held_out_reward"])
    common = "reward reward_std kl_old entropy clip_fraction ratio_max length truncated grad_norm "
    common += "learning_rate tokens tokens_per_second learned_tokens kl_sampler seconds_learn "
    own = "kl kl_coef value_loss explained_variance updates"
    own = {"grpo": "informative sampling_rounds left_out", "ppo": own}[loop]
    for row in logged[1:]:
        assert row.keys() >= set((common + own).split())
        assert row["reward"] == pytest.approx(2 * row["reward/digits"])
        assert row["reward/by_record"] > 0  # logged, not counted
        assert row["tokens"] == pytest.approx(row["length"] * 16 * (4 if loop == "grpo" else 1))
    assert "kl" not in logged[1] or loop == "ppo"  # it would be 0 without a reference


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rollout_of_two_turns_learns_only_from_what_was_sampled(small, tmp_path, loop):
    with (tmp_path / "small_rewards.py").open("a") as file:
        file.write(ROLLOUT)
    settings = {"sampler": "small_rewards:two_turns", "steps": 1, "minibatches": 1}
    row = rows(run(loop, small, **settings).directory)[-1]
    completions = 16 * (4 if loop == "grpo" else 1)
    assert 2 * completions < row["tokens"] <= 4 * completions  # without the tool's two
    assert row["reward"] > 0.5  # of the tool's digit, which is in the text
    # in the trainer, which reads the tool's tokens too, each token has the sampler's probability
    assert row["kl_sampler"] < 1e-9
    assert row["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_groups_without_information_are_sampled_again(small, tmp_path):
    small |= {"reward": ("small_rewards:by_record",), "steps": 2, "prompts_per_step": 4}
    logged = rows(run("grpo", small, sampling_rounds=10).directory)
    assert all(row["informative"] == 1 and row["left_out"] < 0.5 for row in logged[1:])
    small |= {"reward": ("small_rewards:constant",), "out": str(tmp_path / "constant")}
    last = rows(run("grpo", small, sampling_rounds=3, steps=1).directory)[-1]
    assert (last["sampling_rounds"], last["informative"], last["left_out"]) == (3, 0, 1)


@pytest.mark.parametrize(("stop_kl", "updates"), [(1e-9, 1), (1e9, 4)])
def test_ppo_leaves_out_the_updates_after_too_large_a_kl(small, stop_kl, updates):
    small |= {"reward": ("small_rewards:by_record",), "steps": 2, "epochs": 2, "minibatches": 2}
    logged = rows(run("ppo", small, stop_kl=stop_kl).directory)
    assert [row["updates"] for row in logged[1:]] == [updates, updates]
