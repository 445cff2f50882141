"""Distillation: the divergence from a teacher beside the reward, or alone."""

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl import KeptTokens
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.metrics import MetricMeans
from fastrl.train.packing import normalizer
from fastrl.train.plan import report
from fastrl.train.policy import batches, policy_loss, policy_outputs
from fastrl.train.second_models import TeacherModel
from tests.train.packed import (
    ADVANTAGES,
    CONFIGS,
    assert_equal,
    make_model,
    make_rollout,
    padded,
    plain,
)
from tests.train.runs import assert_same, rows, run

pytestmark = pytest.mark.usefixtures("unreported")

ALONE = {"reward": ("none",), "group_size": 1, "minibatches": 1, "prompts_per_step": 48}
FAST = {"learning_rate": 1e-2, "warmup_steps": 0, "schedule": "constant", "eval_every": 5}
CHARACTERS = character_tokenizer()
TOKENS = len(CHARACTERS)


def save_teacher(directory, kind="qwen3", rows=TOKENS, tokenizer=CHARACTERS, **changes):
    """A random model of another width and architecture than the small new one's, far from uniform.

    Only its first rows are of tokens: those behind would be likely.
    """
    torch.manual_seed(5)
    config = copy.deepcopy(CONFIGS[kind])
    config.vocab_size = rows
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        model.get_output_embeddings().weight[:TOKENS] *= 3
        model.get_output_embeddings().weight[TOKENS:] *= 9
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def teacher(tmp_path):
    return save_teacher(tmp_path / "teacher")


def make_sets(rollout):
    """Sets of any size, one of them without its own token, and a mask of the kept tokens."""
    ids = rollout.token_ids.flatten()
    rank = torch.rand(len(ids), TOKENS, generator=torch.Generator().manual_seed(4))
    rank[torch.arange(len(ids)), ids] = -1.0  # a set has its own token
    rank = rank.argsort(1).argsort(1)
    sizes = torch.tensor([TOKENS, 1, 3, 7, 20, TOKENS - 1]).repeat(len(ids))[: len(ids), None]
    inside = rank < sizes
    sets = [row.nonzero()[:, 0].tolist() * (len(row) > row.sum()) for row in inside]
    lacking = int((rollout.mask.flatten() & (sizes[:, 0] == 3)).nonzero()[0])
    sets[lacking].remove(int(ids[lacking]))
    return KeptTokens.from_lists(sets), inside.view(*rollout.mask.shape, TOKENS)


def plain_logprobs(model, rollout, inside):
    """Of the tokens that were kept, from padded sequences; others have 0, and no gradient."""
    logits = padded(model, rollout)[0][..., :TOKENS] / 0.8
    return logits.masked_fill(~inside, -math.inf).log_softmax(-1).masked_fill(~inside, 0.0)


def plain_divergence(q, p, beta):
    def kl(one, other):
        return (one.exp() * (one - other)).sum(-1)

    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = ((1 - beta) * q.exp() + beta * p.exp()).log()
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


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
    kept, inside = make_sets(rollout) if keeps else (None, torch.tensor(True))
    rollout = rollout._replace(kept=kept)
    teacher = TeacherModel(config, model, CHARACTERS)
    assert torch.equal(torch.get_rng_state(), before)
    objective, found = config.policy_objective(), torch.zeros(rollout.mask.shape)
    config, metrics, total = replace(config, tokens_per_micro_batch=60), MetricMeans(), 0.0
    for batch in batches(rollout, torch.arange(len(found)), rollout.mask, config):
        result = policy_loss(
            policy_outputs(model, batch, config),
            batch,
            config,
            None if advantages is None else advantages[batch.rows],
            old_logprobs=None,
            teacher=teacher(batch),
            objective=objective,
            normalizer=normalizer(rollout.mask, objective.aggregation),
        )
        result.loss.backward()
        batch.put(result.logprobs, into=found)
        total += result.loss.item()
        metrics.add(result.metrics, torch.zeros(()), batch)
    own, other = plain(model), plain(teacher.model)
    q = plain_logprobs(own, rollout, inside)
    p = plain_logprobs(other, rollout, inside).detach()
    divergence = plain_divergence(q, p, beta)
    sampled = q.gather(-1, rollout.token_ids[..., None])[..., 0]
    ratio = (sampled - sampled.detach()).exp()
    per_token = 0.5 * divergence - (0 if advantages is None else advantages[:, None] * ratio)
    loss = ((per_token * rollout.mask).sum(1) / rollout.mask.sum(1)).mean()
    loss.backward()
    assert total == pytest.approx(loss.item(), abs=1e-6)
    expected = (sampled.float() * rollout.mask).detach()
    gradients = [p.grad for p in model.parameters()]
    assert_equal([expected, *(p.grad for p in own.parameters())], [found, *gradients])
    assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())
    assert not teacher.model.training
    likely = [x.masked_fill(~inside, -math.inf).argmax(-1) for x in (q, p)]
    means = {"divergence": divergence, "teacher_entropy": -(p.exp() * p).sum(-1)}
    means["teacher_agreement"] = (likely[0] == likely[1]).double()
    means = {name: values[rollout.mask].mean().item() for name, values in means.items()}
    read = metrics.read()
    assert {name: read[name] for name in means} == pytest.approx(means, rel=1e-5)


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


def test_of_an_embedded_task_the_reward_is_still_measured(tmp_path, monkeypatch, teacher):
    monkeypatch.chdir(tmp_path)
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


def test_a_resumed_run_equals_an_uninterrupted_one_and_has_the_same_teacher(small, teacher):
    own = {"teacher": teacher, "teacher_coef": 0.7, "steps": 4, "save_every": 2, "group_size": 4}
    small |= {**own, "learning_rate": 1e-3, "top_p": 0.9, "kl_coef": 0.1, "minibatches": 2}
    whole = run("grpo", small).directory
    for row in rows(whole)[1:]:
        assert 1 < row["kept_tokens"] < TOKENS
        assert row["kept_lacking"] == 0
        assert 0 < row["divergence"] < math.inf
        assert 0 < row["teacher_entropy"] < math.log(TOKENS)
        assert all(map(math.isfinite, row.values()))
    again = shutil.copytree(whole, whole.with_name("again"))
    shutil.rmtree(again / "checkpoints" / "step-000004")
    small["out"] = str(again)
    assert run("grpo", small, resume=True).step == 4
    assert_same(again, whole)
    assert json.loads((again / "config.json").read_text())["teacher"] == teacher
    save_teacher(teacher, "llama")
    with pytest.raises(ValueError, match="resume: teacher has changed since the run began"):
        run("grpo", small, resume=True)
    with pytest.raises(ValueError, match=r"teacher_coef must remain 0\.7 when a run is resumed"):
        run("grpo", small, resume=True, teacher_coef=0.1)


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


OF_REWARDS = {"advantage": "batch", "sampling_rounds": 2, "clip_low": 0.1, "clip_high": 0.3}
OF_REWARDS |= {"rollout_correction": "mask", "reward_timeout": 3.0, "reward_failed": 0.0}
OF_REWARDS |= {"score_centering": 8}
REFUSED = [
    ({"teacher_coef": 1.0}, "teacher must be given with teacher_coef or teacher_beta"),
    ({"teacher_beta": 0.5}, "teacher must be given with teacher_coef or teacher_beta"),
    ({"teacher": "x", "teacher_beta": 1.5}, "teacher_beta must be at most 1, got 1.5"),
    ({"teacher": "x", "teacher_coef": -1.0}, "teacher_coef must be at least 0"),
    ({"reward": ("none",)}, "reward must be none alone, with a teacher and teacher_coef above 0"),
    ({**ALONE, "teacher": "x", "teacher_coef": 0.0}, "reward must be none alone, with a teacher"),
    ({"teacher": "x", "reward": ("none", "exact_match")}, "reward must be none alone"),
    ({"teacher": "x", "group_size": 1}, "group_size must be at least 2, got 1"),
    *(
        ({**ALONE, "teacher": "x", name: value}, f"{name} must be left at its default with rew")
        for name, value in OF_REWARDS.items()
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GrpoConfig(**settings)


def test_other_commands_refuse_what_they_have_not(small, teacher):
    with pytest.raises(ValueError, match="reward must be a known name or module:function, got 'n"):
        run("ppo", small, reward=("none",))
    with pytest.raises(ValueError, match=r"^plan: teacher must be left out"):
        report(GrpoConfig(plan=1.0, teacher=teacher))
