"""What goes into a run: settings, the command line, and prompts."""

import json
import math
import pickle
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from fastrl.train import arithmetic, long_addition
from fastrl.train.command_line import main, parse
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.prompts import deal, encode, read_records
from tests.support.train_runs import LOOPS, run

pytestmark = pytest.mark.usefixtures("unreported")

KINDS = [kind for _, kind in LOOPS.values()]
RECORDS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i} for i in range(5)]
CHAT = [
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("steps", 2.5, "steps must be int, got 2.5"),
        ("steps", True, "steps must be int, got True"),
        ("temperature", 0, "temperature must be above 0, got 0"),
        ("temperature", math.nan, "temperature must be finite, got nan"),
        ("learning_rate", -1e-3, "learning_rate must be above 0, got -0.001"),
        ("learning_rate", "fast", "learning_rate must be float, got 'fast'"),
        ("clip_high", -1.0, "clip_high must be at least 0, got -1.0"),
        ("mlp_tile", "x", "mlp_tile must be int or None, got 'x'"),
        ("precision", "half", "precision must be one of float32, bfloat16, got 'half'"),
        ("track", ("mlflow",), "each of track must be one of tensorboard, .*, got 'mlflow'"),
        ("splits", ("train",), r"splits must be 2 values, got \('train',\)"),
        ("stop", "a", "stop must be a list of values, got 'a'"),
        ("stop", (1,), "each of stop must be str, got 1"),
        ("seed", 2**31, r"seed must be below 2\*\*31, got 2147483648"),
        ("out", "a\x1b[2J", r"out must be a path of printable .*, got 'a\\x1b\[2J'"),
        ("out", " ", "out must be a path of printable characters, got ' '"),
        ("prompts", (), r"prompts must be a task, two files, or a data set, got \(\)"),
        ("minibatches", 10**6, "minibatches must be at most .* got 1000000"),
        ("rounding", "stochastic", "rounding must be .* got weights=float32, lora_rank=None"),
        ("weights", "nf4", "weights must be float32 or bfloat16 without lora_rank, .* got nf4"),
        ("offload_checkpoints", True, "offload_checkpoints must be off without gradient_check"),
        ("lora_targets", ("q",), "lora_targets must be used with lora_rank, got lora_rank None"),
        ("lora_targets", (), "lora_targets must be"),
    ],
)
def test_a_bad_setting_is_named_with_what_was_expected(kind, field, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (GrpoConfig, {"objective": "gropo"}, "objective must be one of .*'gropo'|.*gropo"),
        (GrpoConfig, {"group_size": 1}, "group_size must be at least 2, got 1"),
        (PpoConfig, {"gamma": 1.5}, "gamma must be at most 1, got 1.5"),
        (PpoConfig, {"advantage": "group"}, "group_size must be at least 2 with advantage=group"),
        (PpoConfig, {"kl_target": 0.1, "kl_coef": 0.0}, "kl_coef must be above 0 with kl_target"),
        (PpoConfig, {"value_model": "separate", "lora_rank": 2}, "value_model must be shared"),
        (PpoConfig, {"value_model": "separate", "advantage": "reward"}, "value_model must be sh"),
    ],
)
def test_settings_of_one_loop_that_do_not_fit(kind, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**settings)


def test_both_loops_together_have_few_options():
    assert len({f.name for kind in KINDS for f in fields(kind)}) <= 60


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_has_every_option_with_its_text(kind, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(kind, ["--help"])
    text = capsys.readouterr().out
    for f in fields(kind):
        entry = re.search(rf"--{f.name}\b[^\n]*\n?(.*?)(?=\n\W*--|\Z)", text, re.DOTALL)
        assert entry, f.name
        assert len(re.findall(r"[a-z]{3,}", entry[0])) > 3, entry[0]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--group_size=4", "group_size", 4),
        ("--group-size 4", "group_size", 4),
        ("--clip_high None", "clip_high", None),
        ("--clip_high 0.3", "clip_high", 0.3),
        ("--chat_template", "chat_template", True),
        ("--no_chat_template", "chat_template", False),
        ("--stop 'a b' c", "stop", ("a b", "c")),
        ("--prompts a.jsonl b.jsonl", "prompts", ("a.jsonl", "b.jsonl")),
        ("--learning_rate 1e-3", "learning_rate", 1e-3),
    ],
)
def test_how_a_value_is_written(arguments, field, value):
    assert getattr(parse(GrpoConfig, shlex.split(arguments)), field) == value


@pytest.mark.parametrize("arguments", ["--step 3", "three", "--steps x", "--precision float8"])
def test_an_argument_that_is_not_understood_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(GrpoConfig, arguments.split())
    assert arguments.split()[-1 if "s " in arguments else 0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ValueError("steps: \x1b[2J"), 2, "error: steps: \\x1b[2J\n"),
        (torch.OutOfMemoryError("no memory"), 2, "error: no memory\n"),
        (OSError("full"), 2, "error: full\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(error, status, shown, capsys):
    def train(config):
        raise error

    with pytest.raises(SystemExit, match=str(status)):
        main(GrpoConfig, train, [])
    assert capsys.readouterr().err == shown


def test_a_resumed_run_has_the_settings_of_its_directory(small):
    directory = run("grpo", small, seed=1, steps=1).directory
    config = parse(GrpoConfig, ["--resume", "--out", str(directory), "--steps", "2"])
    assert (config.seed, config.steps, config.group_size, config.resume) == (1, 2, 4, True)
    assert LOOPS["grpo"][0](config).step == 2
    with pytest.raises(ValueError, match=r"^seed must remain 1 when a run is resumed, got 2"):
        LOOPS["grpo"][0](
            parse(GrpoConfig, ["--resume", "--out", str(directory), "--seed", "2", "--steps", "3"])
        )
    with pytest.raises(ValueError, match="^resume: nothing contains no run"):
        parse(GrpoConfig, ["--resume", "--out", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        main(PpoConfig, LOOPS["ppo"][0], ["--resume", "--out", str(directory)])
    for text in ("[1]", "{", "[" * 100_000):
        (directory / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"^resume: .*config.json (must hold|cannot be read)"):
            parse(GrpoConfig, ["--resume", "--out", str(directory)])


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Write two files and read them; no network, and a cache that no other test has filled."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "data").mkdir()

    def read(records, name="odd [1].jsonl", **settings):
        held_out, path = tmp_path / "held_out.jsonl", tmp_path / name
        held_out.write_text(json.dumps(RECORDS[0]) + "\n")
        if isinstance(records, (str, bytes)):
            path.write_bytes(records.encode() if isinstance(records, str) else records)
        elif path.suffix == ".parquet":
            datasets.Dataset.from_list(records).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_records(GrpoConfig(prompts=(str(path), str(held_out)), **settings))[0]

    return read


@pytest.mark.parametrize("name", ["x [1].jsonl", "x [1].parquet"])
def test_files_hold_records_with_text_or_messages(data, name):
    assert data(RECORDS, name) == RECORDS
    assert data([{"prompt": CHAT, "n": 1.5}] * 2, name) == [{"prompt": CHAT, "n": 1.5}] * 2
    renamed = data([{"q": "1", "a": "2", "level": 0}], name, columns=("q", "a"))
    assert renamed == [{"prompt": "1", "answer": "2", "level": 0}]
    with pytest.raises(ValueError, match=r"^columns: .* has no 'q', only prompt, answer, level"):
        data(RECORDS, name, columns=("q", "answer"))


@pytest.mark.parametrize(
    ("records", "name", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "x.jsonl", r"x\.jsonl cannot be read: \w+: "),
        ('{"prompt": "\xff"}\n'.encode("latin-1"), "x.jsonl", r"x\.jsonl cannot be read: \w+: "),
        (b"PAR1 and not more", "x.parquet", r"x\.parquet cannot be read: ArrowInvalid"),
        ("", "x.jsonl", r"prompts: .*x\.jsonl "),
        ([{"prompt": "a"}, {"prompt": ""}], "x.jsonl", r'row 2: "prompt" must be .* got \'\''),
        ([{"prompt": "a"}, {"prompt": None}], "x.parquet", 'row 2: "prompt" must be .* got None'),
        ([{"question": "a"}], "x.jsonl", r'x\.jsonl row 1: "prompt" must be text'),
        ([{"prompt": CHAT[:2]}], "x.jsonl", "row 1: .* the last not the assistant's"),
        ([{"prompt": [{"content": "a"}]}], "x.jsonl", "row 1: .* messages with role and content"),
        ([{"prompt": 5}], "x.parquet", "row 1: .* got 5"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data, records, name, message):
    with pytest.raises(ValueError, match=message) as error:
        data(records, name)
    assert "\n" not in str(error.value)


def test_two_different_files_are_needed(small, tmp_path):
    train, held_out = small["prompts"]
    (tmp_path / "link.jsonl").symlink_to(train)
    for prompts in ((train,), (train, train), (train, str(tmp_path / "link.jsonl"))):
        with pytest.raises(ValueError, match="^prompts must be two different files, got"):
            read_records(GrpoConfig(prompts=prompts))
    with pytest.raises(ValueError, match=r"^prompts: there is no file gone\.jsonl"):
        read_records(GrpoConfig(prompts=("gone.jsonl", held_out)))
    with pytest.raises(
        ValueError, match=r"^prompts must be \.jsonl or \.parquet files, got x\.txt"
    ):
        Path("x.txt").touch()
        read_records(GrpoConfig(prompts=(train, "x.txt")))


def test_a_data_set_of_a_directory(data, tmp_path):
    directory = tmp_path / "data"
    data(RECORDS[:3], "data/train.jsonl")
    data(RECORDS[3:], "data/test.jsonl")
    config = {"prompts": (str(directory),)}
    assert read_records(GrpoConfig(**config)) == (RECORDS[:3], RECORDS[3:])
    parts = read_records(GrpoConfig(**config, splits=("train[:2]", "train[2:]")))
    assert parts == (RECORDS[:2], RECORDS[2:3])
    with pytest.raises(ValueError, match=r"cannot be read: ValueError: Unknown split \"dev\""):
        read_records(GrpoConfig(**config, splits=("train", "dev")))
    for name in ("a/b", str(tmp_path / "gone")):
        with pytest.raises(ValueError, match=f"^prompts: '{name}' .*no such task or directory; on"):
            read_records(GrpoConfig(prompts=(name,)))


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("extension", ["pkl", "py", "txt"])
def test_other_data_sets_are_refused_and_not_executed(data, small, tmp_path, extension):
    for split in ("train", "test", "data"):
        code = b"from pathlib import Path; Path('executed').touch()"
        content = code if extension == "py" else pickle.dumps(Payload())
        (tmp_path / "data" / f"{split}.{extension}").write_bytes(content)
    with pytest.raises(ValueError, match=r"^prompts: '.*data' cannot be read: "):
        read_records(GrpoConfig(prompts=(str(tmp_path / "data"),)))
    assert not Path("executed").exists()


def encoded(prompt, template=None, **settings):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    (one,) = encode([{"prompt": prompt}], tokenizer, GrpoConfig(**settings))
    return tokenizer.decode(one.token_ids)


def test_conversations_go_through_the_chat_template():
    assert encoded(CHAT, TEMPLATE) == "<user>1 + 1<assistant>2<user>2 + 2<assistant>"
    assert encoded("1 + 1", TEMPLATE) == "1 + 1"
    assert encoded("1 + 1", TEMPLATE, chat_template=True) == "<user>1 + 1<assistant>"


@pytest.mark.parametrize(
    ("prompt", "template", "settings", "message"),
    [
        (CHAT, None, {}, "chat_template: the tokenizer has none"),
        (CHAT, "{{ raise_exception('no') }}", {}, "prompts: .* cannot be tokenized: Templ.*: no"),
        ("1 ∙ 1", None, {}, "prompts: '1 ∙ 1' cannot be tokenized: "),
        ("1 + 1", None, {"max_prompt_tokens": 4}, "max_prompt_tokens must cover .* got 5 tokens"),
    ],
)
def test_prompts_that_cannot_be_tokenized(prompt, template, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        encoded(prompt, template, **settings)


def test_every_prompt_is_dealt_once_per_round():
    items = list(range(10))
    dealt = [x for step in range(5) for x in deal(items, count=4, step=step, seed=7)]
    assert sorted(dealt[:10]) == sorted(dealt[10:]) == items
    assert dealt[:10] != dealt[10:]
    assert deal(items, count=4, step=3, seed=7) == dealt[12:16]


@pytest.mark.parametrize("task", [arithmetic, long_addition])
def test_the_embedded_tasks(task):
    train, held_out = task.split(0)
    assert len(held_out) >= 200
    prompts = [record["prompt"] for record in train + held_out]
    assert len(set(prompts)) == len(prompts)
    assert task.split(0) == (train, held_out) != task.split(1)
    asked = {record["prompt"]: record["answer"] for record in train + held_out}
    if task is arithmetic:
        assert (asked["seven plus 5 ="], asked["3 from nine is"]) == ("12", "6")
    else:
        assert all(eval(prompt.rstrip(":")) == int(answer) for prompt, answer in asked.items())
