"""Runs from end to end: they learn, log what they did, and are resumed to the bit."""

import json
import shutil
from dataclasses import fields

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.checkpoint import latest
from fastrl.train.run_log import RunLog
from tests.train.packed import save_teacher
from tests.train.runs import LOOPS, assert_same, rows, run

REWARDS = "tests.train.small_rewards"
HALF = {"weights": "bfloat16", "precision": "bfloat16"}
LOGGED = "reward reward_std kl_old entropy clip_fraction ratio_max length truncated grad_norm "
LOGGED += "learning_rate tokens tokens_per_second learned_tokens kl_sampler seconds_learn "
OF_LOOP = {
    "grpo": "informative sampling_rounds left_out",
    "ppo": "kl kl_coef value_loss explained_variance updates",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.usefixtures("reported")
def test_the_reward_rises_and_the_run_leaves_a_log_a_report_and_a_model(small, loop):
    small |= {"reward": (f"{REWARDS}:by_record=0", f"{REWARDS}:digits=2"), "steps": 15}
    small |= {"learning_rate": 3e-3, "warmup_steps": 0, "eval_every": 2}
    small |= {"prompts_per_step": 64, "kl_coef": 0.001} if loop == "ppo" else {}
    summary = run(loop, small)
    logged = [json.loads(line) for line in (summary.directory / "metrics.jsonl").open()]
    assert logged[1]["reward"] < 0.6
    assert min(logged[-1]["reward"], summary.held_out[1]) > 1.4
    assert [row["step"] for row in logged] == list(range(16))
    evaluated = [row["step"] for row in logged if "held_out_reward" in row]
    assert evaluated == [0, 2, 4, 6, 8, 10, 12, 14, 15]
    assert summary.held_out == (logged[0]["held_out_reward"], logged[15]["held_out_reward"])
    for row in logged[1:]:
        assert row.keys() >= set((LOGGED + OF_LOOP[loop]).split())
        assert row["reward"] == pytest.approx(2 * row["reward/digits"])
        assert row["reward/by_record"] > 0  # logged, not counted
        assert row["tokens"] == pytest.approx(row["length"] * 64)
        assert row["padded_tokens"] >= row["real_tokens"] > row["tokens"]
    assert "kl" not in logged[1] or loop == "ppo"  # it would be 0 without a reference
    assert "data:image/png" in (summary.directory / "report.html").read_text()
    trained = latest(summary.directory / "checkpoints")
    (trained / "state.pt").unlink()  # which only resuming needs
    again = run(loop, small, model=str(trained), out=None, steps=1)
    assert again.held_out[0] == pytest.approx(summary.held_out[1], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "own"),
    [
        ("grpo", {"reward": (f"{REWARDS}:noise",)}),
        ("grpo", {"kl_coef": 0.05, "schedule": "cosine"}),
        ("grpo", {"kl_coef": 0.05, "lora_rank": 2}),
        ("grpo", {"kl_coef": 0.05, **HALF}),
        ("grpo", {"sampling_rounds": 3, "reward": (f"{REWARDS}:by_record",)}),
        ("ppo", {}),
        ("grpo", {"score_centering": 5, "objective": "reinforce", "lora_rank": 2}),
        ("ppo", {"score_centering": 5, "minibatches": 1}),
        ("grpo", {"teacher": "teacher", "teacher_coef": 0.7, "top_p": 0.9, "kl_coef": 0.1}),
        ("ppo", {"value_model": "separate", "kl_target": 1e-4}),
        ("ppo", {"value_model": "separate", **HALF}),
        ("ppo", {"lora_rank": 2, "weights": "bfloat16"}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(small, tmp_path, capsys, loop, own):
    small |= {"steps": 4, "save_every": 2, "eval_every": 3, "learning_rate": 1e-3, **own}
    if "teacher" in own:
        save_teacher("teacher")
    whole = run(loop, small).directory
    again = shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "step-000004")
    with (again / "metrics.jsonl").open("a") as file:  # damaged, and killed while it wrote
        file.write('{"step": 1.\n{"step": 5, "rew')
    small["out"] = str(again)
    assert run(loop, small, resume=True).step == 4
    assert "jsonl line 6 is damaged; the run continues without it" in capsys.readouterr().out
    assert [row["step"] for row in rows(again)] == [0, 1, 2, 3, 4]
    assert_same(again, whole)
    if own.get("kl_target"):
        assert len({row["kl_coef"] for row in rows(again)[1:]}) == 4


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
def test_a_rollout_of_two_turns_learns_only_from_what_was_sampled(small, loop):
    settings = {"sampler": f"{REWARDS}:two_turns", "steps": 1, "minibatches": 1}
    row = rows(run(loop, small, **settings).directory)[-1]
    completions = 16 * (4 if loop == "grpo" else 1)
    assert 2 * completions < row["tokens"] <= 4 * completions  # without the tool's two
    assert row["reward"] > 0.5  # of the tool's digit, which is in the text
    # in the trainer, which reads the tool's tokens too, each token has the sampler's probability
    assert row["kl_sampler"] < 1e-9
    assert row["ratio_max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_gradient_norm_is_the_mean_of_a_steps_updates(small, monkeypatch, loop):
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    recorded = lambda *given: norms.append(clip(*given)) or norms[-1]  # noqa: E731
    small |= {"minibatches": 2, "epochs": 2, "warm_start_steps": 0, "steps": 2}
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    logged = rows(run(loop, small).directory)[1:]
    assert [row["grad_norm"] for row in logged] == [
        pytest.approx(float(sum(some) / 4)) for some in (norms[:4], norms[4:])
    ]


def test_groups_without_information_are_sampled_again(small):
    small |= {"prompts_per_step": 4, "sampling_rounds": 10, "steps": 2}
    logged = rows(run("grpo", small, reward=(f"{REWARDS}:by_record",)).directory)
    assert all(row["informative"] == 1 and row["left_out"] < 0.5 for row in logged[1:])
    last = rows(run("grpo", small, reward=(f"{REWARDS}:constant",), out=None).directory)[-1]
    assert (last["sampling_rounds"], last["informative"], last["left_out"]) == (10, 0, 1)


@pytest.mark.parametrize(("stop_kl", "updates"), [(1e-9, 1), (1e9, 4)])
def test_ppo_leaves_out_the_updates_after_too_large_a_kl(small, stop_kl, updates):
    small |= {"reward": (f"{REWARDS}:by_record",), "steps": 2, "epochs": 2, "minibatches": 2}
    logged = rows(run("ppo", small, stop_kl=stop_kl).directory)
    assert [row["updates"] for row in logged[1:]] == [updates, updates]
