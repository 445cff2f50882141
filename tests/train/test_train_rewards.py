"""Rewards: ready functions, own ones here and in workers, a reward model; what messages say."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.train import reward_model
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import character_tokenizer, small_model
from fastrl.train.prompts import Prompt
from fastrl.train.rewards import RewardError, Rewards, overlong

CPU = torch.device("cpu")


def score(completions, *names, records=None, lengths=None, **settings):
    rewards = Rewards(GrpoConfig(reward=names, **settings), CPU)
    records = records or [{"prompt": f"prompt {i}", "answer": "2"} for i in range(len(completions))]
    prompts = [Prompt(record, []) for record in records]
    return rewards.score(prompts, completions, lengths or [1] * len(completions))


@pytest.fixture
def own(monkeypatch):
    """Makes the functions of the module ``own``; the first is ``own:judge``."""

    def make(function, **others):
        monkeypatch.setitem(sys.modules, "own", SimpleNamespace(judge=function, **others))
        return "own:judge"

    return make


def test_the_reward_is_the_weighted_sum_of_the_functions(own):
    own(lambda prompts, completions, records: map(len, completions), seven=lambda *_: [7] * 3)
    names = ("exact_match=2", "overlong=0.5", "own:judge=-1", "own:seven=0")
    rewards = Rewards(GrpoConfig(reward=names, max_new_tokens=10, reward_failed=0.0), CPU)
    prompts = [Prompt({"prompt": "p", "answer": " 2 "}, [])] * 3
    scored = rewards.score(prompts, ["2\n", "22", ""], [8, 9, 10])
    parts = {"exact_match": [1, 0, 0], "overlong": [0, -0.5, -1], "judge": [2, 2, 0]}
    assert {k: v.tolist() for k, v in scored.parts.items()} == {**parts, "seven": [7, 7, 7]}
    assert scored.total.tolist() == [0, -2.25, -0.5]
    means = {"": -1.375, "/exact_match": 0, "/overlong": -0.75, "/judge": 1, "/seven": 7}
    means = {f"held_out{name}": mean for name, mean in {**means, "_failures": 0}.items()}
    assert rewards.means(scored.rows(torch.tensor([1, 2])), prefix="held_out") == means
    assert overlong([16384, 18432, 20480, 30000], 20480) == [0, -0.5, -1, -1]  # DAPO's own numbers


def test_a_bad_list_of_functions_is_named():
    for names, message in (
        (("exact_match", "exact_match=2"), "name different functions, got 'exact_match' twice"),
        (("exact_match=nan",), "have finite weights, got 'exact_match=nan'"),
        (("exact_match=0",), "have a weight other than 0"),
        (("exactmatch",), "be a known name or module:function, got 'exactmatch'"),
    ):
        with pytest.raises(ValueError, match=f"^reward must {message}"):
            Rewards(GrpoConfig(reward=names), CPU)


def test_mathematical_equality():
    pytest.importorskip("math_verify")
    pairs = {
        "so it is 1,234": "1234",
        r"\boxed{\frac{1}{2}}": "0.5",
        "42": "The answer needs 2 steps.\n#### 42",
        "2 steps\n#### 42\n": "2",  # what follows the mark counts alone
        "no number": "1",
    }
    records = [{"prompt": "p", "answer": answer} for answer in pairs.values()]
    scored = score(list(pairs), "math_verify", records=records)
    assert scored.total.tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(RewardError, match='"answer" must hold a number or formula, got None'):
        score(["1"], "math_verify", records=[{"prompt": "p"}])


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("12", "must return a sequence of numbers, got str"),
        ({"a": 1, "b": 2}, "must return a sequence of numbers, got dict"),
        ([1.0] * 3, "must return [12] numbers, got 3"),
        ([None, None], "must return numbers, got None"),
        ([float("nan")] * 2, "must return numbers that are finite in float32, got nan"),
        ([1e39] * 2, r"must return numbers that are finite in float32, got 1e\+39"),
    ],
)
def test_a_wrong_return_value_is_named(own, returned, reason):
    """Also if each completion alone has a reward."""
    for alone in (returned, [1.0]):
        name = own(lambda prompts, *_, alone=alone: returned if len(prompts) > 1 else alone)
        with pytest.raises(RewardError, match=f"^reward judge: {reason}, for 'prompt [01]' -> '"):
            score(["x", "y" * 999], name)
        assert score(["x", "y"], name, reward_failed=-1.0).total.tolist() == [-1, -1]


FAULTY = """
import os, sys, time
def judge(prompts, completions, records):
    records[0]["answer"] = prompts[0] = "changed"
    if "hang" in completions: time.sleep(600)
    if "exit" in completions: sys.exit(3)
    if "die" in completions: os._exit(4)
    if "raise" in completions: raise KeyError("no such test")
    return [os.getpid() if text == "process" else len(text) for text in completions]
"""


@pytest.mark.parametrize("limit", [None, 2.0])
def test_a_failure_is_of_its_completion_alone(tmp_path, monkeypatch, limit):
    """Here and in workers, where what hangs or ends its process is a failure, too."""
    path = tmp_path / "faulty_rewards.py"
    path.write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    name, place = "faulty_rewards:judge", f" in {path} line "
    reasons = {"raise": f"raised KeyError: 'no such test'{place}8"}
    reasons["exit"] = f"raised SystemExit: 3{place}6"
    if limit is not None:
        reasons["die"] = "ended its process, with exit code 4"
        reasons["hang"] = "took longer than 2 s"
    completions = ["process", *reasons, ""]
    records = [{"prompt": f"prompt {i}", "answer": "2"} for i in range(len(completions))]
    settings = {"reward_timeout": limit, "records": records}
    scored = score(completions, name, "exact_match", reward_failed=-2.0, **settings)
    assert (scored.total[0] == os.getpid()) == (limit is None)
    assert scored.total.tolist()[1:] == [*[-2] * len(reasons), 0]
    assert scored.failed.tolist() == [False, *[True] * len(reasons), False]
    assert {record["answer"] for record in records} == {"2"}
    for completion, reason in reasons.items():
        with pytest.raises(RewardError) as error:
            score(["", completion], name, reward_timeout=limit)
        assert str(error.value) == f"reward judge: {reason}, for 'prompt 1' -> {completion!r}"
        assert ("Traceback" in "".join(error.value.__notes__)) == (place in reason)
    sys.modules.pop("faulty_rewards", None)


def test_functions_are_tried_on_a_few_prompts_before_a_run(own):
    def judge(texts, completions, records):
        seen.extend(texts)
        return [1.0 / (text != "0") for text in texts]

    seen, prompts = [], [Prompt({"prompt": str(i)}, []) for i in range(100)]
    settings = {"reward": (own(judge),)}
    strict, lenient = (
        Rewards(GrpoConfig(**settings, reward_failed=failed), CPU) for failed in (None, 0.0)
    )
    strict.probe(prompts[1:])
    assert 4 <= len(seen) <= 8
    lenient.probe(prompts)  # it fails on one
    for rewards, some in ((strict, prompts), (lenient, prompts[:1])):
        with pytest.raises(RewardError, match=r"ZeroDivisionError: .* line \d+, for '0' -> ''"):
            rewards.probe(some)


PROMPTS = ["1 + 1 =", "1 plus seven =", "2:", "12345678901 + 1 ="]
COMPLETIONS = ["2", "8 and more", "", "<eos><pad>"]


@pytest.fixture
def judge(tmp_path):
    """The directory of a new reward model, and the model."""
    torch.manual_seed(3)
    tokenizer, config = character_tokenizer(), small_model(character_tokenizer()).config
    config.num_labels = 1
    model = transformers.LlamaForSequenceClassification(config)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path, model.eval()


def alone(model, text, end="<eos>"):
    """What transformers computes of one sequence, whose characters are its tokens."""
    ids = character_tokenizer()([*text, *([end] if end else [])])["input_ids"]
    with torch.no_grad():
        return float(model(torch.tensor(ids).T).logits)


@pytest.mark.parametrize("tokens", [1, 60, 16384])
def test_a_reward_model_scores_each_sequence_as_if_alone(judge, monkeypatch, tokens):
    """In any order, with its end token, which a completion cannot write itself."""
    path, model = judge
    monkeypatch.setattr(reward_model, "_TOKENS", tokens)
    rewards = Rewards(GrpoConfig(reward=(f"model:{path}",)), CPU)
    expected = [alone(model, p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    for order in (slice(None), slice(None, None, -1)):
        prompts = [Prompt({"prompt": prompt}, []) for prompt in PROMPTS[order]]
        total = rewards.score(prompts, COMPLETIONS[order], [1] * 4).total
        assert total.tolist() == pytest.approx(expected[order], abs=1e-6)
    assert len(set(expected)) == 4
    assert abs(alone(model, "2:") - alone(model, "2:", end=None)) > 1e-4


def test_a_reward_model_reads_conversations_through_its_template(judge):
    path, model = judge
    expected = pytest.approx([alone(model, "[user]1;[assistant]2;", end=None)], abs=1e-6)
    messages = [{"role": "user", "content": "1"}]
    for prompt, chat in (("1", True), (messages, False)):
        settings = {"records": [{"prompt": prompt}], "chat_template": chat}
        assert score(["2"], f"model:{path}", **settings).total.tolist() == expected
    scored = score(["2", "2" * 601], f"model:{path}", reward_failed=-9.0)
    assert scored.failed.tolist() == [False, True]
    with pytest.raises(RewardError, match=r"must get at most 512 tokens, got 610"):
        score(["2", "2" * 601], f"model:{path}")


def test_what_is_no_whole_reward_model_is_refused(judge):
    path, model = judge
    weights, kind = model.state_dict(), type(model)
    lost = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    broken = {**weights, "score.weight": weights["score.weight"] * torch.nan}
    for setting, value, state, message in (
        ("num_labels", 1, lost, r"trained weights, but lacks model\.norm\.weight"),
        ("num_labels", 1, broken, r"finite weights, got a NaN or infinity in score\.weight"),
        ("pad_token_id", 1, weights, "a padding token other than its end token, got 1 and 1"),
        ("pad_token_id", None, weights, "a padding token other than its end token, got None"),
        ("num_labels", 3, None, "one label, the reward, got 3"),
    ):
        setattr(model.config, setting, value)
        kind(model.config).save_pretrained(path, state_dict=state)
        with pytest.raises(ValueError, match=f"^reward: the model .* must have {message}"):
            Rewards(GrpoConfig(reward=(f"model:{path}",)), CPU)
        model.config.pad_token_id = 0
