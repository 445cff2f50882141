"""Completions without a reward, completions that do not exist, and groups without information."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.config import GrpoConfig
from fastrl.train.groups import SampledGroups, compared, informative
from fastrl.train.metrics import lengths, reward_std
from fastrl.train.prompts import Prompt
from fastrl.train.rewards import Scored
from fastrl.train.rollout import Completion, TokenCount, rollout_of
from tests.train.runs import LOOPS, asked, rewards_of, rows, run, saved

NAN = math.nan


def score(completions, *names, lengths=None, **settings):
    rewards, prompts = rewards_of(*names, **settings), asked(*[""] * len(completions))
    rewards.probe(prompts)
    scored = rewards.score(prompts, completions, lengths or [1] * len(completions))
    return rewards, scored


def same(found, expected):
    return torch.equal(found.nan_to_num(-99.0), torch.tensor(expected).nan_to_num(-99.0))


def of_length(prompts, completions, records):
    return [len(text) if text else None for text in completions]


def of_a(prompts, completions, records):
    return [1.0 if "a" in text else None for text in completions]


def test_none_of_one_function_leaves_the_others(own):
    """The empty completions of the probe are without a reward, which stops nothing."""
    own(of_length=of_length, of_a=of_a, shown=lambda texts, *_: [7] * len(texts))
    texts = ["ab", "b", "", "a"]
    names = ("own:of_length=2", "own:of_a", "own:shown=0", "overlong")
    rewards, scored = score(texts, *names, lengths=[1, 9, 1, 10])
    assert same(scored.unshaped, [5.0, 2.0, NAN, 3.0])
    assert same(scored.total, [5.0, 1.5, NAN, 2.0])
    assert same(scored.parts["of_a"], [1.0, NAN, NAN, 1.0])
    assert not scored.failed.any()
    row = rewards.means(scored)
    assert row == {
        "reward": pytest.approx(8.5 / 3),
        "reward/of_length": pytest.approx(4 / 3),
        "reward/of_a": 1,
        "reward/shown": 7,
        "reward/overlong": -0.375,
        "reward_missing": 1,
    }
    assert reward_std(scored)["reward_std"] == pytest.approx(1.5456, abs=1e-4)
    rewards, scored = score(["", ""], "own:of_length")
    assert rewards.means(scored, prefix="held_out_reward") == {"held_out_reward_missing": 2}
    assert reward_std(scored) == {}
    assert same(score(["", ""], "overlong", lengths=[9, 1])[1].total, [-0.5, 0.0])


def test_a_completion_that_does_not_exist_is_judged_by_no_function(own):
    own(judge=lambda prompts, texts, records: [1.0 + len(t) for t in texts])
    _, scored = score([None, "ab", None], "own:judge", "overlong", lengths=[0, 9, 0])
    assert same(scored.total, [NAN, 2.5, NAN])
    assert same(score([None] * 2, "own:judge")[1].total, [NAN, NAN])
    _, scored = score(["x", None, "y"], "own:judge", reward_failed=-1.0)
    assert scored.failed.tolist() == [False] * 3


def test_a_rollout_does_not_count_what_does_not_exist():
    one = Completion(torch.tensor([4, 5]), torch.tensor([-1.0, -2.0]), ended=False)
    made = rollout_of([Prompt({}, [1]), Prompt({}, [2])], [None, one], torch.device("cpu"))
    assert made.mask.tolist() == [[False, False], [True, True]]
    row = lengths(made, TokenCount(3, 4))
    assert (row["tokens"], row["length"], row["truncated"]) == (2, 2, 1)
    row = lengths(made.rows(torch.tensor([0])), TokenCount(3, 4))
    assert row.keys() == {"tokens", "real_tokens", "padded_tokens"}


FIXED = ("1+", "22", "x=3", "45-")  # per prompt; the digits are the reward


def fixed(prompts, group_size, complete, tokenizer):
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in FIXED[:group_size]]
    group = [Completion(each, torch.full((len(each),), -3.0), ended=True) for each in ids]
    return group * len(prompts)


def without_the_fourth(prompts, group_size, complete, tokenizer):
    made = fixed(prompts, group_size, complete, tokenizer)
    return [None if i % group_size == 3 else one for i, one in enumerate(made)]


def digits(prompts, completions, records):
    return [sum(map(str.isdigit, text)) for text in completions]


def digits_or_none(prompts, completions, records):
    counted = digits(prompts, completions, records)
    return [None if "45" in text else n for text, n in zip(completions, counted, strict=True)]


@pytest.mark.parametrize(
    ("loop", "changes"),
    [
        ("grpo", {}),
        ("grpo", {"advantage": "batch", "objective": "dapo", "entropy_coef": 0.1}),
        ("grpo", {"advantage": "leave_one_out", "kl_coef": 0.5, "epochs": 2}),
        ("ppo", {"advantage": "group"}),
        ("ppo", {"entropy_coef": 0.1, "epochs": 2}),
    ],
)
def test_it_is_as_if_they_had_not_been_sampled(small, own, loop, changes):
    """Without a reward, and non-existent: the weights are those of smaller groups."""
    own(all=fixed, some=without_the_fourth, digits=digits, none=digits_or_none)
    small |= {"steps": 1, "minibatches": 1, "prompts_per_step": 2, "warmup_steps": 0, **changes}
    small |= {"rollout_correction": "none", "max_new_tokens": 3, "learning_rate": 1e-2}
    small |= {"warm_start_steps": 0}
    ended = []
    for sampler, reward, size in (("all", "digits", 3), ("some", "digits", 4), ("all", "none", 4)):
        settings = {"sampler": f"own:{sampler}", "reward": (f"own:{reward}",), "group_size": size}
        ended.append(run(loop, small, out=f"{sampler}-{reward}", **settings).directory)
    (expected, _), *others = map(saved, ended)
    for directory, (weights, _) in zip(ended[1:], others, strict=True):
        for name, weight in weights.items():
            # AdamW makes rounding errors of tiny gradients as large as the learning rate
            assert (weight - expected[name]).abs().mean() < 1e-4, name
        one, other = rows(ended[0])[-1], rows(directory)[-1]
        assert other["reward_missing"] == 2
        for name in ("reward", "reward_std", "grad_norm", "learned_tokens"):
            assert other[name] == pytest.approx(one[name], rel=1e-3), name
        assert rows(directory)[0]["held_out_reward"] == rows(ended[0])[0]["held_out_reward"]
    assert rows(ended[1])[-1]["tokens"] == rows(ended[0])[-1]["tokens"]


@pytest.mark.parametrize("sampler", ["fixed", "nothing"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_without_any_reward_has_no_update(small, own, capsys, loop, sampler):
    """Neither has a minibatch; not even a momentum moves the weights."""
    calls = []

    def later(prompts, completions, records):
        calls.append(len(prompts))
        return [1.0 + i % 2 if len(calls) == 4 else None for i in range(len(prompts))]

    own(fixed=fixed, nothing=lambda prompts, size, *_: [None] * (len(prompts) * size), later=later)
    small |= {"sampler": f"own:{sampler}", "reward": ("own:later",), "group_size": 4, "steps": 3}
    small |= {"prompts_per_step": 4, "eval_every": 100, "save_every": 1, "warm_start_steps": 0}
    directory = run(loop, small, max_new_tokens=3).directory
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    text = (directory / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert logged[0]["held_out_reward_missing"] == 4
    assert "held_out_reward" not in logged[0]
    said = capsys.readouterr().out
    updated = [row["grad_norm"] > 0 for row in logged[1:]]
    if sampler == "nothing":
        assert updated == [False] * 3
        assert [row["tokens"] for row in logged[1:]] == [0] * 3
    else:
        assert updated == [True, False, False]
        kept = [path.name for path in sorted((directory / "checkpoints").iterdir())]
        assert kept == ["step-000002", "step-000003"]
    assert said.count("has no update: no completion has a reward") == updated.count(False)


def scored_of(groups, penalty=0.0):
    unshaped = torch.tensor(groups).flatten()
    total = unshaped + penalty * torch.arange(len(unshaped))
    return Scored(total, unshaped, {"a": total}, torch.zeros(len(total)).bool())


def test_a_group_is_informative_by_its_rewards_without_the_length_penalty():
    groups = [[0.0, 0, 0], [1, 1, 1], [0, 1, 0], [NAN, 1, 0], [NAN, 1, 1], [NAN, NAN, 1], [NAN] * 3]
    scored = scored_of(groups, penalty=-0.1)
    assert informative(scored, 3).tolist() == [False, False, True, True, False, False, False]
    known = [value == value for group in groups for value in group]
    assert compared(scored, GrpoConfig(group_size=3)).tolist() == known
    found = compared(scored, GrpoConfig(group_size=3, sampling_rounds=2)).view(-1, 3)
    assert found.sum(1).tolist() == [0, 0, 3, 2, 0, 0, 0]
    sampled = SampledGroups(
        GrpoConfig(prompts_per_step=2, group_size=2, sampling_rounds=2, minibatches=2)
    )
    prompts = sampled.prompts([Prompt({"prompt": str(i)}, [i]) for i in range(4)], 0)
    one = Completion(torch.ones(3).long(), torch.zeros(3), ended=True)
    scored = scored_of([[1.0, 1.0], [0.0, 1.0]], penalty=-0.1)
    sampled.add(rollout_of(prompts, [one] * 4, torch.device("cpu")), scored)
    assert sampled.missing == 1


def test_dynamic_sampling_does_not_learn_from_lengths_alone(small, own):
    """With one round they are learned from."""
    own(wrong=lambda prompts, *_: [0.0] * len(prompts), fixed=fixed)
    small |= {"reward": ("own:wrong", "overlong"), "sampler": "own:fixed", "max_new_tokens": 3}
    small |= {"prompts_per_step": 2, "steps": 1, "minibatches": 1, "warm_start_steps": 0}
    for rounds in (1, 2):
        row = rows(run("grpo", small, sampling_rounds=rounds, out=str(rounds)).directory)[-1]
        assert row["informative"] == 0
        assert row["reward_std"] > 0
        assert (row["left_out"] < 1) == (row["grad_norm"] > 0) == (rounds == 1)


@pytest.mark.parametrize("loop", LOOPS)
def test_log_probabilities_that_are_not_the_models_are_named_once(small, own, capsys, loop):
    def right(prompts, size, complete, tokenizer):
        return complete([prompt.token_ids for prompt in prompts for _ in range(size)])

    own(right=right, invented=fixed)
    small |= {"group_size": 4, "max_new_tokens": 3, "prompts_per_step": 2, "minibatches": 1}
    small |= {"eval_every": 100, "warm_start_steps": 0}
    for sampler in ("right", "invented"):
        logged = rows(run(loop, small, sampler=f"own:{sampler}", out=sampler).directory)
        assert all((row["kl_sampler"] > 0.1) == (sampler == "invented") for row in logged[1:])
        lines = [line for line in capsys.readouterr().out.splitlines() if "kl_sampler" in line]
        assert len(lines) == (sampler == "invented")
    assert lines[0].startswith("the log-probabilities of the sampler own:invented are far from the")
