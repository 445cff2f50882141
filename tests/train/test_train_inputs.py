"""What goes into a run: settings, prompts, rewards, the arithmetic task."""

import importlib
import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import fastrl.train
from fastrl.train.command_line import parse
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.data import arithmetic
from fastrl.train.data.prompts import deal, encode, read_jsonl
from fastrl.train.model.small_model import CHARACTERS, character_tokenizer
from fastrl.train.rewards import RewardError, Rewards, exact_match
from fastrl.train.rewards.scoring import import_reward
from fastrl.train.rewards.weighted import in_this_process


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_train_and_held_out_prompts_are_disjoint_and_follow_from_the_seed(seed):
    train, held_out = arithmetic.split(seed)
    assert len(held_out) >= 200
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert len({r["prompt"] for r in train + held_out}) == len(train + held_out)
    assert (train, held_out) == arithmetic.split(seed)
    assert held_out != arithmetic.split(seed + 1)[1]


def test_arithmetic_answers_are_right():
    asked = {r["prompt"]: r["answer"] for part in arithmetic.split(0) for r in part}
    assert asked["seven plus 5 ="] == "12"
    assert asked["3 from nine is"] == "6"
    assert max(len(prompt) for prompt in asked) <= 32
    assert max(len(answer) for answer in asked.values()) <= 4


def test_arithmetic_writes_jsonl(tmp_path):
    command = [
        sys.executable,
        "-m",
        "fastrl.train.data.arithmetic",
        "--out",
        tmp_path,
        "--seed",
        "3",
    ]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert read_jsonl(tmp_path / "train.jsonl") == arithmetic.split(3)[0]
    assert str(tmp_path / "held_out.jsonl") in out


def test_tokenizer_round_trip(tmp_path):
    tokenizer = character_tokenizer()
    text = "  Seven plus 5 =\n" + CHARACTERS
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text)
    assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    assert type(tokenizer).from_pretrained(tmp_path)(text)["input_ids"] == token_ids


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"x\.jsonl:3: not JSON"),
        ("[1]", r"x\.jsonl:3: must be an object, got list"),
        (
            '{"answer": "1"}',
            r'x\.jsonl:3: "prompt" must be a non-empty string or a list of messages, got None',
        ),
        ('{"prompt": "\xff"}', r"x\.jsonl:3: not JSON: 'utf-8' codec can't decode"),
        ('{"prompt": ' + "9" * 5000 + "}", r"x\.jsonl:3: not JSON: Exceeds the limit"),
        ("[" * 100_000, r"x\.jsonl:3: not JSON: maximum recursion depth"),
        ('{"prompt": ""}', r'x\.jsonl:3: "prompt" must be a non-empty string'),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "1 + 1 ="}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=message):
        read_jsonl(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ValueError, match=r"no\.jsonl cannot be read"):
        read_jsonl(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        read_jsonl(tmp_path / "empty.jsonl")


def test_every_prompt_is_dealt_once_per_round():
    items = list(range(10))
    dealt = [x for step in range(5) for x in deal(items, count=4, step=step, seed=7)]
    assert sorted(dealt[:10]) == sorted(dealt[10:]) == items
    assert dealt[:10] != dealt[10:]
    assert deal(items, count=4, step=3, seed=7) == dealt[12:16]


def test_a_prompt_that_is_too_long_or_cannot_be_tokenized_is_an_error():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="max_prompt_tokens must cover every prompt, got 5"):
        encode([{"prompt": "1 + 1"}], tokenizer, chat_template=False, max_tokens=4)
    with pytest.raises(ValueError, match="cannot be tokenized"):
        encode([{"prompt": "1 ∙ 1"}], tokenizer, chat_template=False, max_tokens=9)
    with pytest.raises(ValueError, match="chat_template: the tokenizer has none"):
        encode([{"prompt": "1"}], tokenizer, chat_template=True, max_tokens=9)


def test_the_chat_template_wraps_a_prompt():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} ->{% endif %}"
    )
    (prompt,) = encode([{"prompt": "1 + 1"}], tokenizer, chat_template=True, max_tokens=99)
    assert tokenizer.decode(prompt.token_ids) == "user: 1 + 1 ->"


@pytest.mark.parametrize("package", ["transformers", "matplotlib", "tqdm", "tyro", "pebble"])
def test_a_missing_extra_is_named(monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match=f"needs {package}; install it with: pip install"):
        importlib.reload(fastrl.train)


def test_exact_match():
    records = [{"answer": "12"}] * 4
    assert exact_match([""] * 4, ["12", " 12\n", "1", "123"], records) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError"),
        ("fastrl.train.rewards:nothing", "has no function 'nothing'"),
    ],
)
def test_a_missing_reward(path, message):
    with pytest.raises(ValueError, match=message):
        import_reward(path)


def rewards_of(function):
    rewards = Rewards({"mine": in_this_process(function)}, {"mine": 1.0})
    return rewards.score([{"prompt": "a"}, {"prompt": "b"}], ["x", "y"], [2, 2])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, completions, records: [1.0], "must return 2 numbers, got 1"),
        (
            lambda prompts, completions, records: [1.0, float("nan")],
            "must be finite in.*got nan",
        ),
        (lambda prompts, completions, records: [1.0, 1e39], "must be finite in float32, got 1e"),
        (lambda prompts, completions, records: [1.0, "high"], "must return numbers, got 'high'"),
        (lambda prompts, completions, records: "01", "must return a sequence of numbers, got str"),
        (lambda prompts, completions, records: {0: 1, 1: 2}, "sequence of numbers, got dict"),
        (lambda prompts, completions, records: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_invalid_rewards(function, message):
    with pytest.raises(RewardError, match=f"^reward mine: .*{message}"):
        rewards_of(function)


@pytest.mark.parametrize("kind", [GrpoConfig, PpoConfig])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("steps", 2.5),
        ("steps", True),
        ("temperature", 0),
        ("temperature", float("nan")),
        ("learning_rate", -1e-3),
        ("learning_rate", "fast"),
        ("precision", "float8"),
        *(("name", name) for name in ("a/b", "", "..", " ", "a ", "a\nb", "\x1b[2J", "\x00")),
        *(("name", name) for name in ("a\u202eb", "\u200b", "\ud800", 300 * "a", 100 * "\u20ac")),
        *(("out_dir", path) for path in ("", " ", "a\x00b", "runs\u202e")),
        ("reward", "just_a_name"),
        ("minibatches", 100_000),
        ("held_out_file", "only_this.jsonl"),
        ("seed", -1),
        ("seed", 2**31),
    ],
)
def test_a_bad_setting_is_named(kind, field, value):
    with pytest.raises(ValueError, match=f"^{field} must"):
        kind(**{field: value})


def test_bad_objectives():
    with pytest.raises(ValueError, match="objective must be one of"):
        GrpoConfig(objective="gropo")
    with pytest.raises(ValueError, match="group_size must be at least 2, got 1"):
        GrpoConfig(group_size=1)
    with pytest.raises(ValueError, match="gamma must be at most 1, got 2"):
        PpoConfig(gamma=2.0)


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse(GrpoConfig, ["--group-size", "4", "--clip_high", "0.3", "--resume"])
    assert (config.group_size, config.clip_high, config.resume) == (4, 0.3, True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"group_size": 4, "clip_high": 0.3, "seed": 2}))
    config = parse(GrpoConfig, ["--config", str(file), "--seed", "5", "--clip_high", "none"])
    assert (config.group_size, config.clip_high, config.seed) == (4, None, 5)
    file.write_text(json.dumps({"groupsize": 4}))
    with pytest.raises(ValueError, match="fields that GrpoConfig does not have: groupsize"):
        parse(GrpoConfig, ["--config", str(file)])
