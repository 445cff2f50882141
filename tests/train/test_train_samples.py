"""Sample completions on the screen and on disk, as text whatever they contain."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig
from fastrl.train.rewards import RewardError, Rewards
from fastrl.train.rewards.weighted import in_this_process
from fastrl.train.run.run_log import RunLog
from fastrl.train.run.samples import Samples
from fastrl.train.run.terminal import printable, shortened
from tests.support.train_runs import LOOPS, run

HOSTILE = "\x00\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\u200b\ud800\u2028\rend"
SEEN = r"\x00\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066\u200b\ud800\u2028\rend"


def stored(directory):
    return list(map(json.loads, (Path(directory) / "samples.jsonl").read_text().splitlines()))


@pytest.fixture
def samples(tmp_path):
    """Makes `Samples` of some settings; `samples.said` are the lines on the screen."""
    said = []

    def make(**settings):
        return Samples(GrpoConfig(**settings), tmp_path, said.append)

    make.said, make.directory = said, tmp_path
    return make


@pytest.mark.parametrize("loop", LOOPS)
def test_a_resumed_run_has_the_samples_of_one_that_was_not_cut(small, loop, capsys):
    small |= {"sample_every": 2, "steps": 6, "save_every": 1, "keep_checkpoints": 9}
    whole = run(loop, small, name="whole").directory
    assert [sample["step"] for sample in stored(whole)] == [2, 2, 2, 4, 4, 4, 6, 6, 6]
    assert sum(line.startswith("step 4 ") for line in capsys.readouterr().out.splitlines()) == 3
    cut = run(loop, small, name="cut").directory
    for step in (4, 5, 6):
        shutil.rmtree(cut / "checkpoints" / f"step-{step:06d}")
    with (cut / "samples.jsonl").open("a") as file:
        file.write('{"step": 6, "chosen": "be')  # as a kill leaves it
    run(loop, small, name="cut", resume=True)
    assert stored(cut) == stored(whole)


def test_samples_are_the_completions_of_the_step_and_their_rewards(small):
    directory = run("grpo", small, sample_every=1, steps=2, samples=4).directory
    prompts = {f"{i} + 1 =" for i in range(6)}
    for sample in stored(directory):
        digits = sum(c in "0123456789" for c in sample["completion"])
        assert sample["reward"] == digits / 2
        assert sample["prompt"] in prompts
    rewards = [s["reward"] for s in stored(directory) if s["step"] == 2]
    reasons = [s["chosen"] for s in stored(directory) if s["step"] == 2]
    assert reasons == ["best", "worst", "random", "random"]
    assert rewards[0] == max(rewards) > min(rewards) == rewards[1]


def test_without_sample_every_there_are_none(small):
    assert not (run("grpo", small, sample_every=0).directory / "samples.jsonl").exists()


def test_the_choice_uses_no_random_state_and_differs_between_steps(samples):
    shown = samples(samples=9, sample_every=1)
    texts = [str(i) for i in range(30)]
    state = random.getstate(), torch.get_rng_state()
    for step in (1, 2, 1):
        shown.collect(texts, texts, {"reward": list(map(float, texts))})
        shown.write(step)
        random.seed(step)
    random.setstate(state[0])
    assert torch.equal(state[1], torch.get_rng_state())
    first, second, again = (stored(samples.directory)[i : i + 9] for i in (0, 9, 18))
    assert first == again
    assert [s["prompt"] for s in first] != [s["prompt"] for s in second]
    assert [s["prompt"] for s in first[:2]] == ["29", "0"]
    assert len({s["prompt"] for s in first}) == 9


@pytest.mark.parametrize(("asked", "there", "expected"), [(3, 1, 1), (1, 5, 1), (9, 4, 4)])
def test_there_are_not_more_samples_than_completions(samples, asked, there, expected):
    shown = samples(samples=asked)
    shown.collect(["p"] * there, ["c"] * there, {"reward": [0.0] * there})
    shown.write(1)
    assert len(stored(samples.directory)) == len(samples.said) == expected


def test_parts_of_a_reward_and_messages_as_prompt_are_kept(samples):
    messages = [{"role": "user", "content": "hé"}]
    shown = samples()
    shown.collect([messages], ["c"], {"reward": [0.75], "format": [1.0], "length\x1b": [-0.25]})
    shown.write(10)
    (sample,) = stored(samples.directory)
    assert sample["parts"] == {"format": 1.0, "length\x1b": -0.25}
    assert json.loads(sample["prompt"]) == messages
    assert samples.said[0].startswith(r"step 10 best 0.75 (format 1, length\x1b -0.25): '[{")


def test_escape_sequences_in_samples_are_text_on_the_screen_and_on_disk(samples):
    shown = samples()
    shown.collect([HOSTILE[:8]], [HOSTILE], {"reward": [0.5]})
    shown.write(10)
    assert samples.said == [rf"step 10 best 0.5: '\x00\x1b[2J\x1b]0' -> '{SEEN}'"]
    written = (samples.directory / "samples.jsonl").read_bytes()
    assert all(32 <= byte < 127 for byte in written.rstrip(b"\n"))
    assert stored(samples.directory)[0]["completion"] == HOSTILE


def test_a_long_completion_is_short_on_the_screen_and_whole_on_disk(samples):
    shown = samples()
    text = "begin " + "x" * 50_000 + " end"
    shown.collect(["p"], [text], {"reward": [0.5]})
    shown.write(10)
    assert len(samples.said[0]) < 200
    assert "'begin xx" in samples.said[0]
    assert samples.said[0].endswith("xx end'")
    assert stored(samples.directory)[0]["completion"] == text
    assert shortened("x" * 10, 10) == "x" * 10
    assert [len(shortened("x" * 11, length)) for length in (9, 10)] == [9, 10]


def test_what_is_not_printed_is_escaped_and_other_text_is_as_it_was():
    assert printable(HOSTILE) == SEEN
    for text in ("", "plain 'text' \\x1b \"q\"", "größer 中文 🙂 é"):
        assert printable(text) == text
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert printable(printable(HOSTILE)) == SEEN


def test_the_lines_of_a_run_are_escaped(small, capsys):
    log = RunLog(GrpoConfig(**small), "grpo")
    log.say(f"model {HOSTILE}\nnext")
    log.close()
    assert capsys.readouterr().out == f"model {SEEN}\nnext\n"


def test_a_completion_in_the_error_of_a_reward_is_text():
    def raises(prompts, completions, records):
        raise KeyError(Raw(completions[0]))

    class Raw(str):
        __repr__ = str.__str__

    def not_finite(prompts, completions, records):
        return [float("nan")]

    for function in (raises, not_finite):
        rewards = Rewards({"own": in_this_process(function)}, {"own": 1.0})
        with pytest.raises(RewardError) as error:
            rewards.score([{"prompt": HOSTILE}], [HOSTILE], [1])
        assert str(error.value).isprintable()
        assert SEEN in str(error.value)


def test_the_error_at_the_end_of_a_command_is_text(monkeypatch, capsys):
    def fails(config):
        raise ValueError(f"{HOSTILE}\nsecond line")

    monkeypatch.setattr(sys, "argv", ["grpo"])
    with pytest.raises(SystemExit, match="2"):
        main(GrpoConfig, fails)
    assert capsys.readouterr().err == f"error: {SEEN}\nsecond line\n"
