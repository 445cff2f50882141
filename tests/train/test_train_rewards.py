"""The ready reward functions, their weighted sum, and what the log has of it."""

import json
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.command_line import parse
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.data import arithmetic
from fastrl.train.rewards import (
    RewardError,
    Rewards,
    make_rewards,
    number_equality,
    overlong,
)
from fastrl.train.rewards.weighted import in_this_process
from fastrl.train.run.curves import draw
from tests.support.train_runs import LOOPS, rows, run


def score(completions, records=None, lengths=None, **settings):
    with make_rewards(GrpoConfig(**settings)) as rewards:
        records = records or [{"prompt": "p"}] * len(completions)
        return rewards.score(records, completions, lengths or [1] * len(completions))


@pytest.mark.parametrize(
    ("completion", "answer", "equal"),
    [
        ("so it is 1,234", "1234", True),
        ("1,234.50", 1234.5, True),
        ("1,234", "1", False),
        ("one of 1,2", "2", True),
        ("x = -5.", -5, True),
        ("7 - 5", "-5", False),
        ("7-5", "5", True),  # it subtracts
        ("7 -5", "-5", True),
        ("\u22123", "-3", True),
        ("+3", "3", True),
        ("-$5", "-5", True),
        ("1/2", "0.5", True),
        ("2/4", "1/2", True),
        ("-1/3", "-2/6", True),
        ("0.3333333333333333", "1/3", False),
        ("3/0", "3", False),
        ("1e3", "1000", True),
        ("1.5E-2", "0.015", True),
        ("1e999999999999", "1", False),
        ("1e99999999999999999999999", "1", False),
        ("0." + "0" * 50 + "1", "0", False),
        ("9007199254740993", "9007199254740992", False),  # 2**53 + 1: equal as floats
        (".5", "0.5", True),
        ("18/12", "12/8", True),  # the quotients have more digits than the numbers
        ("50%", "50", True),
        (r"first 3, then \boxed{\frac{3}{4}}, not 9", "0.75", True),
        (r"\boxed{1} and \boxed{x = {2}} or 3", "2", True),
        (r"$-\dfrac{6}{4}$", "-1.5", True),
        ("2 steps\n#### 42\n(7 words)", "42", True),
        ("42", "The answer needs 2 steps.\n#### 42", True),
        ("no number", "1", False),
        ("", "1", False),
        (r"\boxed{none} 4", "4", False),
    ],
)
def test_number_equality(completion, answer, equal):
    assert number_equality(["p"], [completion], [{"answer": answer}]) == [float(equal)]


def test_number_equality_agrees_with_exact_fractions():
    draw_from = random.Random(0)
    for _ in range(500):
        a, b = (Fraction(draw_from.randint(-50, 50), draw_from.choice([1, 2, 4, 5])) for _ in "ab")
        shown = draw_from.choice([str(a), str(float(a)), f"{float(a):.3e}", f"{float(a):,.2f}"])
        answer = draw_from.choice([str(b), float(b), f"{float(b):.2f}"])
        assert number_equality([""], [shown], [{"answer": answer}]) == [float(a == b)]


@pytest.mark.parametrize("text", ["111," * 5000, "1" * 20000, r"\boxed{" * 3000, "1e" * 9000])
def test_numbers_are_found_in_time_that_grows_slowly(text):
    began = time.process_time()
    number_equality([""], [text], [{"answer": 3}])
    assert time.process_time() - began < 5  # milliseconds, where a quadratic search takes hours


@pytest.mark.parametrize("answer", [None, "none", True, float("nan"), [1], "3/0"])
def test_an_answer_that_is_no_number_is_named(answer):
    with pytest.raises(RewardError, match=r"reward number_equality: .*must be a number or text"):
        score(["1"], [{"prompt": "p", "answer": answer}], reward=("number_equality",))


def test_regular_expression():
    records = [{"prompt": "p", "pattern": "b+$"}, {"prompt": "p"}, {"prompt": "p"}]
    settings = {"reward": ("regular_expression",), "reward_pattern": "^a.*c"}
    assert score(["abb", "abc", "bbb"], records, **settings).total.tolist() == [1, 1, 0]
    with pytest.raises(RewardError, match='"pattern" or reward_pattern must be given, for prompt'):
        score(["a"], reward=("regular_expression",))
    with pytest.raises(RewardError, match=r"\"pattern\" of prompt 'p' must be a regular"):
        score(["a"], [{"prompt": "p", "pattern": "("}], reward=("regular_expression",))
    with pytest.raises(RewardError, match=r"\"pattern\" of prompt 'p' must be a string, got 3"):
        score(["a"], [{"prompt": "p", "pattern": 3}], reward=("regular_expression",))


def test_a_pattern_that_backtracks_is_stopped():
    settings = {
        "reward": ("regular_expression",),
        "reward_pattern": "(?:(?:a|aa)+b?)+z",
        "reward_timeout": 0.2,
    }
    text = "a" * 60 + "y"
    with pytest.raises(RewardError, match=r"took longer than 0.2 s to match its pattern, for 'p'"):
        score(["x", text], **settings)
    scored = score(["x", text], **settings, reward_failed=0.5)
    assert (scored.total.tolist(), scored.failed.tolist()) == ([0, 0.5], [False, True])


@pytest.mark.parametrize(
    ("completion", "fits"),
    [
        ("<think>a\nb</think>\n<answer>1</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<think>a</think><answer>1</answer> and more", False),
        ("so <think>a</think><answer>1</answer>", False),
        ("<think>a</think><think>b</think><answer>1</answer>", False),
        ("<think>a</think><answer>1</answer><answer>2</answer>", False),
        ("<answer>1</answer>", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_format(completion, fits):
    assert score([completion], reward=("format",)).total.tolist() == [float(fits)]
    own = {"reward": ("format",), "reward_format": r"\d.\d"}
    assert score(["1\n2", "1 22"], **own).total.tolist() == [1, 0]


def test_rewards_of_the_length():
    lengths = [1, 5, 8, 9, 10]
    settings = {"max_new_tokens": 10, "lengths": lengths}
    assert score([""] * 5, reward=("length_penalty",), **settings).total.tolist() == pytest.approx(
        [-0.1, -0.5, -0.8, -0.9, -1]
    )
    for more in ({}, {"overlong_buffer": 2}):  # a fifth of 10
        scored = score([""] * 5, reward=("overlong",), **settings, **more)
        assert scored.total.tolist() == [0, 0, 0, -0.5, -1]
    # DAPO's own numbers: 16384 tokens are free, 20480 are the maximum
    found = overlong([16384, 18432, 20480, 30000], max_new_tokens=20480, buffer=4096)
    assert found == [0, -0.5, -1, -1]


def test_the_reward_is_the_weighted_sum():
    records = [{"prompt": "p", "answer": "12"}] * 3
    names = ("number_equality", "exact_match", "length_penalty")
    scored = score(
        ["12", "= 12", "5"],
        records,
        [2, 4, 1],
        reward=names,
        reward_weights=(2.0, 1.0, 0.5),
        max_new_tokens=4,
    )
    assert {name: part.tolist() for name, part in scored.parts.items()} == {
        "number_equality": [1, 1, 0],
        "exact_match": [1, 0, 0],
        "length_penalty": [-0.5, -1, -0.25],
    }
    assert scored.total.tolist() == [2.75, 1.5, -0.125]
    assert score(["12"], records[:1], reward=names[:2]).total.tolist() == [2]


def test_functions_of_one_name_are_told_apart(small):
    (Path(small["train_file"]).parent / "other_rewards.py").write_text(
        "def digits(prompts, completions, records): return [3] * len(prompts)"
    )
    scored = score(["12"], reward=("small_rewards:digits", "other_rewards:digits"))
    assert {k: v.tolist() for k, v in scored.parts.items()} == {
        "small_rewards:digits": [1],
        "other_rewards:digits": [3],
    }
    assert scored.total.tolist() == [4]


def test_a_sum_that_is_not_finite_is_an_error(small):
    with pytest.raises(RewardError, match="weighted sum must be finite"):
        score(["a"], reward=("small_rewards:constant",), reward_weights=(1e39,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": ()}, "reward must name different functions"),
        ({"reward": ("exact_match", "exact_match")}, "reward must name different functions"),
        ({"reward": "exactmatch"}, "reward must be one of exact_match, .*, got 'exactmatch'"),
        ({"reward": (3,)}, "each of reward must be str, got 3"),
        ({"reward": 3}, "reward must be a list of str, got 3"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights must have a number for each of 1"),
        ({"reward_weights": (0.0,)}, "reward_weights must not all be 0"),
        ({"reward_weights": ("1",)}, "each of reward_weights must be float, got '1'"),
        ({"reward_weights": (float("nan"),)}, "each of reward_weights must be finite"),
        ({"reward_pattern": "a"}, "reward_pattern must be used with reward regular_expression"),
        ({"reward_format": "a"}, "reward_format must be used with reward format"),
        ({"overlong_buffer": 3}, "overlong_buffer must be used with reward overlong"),
        ({"reward_timeout": 0.0}, "reward_timeout must be above 0"),
        ({"reward_failed": float("nan")}, "reward_failed must be finite"),
        ({"reward_workers": -1}, "reward_workers must be at least 0"),
    ],
)
def test_a_bad_setting_of_the_rewards_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        PpoConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "regular_expression", "reward_pattern": "("}, "^reward_pattern must be a regu"),
        ({"reward": "format", "reward_format": "["}, "^reward_format must be a regular expression"),
        ({"reward": "overlong", "overlong_buffer": 5}, "^overlong_buffer must be at most max_new"),
    ],
)
def test_a_setting_that_a_function_cannot_use_is_found_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        make_rewards(GrpoConfig(max_new_tokens=4, **settings))


def test_weights_and_functions_on_the_command_line():
    names = ["--reward", "exact_match", "m:f", "--reward_weights", "1", "-0.5"]
    config = parse(GrpoConfig, names)
    assert (config.reward, config.reward_weights) == (("exact_match", "m:f"), (1.0, -0.5))


def probes(config, records):
    with make_rewards(config) as rewards:
        rewards.probe(records)


def test_an_own_function_is_tried_on_a_handful_and_a_ready_one_on_all(small):
    records, _ = arithmetic.split(0)
    source = Path(small["train_file"]).parent / "counting_rewards.py"
    source.write_text(
        "seen = []\n"
        "def counting(prompts, completions, records):\n"
        "    seen.extend(prompts)\n"
        "    return [0] * len(prompts)\n"
    )
    probes(GrpoConfig(reward="counting_rewards:counting"), records)
    import counting_rewards

    assert 4 <= len(counting_rewards.seen) <= 8
    assert records[0]["prompt"] in counting_rewards.seen
    broken = [*records[:100], {"prompt": "odd"}, *records[100:]]
    probes(GrpoConfig(reward="counting_rewards:counting"), broken)
    with pytest.raises(RewardError, match="\"answer\" must be a string, got None for prompt 'odd'"):
        probes(GrpoConfig(), broken)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_log_has_the_mean_of_each_function(small, loop):
    small |= {
        "reward": ["small_rewards:digits", "length_penalty", "exact_match"],
        "reward_weights": [1, 0.5, 0],
        "max_new_tokens": 3,
    }
    directory = run(loop, small, steps=2, eval_every=1).directory
    for row in rows(directory):
        for prefix in ("held_out_reward", *(["reward"] if row["step"] else [])):
            parts = [row[f"{prefix}/{name}"] for name in ("digits", "length_penalty")]
            assert -1 <= parts[1] <= -1 / 3
            assert row[prefix] == pytest.approx(parts[0] + 0.5 * parts[1])
            assert f"{prefix}/exact_match" in row
    assert rows(directory)[1]["reward_std"] > 0
    assert not any("failures" in key for row in rows(directory) for key in row)
    assert json.loads((directory / "config.json").read_text())["reward"] == small["reward"]


def test_rewards_are_those_of_the_sampled_lengths(small):
    small |= {"reward": "length_penalty", "max_new_tokens": 3, "kl_coef": 0.1}
    row = rows(run("grpo", small, steps=1).directory)[1]
    assert row["reward"] == pytest.approx(-row["length"] / 3)
    assert "reward/length_penalty" not in row  # it is the reward


@pytest.mark.parametrize("loop", LOOPS)
def test_one_sample_without_a_reward_ends_the_run_or_is_counted(small, loop):
    (Path(small["train_file"]).parent / "odd_rewards.py").write_text(
        "def odd(prompts, completions, records):\n"
        "    return [float('nan') if c and ord(c[0]) % 4 == 0 else 1.0 for c in completions]\n"
    )
    small |= {"reward": "odd_rewards:odd"}
    with pytest.raises(RewardError, match=r"^reward odd: must be finite .*, for '\d \+ 1 =' -> "):
        run(loop, small, name="a")
    row = rows(run(loop, small, name="b", steps=1, reward_failed=-3.0).directory)[1]
    size = 64 if loop == "grpo" else 16
    assert 0 < row["reward_failures"] < size
    failed = row["reward_failures"] / size
    assert row["reward"] == pytest.approx(1 - 4 * failed)


def test_a_run_of_an_earlier_version_is_resumed(small):
    small |= {"reward": "fastrl.train.rewards:exact_match", "name": "a"}
    directory = run("grpo", small, steps=1).directory
    settings = json.loads((directory / "config.json").read_text())
    assert settings["reward"] == ["exact_match"]
    new = ("reward_weights", "reward_workers", "reward_timeout", "reward_failed", "dataset")
    old = {key: value for key, value in settings.items() if key not in new}
    for name in ("exact_match", "small_rewards:digits"):
        reward = {"reward": f"fastrl.train.rewards:{name}" if ":" not in name else name}
        (directory / "config.json").write_text(json.dumps(old | reward))
        if name == "exact_match":
            assert run("grpo", small, steps=2, resume=True).step == 2
        else:
            with pytest.raises(ValueError, match=r"^reward must remain \['small_rewards:digits'\]"):
                run("grpo", small, steps=3, resume=True)
    place = ["--resume", "--name", "a", "--out_dir", small["out_dir"], "--steps", "2"]
    assert parse(GrpoConfig, place).reward == ("small_rewards:digits",)


def test_curves_have_a_panel_of_the_functions(tmp_path):
    sizes = []
    for more in ({}, {"reward/a": 0.5, "reward/b": 0.25}):
        logged = [{"step": i, "reward": 0.5, "kl": 0.1, **more} for i in range(3)]
        draw(logged, tmp_path / "curves.png")
        image = (tmp_path / "curves.png").read_bytes()
        sizes.append(int.from_bytes(image[20:24], "big") * int.from_bytes(image[16:20], "big"))
    assert sizes[1] > sizes[0]


def test_scores_do_not_touch_random_numbers(small):
    state = torch.get_rng_state()
    score(["1"], reward="small_rewards:digits")
    assert torch.equal(state, torch.get_rng_state())


def judged(function, records):
    rewards = Rewards({"own": in_this_process(function)}, {"own": 1.0})
    return rewards.score(records, ["a"] * len(records), [1] * len(records))


@pytest.mark.parametrize("status", [0, 3])
def test_a_function_that_exits_is_an_error(status):
    def exits(prompts, completions, records):
        raise SystemExit(status)

    with pytest.raises(RewardError, match=f"reward own: raised SystemExit: {status}"):
        judged(exits, [{"prompt": "1"}])


def test_what_a_function_changes_reaches_nothing_else():
    def changes(prompts, completions, records):
        prompts.clear()
        completions.clear()
        records[0]["prompt"][0]["content"] = "other"
        records[0]["answer"] = "2"
        return [1.0]

    record = {"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "3"}
    assert judged(changes, [record]).total.tolist() == [1]
    assert record == {"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "3"}
