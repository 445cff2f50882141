"""Runs from end to end: they learn, are resumed to the bit, and log what they did."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import grpo, loading
from fastrl.train.optimizers import learning_rate
from fastrl.train.policy import policy_loss
from fastrl.train.run_log import RunLog
from tests.support.train_runs import LOOPS, equal, rows, run, saved, weights

pytestmark = pytest.mark.usefixtures("unreported")

PLAIN = {"grpo": {"kl_coef": 0.0}, "ppo": {"kl_coef": 0.01}}
HALF = {"weights": "bfloat16", "precision": "bfloat16"}

ROLLOUTS = """
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
def one_each(prompts, group_size, complete, tokenizer):
    return complete([prompt.token_ids for prompt in prompts])
def unsampled(prompts, group_size, complete, tokenizer):
    nothing = torch.zeros(2, dtype=torch.bool)
    return [Completion(torch.ones(2).long(), torch.zeros(2), True, nothing)] * 16 * group_size
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
        ("grpo", {}),
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
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(small, tmp_path, loop, own):
    small |= {"steps": 4, "save_every": 2, "eval_every": 3, "learning_rate": 1e-3, **own}
    whole = run(loop, small).directory
    again = shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "step-000004")
    with (again / "metrics.jsonl").open("a") as file:  # as if it was killed while it wrote
        file.write('{"step": 5, "rew')
    small["out"] = str(again)
    assert run(loop, small, resume=True).step == 4
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


def test_a_run_is_resumed_with_other_settings_of_memory(small, tmp_path):
    small |= {"kl_coef": 0.05, "steps": 1, "out": str(tmp_path / "a")}
    run("grpo", small)
    other = {"tokens_per_micro_batch": 40, "gradient_checkpointing": True, "mlp_tile": 16}
    parts = run("grpo", small, steps=2, resume=True, loss="logits", **other).directory
    whole = run("grpo", small, steps=2, out=str(tmp_path / "whole")).directory
    one, two = weights(parts), weights(whole)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4


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
    expected = {"reward", "reward_std", "kl_old", "entropy", "clip_fraction", "ratio_max", "length"}
    expected |= {"truncated", "grad_norm", "learning_rate", "tokens", "tokens_per_second"}
    expected |= {"learned_tokens", "real_tokens", "padded_tokens", "kl_sampler", "seconds_learn"}
    expected |= {
        "grpo": {"informative", "sampling_rounds", "left_out"},
        "ppo": {"kl", "kl_coef", "value_loss", "explained_variance", "updates"},
    }[loop]
    for row in logged[1:]:
        assert expected <= row.keys()
        assert row["reward"] == pytest.approx(2 * row["reward/digits"])
        assert row["reward/by_record"] > 0  # logged, not counted
        assert row["tokens"] == pytest.approx(row["length"] * 16 * (4 if loop == "grpo" else 1))
    assert "kl" not in logged[1] or loop == "ppo"  # it would be 0 without a reference
    settings = json.loads((summary.directory / "config.json").read_text())
    assert settings["reward"] == list(rewards)
    assert {"resume", "plan"}.isdisjoint(settings)


def test_each_sample_gets_the_advantage_of_its_record(small, monkeypatch):
    _, tokenizer = loading.load(None, torch.device("cpu"))
    seen = []

    def spied(outputs, batch, config, advantages, **options):
        bounds = batch.cu_seqlens.tolist()
        for begin, end, advantage in zip(bounds, bounds[1:], advantages.tolist(), strict=False):
            last = int(batch.predictors[begin])  # the last token of the prompt
            first = last - int(batch.position_ids[0, last])
            prompt = tokenizer.decode(batch.input_ids[0, first : last + 1])
            completion = tokenizer.decode(batch.token_ids[begin:end], skip_special_tokens=True)
            seen.append((prompt, completion, advantage))
        return policy_loss(outputs, batch, config, advantages, **options)

    monkeypatch.setattr(grpo, "policy_loss", spied)
    small |= {"reward": ("small_rewards:by_record",), "prompts_per_step": 6, "steps": 1}
    # With a KL, completions without advantage are in the loss as well.
    run("grpo", small, tokens_per_micro_batch=40, advantage="unscaled", kl_coef=0.01)
    assert len(seen) == 6 * 4
    for i in range(6):
        group = [(text, a) for prompt, text, a in seen if prompt == f"{i} + 1 ="]
        assert len(group) == 4
        rewards = [sum(map(ord, completion)) * (i + 1) % 7 for completion, _ in group]
        assert [a for _, a in group] == pytest.approx([r - sum(rewards) / 4 for r in rewards])


@pytest.fixture
def rollouts(small, tmp_path):
    """The settings, and rollout functions in the module of their reward."""
    with (tmp_path / "small_rewards.py").open("a") as file:
        file.write(ROLLOUTS)
    return small


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rollout_of_two_turns_learns_only_from_what_was_sampled(rollouts, loop):
    settings = {"sampler": "small_rewards:two_turns", "steps": 1, "minibatches": 1}
    row = rows(run(loop, rollouts, **settings).directory)[-1]
    completions = 16 * (4 if loop == "grpo" else 1)
    assert 2 * completions < row["tokens"] <= 4 * completions  # without the tool's two
    assert row["reward"] > 0.5  # of the tool's digit, which is in the text
    # in the trainer, which reads the tool's tokens too, each token has the sampler's probability
    assert row["kl_sampler"] < 1e-9
    assert row["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert row["entropy"] > 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_each", "sampler must return 4 completions for each of 16 prompts, got 16; --resume"),
        ("unsampled", "sampler: a completion must have at least one sampled token, .* 0 true"),
        ("gone", "sampler: small_rewards has no function 'gone'"),
    ],
)
def test_a_rollout_of_ones_own_that_is_wrong_is_named(rollouts, name, message):
    Path(rollouts["prompts"][1]).write_text('{"prompt": "1"}\n' * (4 if name == "one_each" else 1))
    with pytest.raises(ValueError, match=f"^{message}"):
        run("grpo", rollouts, sampler=f"small_rewards:{name}")


def test_groups_without_information_are_sampled_again(small, tmp_path):
    small |= {"reward": ("small_rewards:by_record",), "steps": 2, "prompts_per_step": 4}
    logged = rows(run("grpo", small, sampling_rounds=10).directory)
    assert all(row["informative"] == 1 and row["left_out"] < 0.5 for row in logged[1:])
    small |= {"reward": ("small_rewards:constant",), "out": str(tmp_path / "constant")}
    last = rows(run("grpo", small, sampling_rounds=3, steps=1).directory)[-1]
    assert (last["sampling_rounds"], last["informative"], last["left_out"]) == (3, 0, 1)


@pytest.mark.parametrize(("stop_kl", "updates"), [(1e-9, 1), (1e9, 4)])
def test_ppo_leaves_out_the_updates_after_too_large_a_kl(small, stop_kl, updates):
    small |= {"steps": 2, "epochs": 2, "minibatches": 2, "learning_rate": 1e-3}
    logged = rows(run("ppo", small, stop_kl=stop_kl).directory)
    assert [row["updates"] for row in logged[1:]] == [updates, updates]


def test_the_kl_coefficient_follows_the_measured_kl(small):
    small |= {"steps": 4, "learning_rate": 3e-3, "warmup_steps": 0}
    logged = rows(run("ppo", small, kl_coef=0.1, kl_target=0.01).directory)[1:]
    coefficient = 0.1
    for row in logged:
        assert row["kl_coef"] == pytest.approx(coefficient)
        error = min(max(row["kl"] / 0.01 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 16 / 10_000
    assert logged[1]["kl_coef"] < 0.1 < logged[-1]["kl_coef"]
