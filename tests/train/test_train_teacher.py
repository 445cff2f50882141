"""Distillation: the divergence from a teacher beside the reward, or alone."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl import KeptTokens, Teacher, logits_policy_loss
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.metrics import MetricMeans
from fastrl.train.plan import report
from fastrl.train.second_models import TeacherModel
from tests.train.packed import (
    ADVANTAGES,
    assert_equal,
    learn,
    make_model,
    make_rollout,
    padded,
    plain,
    save_teacher,
)
from tests.train.runs import rows, run

ALONE = {"reward": ("none",), "group_size": 1, "minibatches": 1, "prompts_per_step": 48}
FAST = {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant", "eval_every": 5}
CHARACTERS = character_tokenizer()
TOKENS = len(CHARACTERS)


def make_sets(rollout):
    """Sets of any size, one of them without its own token."""
    ids = rollout.token_ids.flatten()
    rank = torch.rand(len(ids), TOKENS, generator=torch.Generator().manual_seed(4))
    rank[torch.arange(len(ids)), ids] = -1.0  # a set has its own token
    rank = rank.argsort(1).argsort(1)
    sizes = torch.tensor([TOKENS, 1, 3, 7, 20, TOKENS - 1]).repeat(len(ids))[: len(ids), None]
    sets = [row.nonzero()[:, 0].tolist() * (len(row) > row.sum()) for row in rank < sizes]
    lacking = int((rollout.mask.flatten() & (sizes[:, 0] == 3)).nonzero()[0])
    sets[lacking].remove(int(ids[lacking]))
    return KeptTokens.from_lists(sets)


@pytest.mark.parametrize(
    ("keeps", "advantages", "padding"),
    [(False, None, (0, 3)), (False, ADVANTAGES, (5, 0)), (True, ADVANTAGES, (0, 3))],
    ids=["alone", "rewarded, fewer rows", "kept, rewarded"],
)
@pytest.mark.parametrize("loss", ["linear", "logits"])
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_gradients_are_those_of_padded_sequences(tmp_path, loss, beta, keeps, advantages, padding):
    """Of a teacher whose head has more or fewer rows, over all tokens or those that were kept."""
    name = save_teacher(tmp_path, rows=TOKENS + padding[1])
    settings = {"teacher": name, "teacher_beta": beta, "teacher_coef": 0.5, "loss": loss}
    settings |= {"reward": ("none",)} if advantages is None else {}
    model, config = make_model("llama", temperature=0.8, **settings)
    model.resize_token_embeddings(TOKENS + padding[0], mean_resizing=False)
    before, rollout = torch.get_rng_state(), make_rollout(holes=True)
    rollout = rollout._replace(kept=make_sets(rollout) if keeps else None)
    teacher = TeacherModel(config, model, CHARACTERS)
    assert torch.equal(torch.get_rng_state(), before)
    config, seen = replace(config, tokens_per_micro_batch=60), []
    found = learn(model, config, rollout, advantages=advantages, teacher=teacher, seen=seen)
    own = plain(model)
    logits, of_teacher = (padded(x, rollout)[0][..., :TOKENS] for x in (own, plain(teacher.model)))
    exact = logits_policy_loss(
        logits,
        rollout.token_ids,
        advantages,
        rollout.mask,
        teacher=Teacher.from_logits(of_teacher.detach(), beta=beta, temperature=0.8),
        kept=rollout.kept,
        temperature=0.8,
        objective=config.policy_objective(),
        backend="reference",
    )
    exact.loss.backward()
    assert sum(result.loss.item() for result, _ in seen) == pytest.approx(
        exact.loss.item(), abs=1e-6
    )
    logprobs = exact.logprobs.float().detach() * rollout.mask
    assert_equal([logprobs, *(p.grad for p in own.parameters())], found)
    assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())
    assert not teacher.model.training
    metrics = MetricMeans()
    for result, batch in seen:
        metrics.add(result.metrics, torch.zeros(()), batch)
    read = metrics.read()
    for name in ("divergence", "teacher_entropy", "teacher_agreement"):
        assert read[name] == pytest.approx(exact.metrics[name].item(), rel=1e-5), name


@pytest.mark.parametrize("settings", [{}, {"loss": "logits", "teacher_beta": 0.5}], ids=str)
def test_a_teacher_alone_is_approached_without_a_reward(small, teacher, settings):
    summary = run("grpo", small, teacher=teacher, **{**ALONE, **FAST, **settings}, steps=25)
    logged = rows(summary.directory)
    first, last = logged[1], logged[-1]
    assert last["divergence"] < 0.6 * first["divergence"]
    assert last["teacher_agreement"] > 2 * first["teacher_agreement"]
    assert first["teacher_entropy"] > 0
    assert first["left_out"] == 0
    assert not first.keys() & {"reward", "reward_std", "informative", "held_out_reward"}
    assert str(summary).startswith("finished step 25\n")
    saved = {p.name for p in summary.directory.rglob("*") if p.is_file()}
    assert len([name for name in saved if name.endswith(".safetensors")]) == 1  # of the policy


def test_of_an_embedded_task_the_reward_is_still_measured(small, teacher):
    settings = {"steps": 2, "eval_every": 1, "warm_start_steps": 0, **ALONE}
    arithmetic = rows(run("grpo", settings, teacher=teacher).directory)
    long = {"prompts": ("long_addition",), "max_new_tokens": 3, "eval_every": 2}
    long = rows(run("grpo", {**settings, **long}, teacher=teacher).directory)
    assert ["held_out_reward" in row for row in arithmetic] == [True, True, True]
    assert ["held_out_reward" in row for row in long] == [True, False, True]
    assert "reward" in arithmetic[1]


def test_beside_a_reward_every_completion_is_learned_from(small, teacher):
    """With a coefficient of 0 the teacher is measured and changes nothing."""
    small |= {**FAST, "steps": 6, "group_size": 4, "prompts_per_step": 12, "minibatches": 2}
    small["reward"] = ("tests.train.small_rewards:constant",)  # no completion has an advantage
    logged = rows(run("grpo", small, teacher=teacher).directory)
    assert all(row["left_out"] == 0 and row["informative"] == 0 for row in logged[1:])
    assert logged[-1]["divergence"] < logged[1]["divergence"]
    small |= {"reward": ("tests.train.small_rewards:digits",), "steps": 2}
    without = rows(run("grpo", small, out="without").directory)
    only = rows(run("grpo", small, out="with", teacher=teacher, teacher_coef=0.0).directory)
    of_teacher = {"divergence", "teacher_entropy", "teacher_agreement"}
    assert of_teacher < only[-1].keys()
    for row, other in zip(only, without, strict=True):
        assert row == pytest.approx({**row, **other}, abs=1e-4)


def test_over_the_tokens_that_were_kept_all_is_finite(small, teacher):
    small |= {"teacher": teacher, "teacher_coef": 0.7, "group_size": 4, "top_p": 0.9}
    directory = run("grpo", small, kl_coef=0.1, minibatches=2, steps=2).directory
    assert json.loads((directory / "config.json").read_text())["teacher"] == teacher
    for row in rows(directory)[1:]:
        assert 1 < row["kept_tokens"] < TOKENS
        assert row["kept_lacking"] == 0
        assert 0 < row["divergence"] < math.inf
        assert 0 < row["teacher_entropy"] < math.log(TOKENS)
        assert all(map(math.isfinite, row.values()))


def test_the_last_checkpoint_of_a_run_is_a_teacher(small, base):
    small |= {"model": str(base), "group_size": 4}
    directory = run("grpo", small, steps=1).directory
    alone = {**ALONE, "model": str(directory / "checkpoints" / "step-000001")}
    alone |= {"teacher": str(directory), "steps": 1, "kl_coef": 0.1}
    for number, keeps in enumerate(({}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.001})):
        alone["out"] = f"student-{number}"
        first = rows(run("grpo", small, **alone, **keeps).directory)[1]
        assert first["divergence"] == pytest.approx(0, abs=1e-9)
        assert first["teacher_agreement"] == 1
        assert first["kl"] == pytest.approx(0, abs=1e-9)


def test_a_teacher_of_other_tokens_is_refused(small, tmp_path):
    text = CHARACTERS.backend_tokenizer.to_str().replace('"a":', '"é":')
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=type(CHARACTERS.backend_tokenizer).from_str(text),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    small |= {**ALONE, "steps": 1}
    for number, (changes, message) in enumerate(
        (
            ({"tokenizer": other}, "has 98 tokens and a head of 98 rows, 97 tokens are the same"),
            ({"rows": 90}, "has 98 tokens and a head of 90 rows, 98 tokens are the same"),
        )
    ):
        name = save_teacher(tmp_path / f"teacher-{number}", **changes)
        expected = f"^teacher must have the tokens of the model, the small new one: 98; {name} "
        with pytest.raises(ValueError, match=f"{expected}{message}"):
            run("grpo", small, teacher=name)
    short = save_teacher(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"^max_new_tokens must be at most 1 for this model"):
        run("grpo", small, teacher=short)
    with pytest.raises(ValueError, match=r"^teacher: model must be a causal LM .*no such direc"):
        run("grpo", small, teacher="./nothing")
    assert not Path(small["out"]).exists()  # unlocked, and nothing left


def test_a_plan_has_no_teacher(teacher):
    with pytest.raises(ValueError, match=r"^plan: teacher must be left out"):
        report(GrpoConfig(plan=1.0, teacher=teacher))
