"""Rewards: ready functions, own ones here and in workers, a reward model and how to train one."""

import os
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import arithmetic, reward_model
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.prompts import Prompt
from fastrl.train.reward_model import RewardModel
from fastrl.train.rewards import RewardError, overlong
from tests.train import small_rewards
from tests.train.packed import save_reward_model
from tests.train.runs import asked, rewards_of


def score(completions, *names, prompts=None, answers=None, **settings):
    prompts = prompts or [f"prompt {i}" for i in range(len(completions))]
    pairs = zip(prompts, answers or ["2"] * len(prompts), strict=True)
    given = [Prompt({"prompt": prompt, "answer": answer}, []) for prompt, answer in pairs]
    return rewards_of(*names, **settings).score(given, completions, list(range(8, 8 + len(given))))


def test_the_reward_is_the_weighted_sum_of_the_functions(own):
    own(length=lambda prompts, texts, records: map(len, texts), seven=lambda *_: [7] * 3)
    names = ("exact_match=2", "overlong=0.5", "own:length=-1", "own:seven=0")
    scored = score(["2\n", "22", ""], *names, answers=[" 2 "] * 3)
    parts = {"exact_match": [1, 0, 0], "overlong": [0, -0.5, -1], "length": [2, 2, 0]}
    assert {k: v.tolist() for k, v in scored.parts.items()} == {**parts, "seven": [7, 7, 7]}
    assert scored.total.tolist() == [0, -2.25, -0.5]
    means = {"": -1.375, "/exact_match": 0, "/overlong": -0.75, "/length": 1, "/seven": 7}
    means = {f"held_out{name}": mean for name, mean in {**means, "_failures": 0}.items()}
    rewards = rewards_of(*names, reward_failed=0.0)
    assert rewards.means(scored.rows(torch.tensor([1, 2])), prefix="held_out") == means
    assert overlong([16384, 18432, 20480, 30000], 20480) == [0, -0.5, -1, -1]  # DAPO's own numbers


def test_mathematical_equality():
    pytest.importorskip("math_verify")
    texts = ["so it is 1,234", r"\boxed{\frac{1}{2}}", "42", "2 steps\n#### 42\n", "no number"]
    answers = ["1234", "0.5", "The answer needs 2 steps.\n#### 42", "2", "1"]
    assert score(texts, "math_verify", answers=answers).total.tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(RewardError, match='"answer" must hold a number or formula, got None'):
        score(["1"], "math_verify", answers=[None])


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("12", "must return a sequence of numbers, got str"),
        ({"a": 1, "b": 2}, "must return a sequence of numbers, got dict"),
        ([1.0] * 3, "must return [12] numbers, got 3"),
        (["a", "b"], "must return numbers, got 'a'"),
        ([float("nan")] * 2, "must return numbers that are finite in float32, got nan"),
        ([1e39] * 2, r"must return numbers that are finite in float32, got 1e\+39"),
    ],
)
def test_a_wrong_return_value_is_named(own, returned, reason):
    """Also if each completion alone has a reward."""
    for alone in (returned, [1.0]):
        own(judge=lambda prompts, *_, alone=alone: returned if len(prompts) > 1 else alone)
        with pytest.raises(RewardError, match=f"^reward judge: {reason}, for 'prompt [01]' -> '"):
            score(["x", "y" * 999], "own:judge")
        assert score(["x", "y"], "own:judge", reward_failed=-1.0).total.tolist() == [-1, -1]


@pytest.mark.parametrize("limit", [None, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_failure_is_of_its_completion_alone(limit):
    """Here and in workers, where what hangs or ends its process is a failure, too."""
    path, first = small_rewards.__file__, small_rewards.faulty.__code__.co_firstlineno
    settings = {"reward_timeout": limit}
    reasons = {"raise": f"raised KeyError: 'no such test' in {path} line {first + 3}"}
    reasons["exit"] = f"raised SystemExit: 3 in {path} line {first + 5}"
    if limit is not None:
        reasons["die"] = "ended its process, with exit code 4"
        reasons["hang"] = "took longer than 2 s"
    names = ("tests.train.small_rewards:faulty", "exact_match")
    scored = score(["process", *reasons, "2"], *names, reward_failed=-2.0, **settings)
    assert (scored.total[0] == os.getpid()) == (limit is None)
    assert scored.total.tolist()[1:] == [*[-2] * len(reasons), 2]  # it changed a copy
    assert scored.failed.tolist() == [False, *[True] * len(reasons), False]
    for completion, reason in reasons.items():
        with pytest.raises(RewardError) as error:
            score(["", completion], *names, **settings)
        assert str(error.value) == f"reward faulty: {reason}, for 'prompt 1' -> {completion!r}"
        assert ("Traceback" in "".join(error.value.__notes__)) == ("raised" in reason)


def test_every_answer_of_exact_match_is_checked_before_a_run():
    texts = asked(*map(str, range(40)))
    for wrong in ({}, {"answer": 7}):
        texts[29] = Prompt({"prompt": "question 29", **wrong}, [])
        with pytest.raises(RewardError, match=r"must be text, got (None|7) for 'question 29'"):
            rewards_of("exact_match").probe(texts)


def test_functions_are_tried_on_a_few_prompts_before_a_run(own):
    seen, prompts = [], [Prompt({"prompt": str(i)}, []) for i in range(100)]
    own(judge=lambda texts, *_: [1.0 / int(text) for text in texts if not seen.append(text)])
    rewards_of("own:judge").probe(prompts[1:])
    assert 4 <= len(seen) <= 8
    with pytest.raises(RewardError, match=r"ZeroDivisionError: .* line \d+, for '0' -> ''"):
        rewards_of("own:judge").probe(prompts)
    rewards_of("own:judge", reward_failed=0.0).probe(prompts)  # it fails on one


PROMPTS = ["1 + 1 =", "1 plus seven =", "2:", "12345678901 + 1 ="]
COMPLETIONS = ["2", "8 and more", "", "<eos><pad>"]


@pytest.fixture
def judge(tmp_path):
    """The name of a new reward model, and the model."""
    return f"model:{tmp_path}", save_reward_model(tmp_path)


def alone(model, *tokens):
    """What transformers computes of one sequence."""
    with torch.no_grad():
        ids = character_tokenizer()(list(tokens), return_tensors="pt")["input_ids"]
        return pytest.approx(float(model(ids.T).logits), abs=1e-6)


@pytest.mark.parametrize("tokens", [1, 60, 16384])
def test_a_reward_model_scores_each_sequence_as_if_alone(judge, monkeypatch, tokens):
    """In any order, with its end token, which a completion cannot write itself."""
    name, model = judge
    monkeypatch.setattr(reward_model, "_TOKENS", tokens)
    expected = [alone(model, *p, *c, "<eos>") for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    for order in (slice(None), slice(None, None, -1)):
        scored = score(COMPLETIONS[order], name, prompts=PROMPTS[order])
        assert scored.total.tolist() == expected[order]
    assert alone(model, *"2:", "<eos>").expected != alone(model, *"2:")


def test_a_reward_model_reads_conversations_through_its_template(judge):
    name, model = judge
    for prompt, chat in (("1", True), ([{"role": "user", "content": "1"}], False)):
        scored = score(["2"], name, prompts=[prompt], chat_template=chat)
        assert scored.total.tolist() == [alone(model, *"[user]1;[assistant]2;")]
    with pytest.raises(RewardError, match=r"at most 256 tokens, got 310 in .* for 'prompt 1'"):
        score(["2", "2" * 301], name)


def test_what_is_no_whole_reward_model_is_refused(judge):
    name, model = judge
    weights, kind = model.state_dict(), type(model)
    lost = {key: weights[key] for key in weights if key != "model.norm.weight"}
    broken = {**weights, "score.weight": weights["score.weight"] * torch.nan}
    for setting, value, state, message in (
        ("num_labels", 1, lost, r"trained weights, but lacks model\.norm\.weight"),
        ("num_labels", 1, broken, r"finite weights, got a NaN or infinity in score\.weight"),
        ("pad_token_id", 1, weights, "a padding token other than its end token, got 1 and 1"),
        ("pad_token_id", None, weights, "a padding token other than its end token, got None"),
        ("num_labels", 3, None, "one label, the reward, got 3"),
    ):
        model.config.pad_token_id = 0
        setattr(model.config, setting, value)
        kind(model.config).save_pretrained(name.removeprefix("model:"), state_dict=state)
        with pytest.raises(ValueError, match=f"^reward: the model .* must have {message}"):
            rewards_of(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_script_trains_one_on_what_it_reads(tmp_path, monkeypatch, capsys):
    """On prompt, completion and end token; the right answer is chosen, and never rejected."""
    trl = pytest.importorskip("trl")
    trainers = []

    class Recorded(trl.RewardTrainer):
        def __init__(self, *arguments, train_dataset, **options):
            super().__init__(*arguments, train_dataset=train_dataset, **options)
            trainers.append((self, list(train_dataset)))

    (train, held_out), out = arithmetic.split(0), str(tmp_path / "model")
    monkeypatch.setattr(trl, "RewardTrainer", Recorded)
    monkeypatch.setattr(arithmetic, "split", lambda seed: (train[:32], held_out[:8]))
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "train_reward_model.py"))
    script["main"](out, seed=0, answer_steps=2, steps=2)
    assert "held-out accuracy: 0." in capsys.readouterr().out
    ((trainer, rows),) = trainers
    answers = {record["prompt"]: record["answer"] for record in train[:32]}
    assert {row["prompt"]: row["chosen"] for row in rows} == answers
    assert len(rows) > 7 * 32
    assert all(row["rejected"] != row["chosen"] for row in rows)
    assert any(row["rejected"] == "" for row in rows)
    loaded = RewardModel(out, torch.device("cpu"), GrpoConfig())
    for kind in ("chosen", "rejected"):
        read = [loaded._encode(row["prompt"], row[kind]) for row in rows]
        assert trainer.train_dataset[f"{kind}_ids"][:] == read
    assert len(set(loaded([""] * 4, ["1", "2", "", "12"], rows[:4]))) > 1
