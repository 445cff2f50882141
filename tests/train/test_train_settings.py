"""What goes into a run: settings, the command line, and prompts; what is wrong in them is named."""

import ast
import json
import pickle
import shlex
import shutil
from inspect import getsource
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("peft")

import datasets

from fastrl.train import arithmetic, long_addition
from fastrl.train.command_line import parse
from fastrl.train.config import GrpoConfig, PpoConfig, RunConfig
from fastrl.train.loading import character_tokenizer
from fastrl.train.prompts import count_shared, deal, encode, read_records
from tests.train.runs import LOOPS, run

RECORDS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i} for i in range(5)]
CHAT = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
ALONE = {"teacher": "x", "reward": ("none",), "group_size": 1}
BAD = r"""
grpo ppo: {"steps": 0} -> steps must be at least 1, got 0
grpo ppo: {"temperature": float("nan")} -> temperature must be finite, got nan
grpo ppo: {"learning_rate": -1e-3} -> learning_rate must be above 0, got -0.001
grpo ppo: {"mlp_tile": "x"} -> mlp_tile must be int.*, got 'x'
grpo ppo: {"precision": "half"} -> precision must be one of float32, bfloat16, got 'half'
grpo ppo: {"track": ("mlflow",)} -> each of track must be one of tensorboard, .*, got 'mlflow'
grpo ppo: {"splits": ("train",)} -> splits must be 2 values, got \('train',\)
grpo ppo: {"stop": "a"} -> stop must be a list of values, got 'a'
grpo ppo: {"seed": 2**31} -> seed must be below 2\*\*31, got 2147483648
grpo ppo: {"out": "a\x1b[2J"} -> out must be a path of printable .*, got 'a\\x1b\[2J'
grpo ppo: {"out": "train.jsonl/run"} -> out: train.jsonl/run cannot be written
grpo ppo: {"out": "/proc/run"} -> out: /proc/run cannot be written
grpo ppo: {"prompts": ()} -> prompts must be a task, two files, or a data set, got \(\)
grpo ppo: {"prompts": ("train.jsonl",)} -> prompts must be two different files, got
grpo ppo: {"prompts": ("train.jsonl", "./train.jsonl")} -> prompts must be two different files
grpo ppo: {"prompts": ("gone.jsonl", "train.jsonl")} -> prompts: there is no file gone
grpo ppo: {"columns": ("q", "answer")} -> columns: .* has no 'q', only prompt, answer
grpo ppo: {"chat_template": True} -> chat_template: the tokenizer has no chat template
grpo ppo: {"max_prompt_tokens": 2} -> max_prompt_tokens must be at least 7, the length of .*, got 2
grpo ppo: {"columns": ("answer", "answer")} -> columns must be two different columns, got
grpo ppo: {"chat_template": ("x",)} -> chat_template must be followed by different NAME=.* got 'x'
grpo ppo: {"chat_template": ("x=1", "x=2")} -> chat_template must be .* different .* got 'x=2'
grpo ppo: {"rounding": "stochastic"} -> rounding must be .* got weights=float32, lora_rank=None
grpo ppo: {"weights": "nf4"} -> weights=nf4 must be used with lora_rank, with a model
grpo ppo: {"offload_checkpoints": True} -> offload_checkpoints must be off without
grpo ppo: {"score_centering": 0} -> score_centering must be at least 1, got 0
grpo ppo: {"score_centering": 8} -> score_centering must be None .* epochs=1, minibatches=4
grpo ppo: {"score_centering": 8, "minibatches": 1, "epochs": 2} -> score_centering .* epochs=2
grpo: {"score_centering": 8, "objective": "gspo"} -> score_centering must be None .* level must be
grpo: {"score_centering": 8, "objective": "m2po"} -> score_centering .* trust_region must be None
grpo: {"lora_rank": 2, "lora_targets": ("q_proj", "pr")} -> lora_targets must be names .* got 'pr'
grpo: {"lora_rank": 2, "lora_targets": ("mlp",)} -> lora_targets: the model cannot be adapted
grpo: {"optimizer": "adamw_offloaded"} -> optimizer must not be "adamw_offloaded" on the device cpu
grpo: {"reward": ("exact_match", "exact_match=2")} -> reward must name different .*_match' twice
grpo: {"reward": ("exact_match=nan",)} -> reward must have finite weights, got 'exact_match=nan'
grpo: {"reward": ("exact_match=0",)} -> reward must have a weight other than 0
grpo: {"reward": ("exactmatch",)} -> reward must be a known name or module:function, got 'exactm
grpo: {"sampler": "nothing"} -> sampler must be a known name or module:function, got 'nothing'
grpo: {"sampler": "math:pi"} -> sampler: math has no function 'pi'
grpo: {"stop": ("",)} -> stop must not name an empty text
grpo: {"stop": ("é",)} -> stop: no token can complete 'é'
grpo: {"objective": "gropo"} -> .*objective.*gropo
grpo: {"group_size": 1} -> group_size must be at least 2, got 1
grpo: {"teacher_coef": 1.0} -> teacher must be given with teacher_coef or teacher_beta
grpo: {"teacher_beta": 0.5} -> teacher must be given with teacher_coef or teacher_beta
grpo: {"teacher": "x", "teacher_beta": 1.5} -> teacher_beta must be at most 1, got 1.5
grpo: {"teacher": "x", "teacher_coef": -1.0} -> teacher_coef must be at least 0
grpo: {"teacher": "x", "group_size": 1} -> group_size must be at least 2, got 1
grpo: {"teacher": "x", "reward": ("none", "exact_match")} -> reward must be none alone
grpo: {"reward": ("none",)} -> reward must be none alone, with a teacher and teacher_coef above 0
grpo: {**ALONE, "teacher_coef": 0.0} -> reward must be none alone, with a teacher
grpo: {**ALONE, "advantage": "batch"} -> advantage must be left at its default with rew
grpo: {**ALONE, "sampling_rounds": 2} -> sampling_rounds must be left at its default with rew
grpo: {**ALONE, "clip_low": 0.1} -> clip_low must be left at its default with rew
grpo: {**ALONE, "clip_high": 0.3} -> clip_high must be left at its default with rew
grpo: {**ALONE, "rollout_correction": "mask"} -> rollout_correction must be left at its default
grpo: {**ALONE, "reward_timeout": 3.0} -> reward_timeout must be left at its default with rew
grpo: {**ALONE, "reward_failed": 0.0} -> reward_failed must be left at its default with rew
grpo: {**ALONE, "score_centering": 8} -> score_centering must be left at its default with rew
ppo: {"reward": ("none",)} -> reward must be a known name or module:function, got 'n
ppo: {"gamma": 1.5} -> gamma must be at most 1, got 1.5
ppo: {"advantage": "group"} -> group_size must be at least 2 with advantage=group, got 1
ppo: {"kl_target": 0.1, "kl_coef": 0.0} -> kl_coef must be above 0 with kl_target
ppo: {"value_model": "separate", "advantage": "reward"} -> value_model must be shared .* got reward
"""
BAD_FILES = r"""
x.jsonl: b'{"prompt": "a"}\n{"prompt": \n' -> prompts: .*x\.jsonl cannot be read: \w+:
x.jsonl: b'{"prompt": "\xff"}\n' -> prompts: .*x\.jsonl cannot be read: \w+:
x.jsonl: [{"prompt": "a"}, {"prompt": ""}] -> .*x\.jsonl row 2: "prompt" must be .* got ''
x.jsonl: [{"question": "a", "n": 1}] -> .* no 'prompt', only question, n; .* question solution
x.jsonl: [{"prompt": [{"from": "human", "value": "a"}]}] -> .* row 1: .*: rename from and value
x.jsonl: [{"prompt": [{"role": "user", "content": [{"text": "a"}]}]}] -> .*: join the parts
x.jsonl: [{"prompt": CHAT[:2]}] -> .* row 1: .* the last not the assistant's
x.jsonl: [{"prompt": [{"content": "a"}]}] -> .* row 1: .* messages with role and content
x.parquet: b"PAR1 and not more" -> prompts: .*x\.parquet cannot be read: ArrowInvalid
x.parquet: [{"prompt": "a"}, {"prompt": None}] -> .* row 2: "prompt" must be .* got None
x.parquet: [{"prompt": 5}] -> .* row 1: .* got 5
"""


def table(text):
    """The two columns of a table's rows."""
    return [line.split(" -> ") for line in text.strip().splitlines()]


@pytest.mark.parametrize(("settings", "message"), table(BAD))
def test_a_bad_setting_is_named_with_what_was_expected(small, settings, message):
    loops, _, settings = settings.partition(": ")
    for loop in loops.split():
        with pytest.raises(ValueError, match=f"^{message}"):
            run(loop, small, **eval(settings))


def test_the_command_line(capsys):
    typed = "--group-size 4 --clip_high .3 --chat_template --clip_low None --stop 'a b' c"
    settings = {"group_size": 4, "clip_high": 0.3, "chat_template": (), "stop": ("a b", "c")}
    assert parse(GrpoConfig, shlex.split(typed)) == GrpoConfig(**settings)
    typed = "--chat_template system='Be x.' a=false --steps 3"
    settings = {"steps": 3, "chat_template": ("system=Be x.", "a=false")}
    assert parse(GrpoConfig, shlex.split(typed)) == GrpoConfig(**settings)
    typed = "--objective dr_grpo --teacher x --reward none --group_size 1"
    settings = {"objective": "dr_grpo", "teacher": "x", "reward": ("none",), "group_size": 1}
    assert parse(GrpoConfig, typed.split()) == GrpoConfig(**settings)
    assert parse(GrpoConfig, ["--objective", "dr_grpo"]).advantage is None  # the objective's
    for wrong in ("--step 3", "three", "--steps x", "--precision float8"):
        with pytest.raises(SystemExit, match="2"):
            parse(GrpoConfig, wrong.split())
        assert wrong.split()[0] in capsys.readouterr().err


def test_a_resumed_run_has_the_settings_of_its_directory(small):
    directory = run("grpo", small, seed=1, steps=1).directory
    arguments = ["--resume", "--out", str(directory), "--steps", "2"]
    config = parse(GrpoConfig, arguments)
    assert (config.seed, config.steps, config.group_size, config.resume) == (1, 2, 4, True)
    assert LOOPS["grpo"][0](config).step == 2
    with pytest.raises(ValueError, match=r"^resume: nothing contains no run"):
        parse(GrpoConfig, [*arguments[:2], "nothing"])
    with pytest.raises(ValueError, match=r"run is a run of another loop or version: ppo has no "):
        parse(PpoConfig, arguments)
    for text in ("[1]", "{", "[" * 100_000):
        (directory / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"^resume: .*config.json (must hold|cannot be read)"):
            parse(GrpoConfig, arguments)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Write a file and read it; no network, and a cache that no other test has filled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def read(name, records, **settings):
        if isinstance(records, bytes):
            Path(name).write_bytes(records)
        elif name.endswith(".parquet"):
            datasets.Dataset.from_list(records).to_parquet(name)
        else:
            Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
        shutil.copy(name, f"held_out-{name}")
        return read_records(GrpoConfig(prompts=(name, f"held_out-{name}"), **settings))[0]

    return read


@pytest.mark.parametrize("name", ["x [1].jsonl", "x [1].parquet"])
def test_files_hold_records_with_text_or_messages(data, name):
    assert data(name, RECORDS) == RECORDS
    assert data(name, [{"prompt": CHAT, "n": 1.5}] * 2) == [{"prompt": CHAT, "n": 1.5}] * 2
    rows = {"q": "1", "a": "2", "level": 0}, {"prompt": "x", "q": "1", "a": "2", "answer": "x"}
    for row in (*rows, dict(reversed(rows[1].items()))):  # what is named wins in every order
        level = {"level": 0} if "level" in row else {}
        assert data(name, [row], columns=("q", "a")) == [{"prompt": "1", "answer": "2", **level}]
    nested = {"x": "1", "of": {"a": {"b": "2"}}}
    for row, answer in ((nested, "2"), ({**nested, "of.a.b": "3"}, "3")):
        (record,) = data(name, [row], columns=("x", "of.a.b"))
        assert (record["prompt"], record["answer"], record["of"]) == ("1", answer, nested["of"])
    with pytest.raises(ValueError, match=r"^columns: .* row 1 has no 'of\.c', only x, of$"):
        data(name, [nested], columns=("x", "of.c"))


@pytest.mark.parametrize(("records", "message"), table(BAD_FILES))
def test_what_is_wrong_in_a_file_is_named(data, records, message):
    name, _, records = records.partition(": ")
    with pytest.raises(ValueError, match=f"^{message}") as error:
        data(name, eval(records))
    assert "\n" not in str(error.value)


def test_a_data_set_of_a_directory(data):
    Path("data").mkdir()
    for name, records in (("train", RECORDS[:3]), ("test", RECORDS[3:])):
        datasets.Dataset.from_list(records).to_parquet(f"data/{name}.parquet")
    assert read_records(GrpoConfig(prompts=("data",))) == (RECORDS[:3], RECORDS[3:])
    parts = read_records(GrpoConfig(prompts=("data",), splits=("train[:2]", "train[2:]")))
    assert parts == (RECORDS[:2], RECORDS[2:3])
    for name in ("a/b", "./gone"):
        with pytest.raises(ValueError, match=f"^prompts: '{name}' .*no such task or directory; on"):
            read_records(GrpoConfig(prompts=(name,)))


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("extension", ["pkl", "py", "txt"])
def test_other_data_sets_are_refused_and_not_executed(data, extension):
    Path("data").mkdir()
    code = b"from pathlib import Path; Path('executed').touch()"
    for split in ("train", "test", "data"):
        content = code if extension == "py" else pickle.dumps(Payload())
        Path(f"data/{split}.{extension}").write_bytes(content)
    with pytest.raises(ValueError, match=r"^prompts: 'data' cannot be read: "):
        read_records(GrpoConfig(prompts=("data",)))
    assert not Path("executed").exists()


def test_prompts_become_tokens():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = character_tokenizer()

    def encoded(prompt, template=None, **settings):
        tokenizer.chat_template = template
        return encode([{"prompt": prompt}], tokenizer, GrpoConfig(**settings))

    for prompt, always, expected in (
        (CHAT, False, "<user>u<assistant>a<user>u<assistant>"),
        ("1 + 1", False, "1 + 1"),
        ("1 + 1", True, "<user>1 + 1<assistant>"),
    ):
        (one,) = encoded(prompt, template, chat_template=always)
        assert tokenizer.decode(one.token_ids) == expected
    for message, *arguments in (
        ("prompts: .* cannot be tokenized: Templ.*: no", CHAT, "{{ raise_exception('no') }}"),
        ("prompts: '1 ∙ 1' cannot be tokenized: ", "1 ∙ 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            encoded(*arguments)
    assert count_shared(encoded("1"), [*encoded("1"), *encoded("2")]) == 1


def test_every_prompt_is_dealt_once_per_round():
    dealt = [x for step in range(5) for x in deal([*range(10)], count=4, step=step, seed=7)]
    assert sorted(dealt[:10]) == sorted(dealt[10:]) == [*range(10)]
    assert dealt[:10] != dealt[10:]


@pytest.mark.parametrize("task", [arithmetic, long_addition])
def test_the_embedded_tasks(task):
    train, held_out = task.split(0)
    asked = {record["prompt"]: record["answer"] for record in train + held_out}
    assert len(asked) == len(train) + len(held_out) >= 400
    assert task.split(0) == (train, held_out) != task.split(1)
    sums = {prompt: answer for prompt, answer in asked.items() if not any(map(str.isalpha, prompt))}
    assert all(eval(prompt.strip("?:= ")) == int(answer) for prompt, answer in sums.items())
    if task is arithmetic:
        assert (asked["seven plus 5 ="], asked["3 from nine is"]) == ("12", "6")


@pytest.mark.parametrize("kind", [RunConfig, GrpoConfig, PpoConfig])
def test_every_line_of_the_help_ends_a_sentence(kind):
    """tyro breaks the help of an option where its docstring breaks a line."""
    (definition,) = ast.parse(getsource(kind)).body
    helps = [node.value.value for node in definition.body[1:] if isinstance(node, ast.Expr)]
    assert len(helps) > 5
    assert [text for text in helps if not all(x.endswith(".") for x in text.splitlines())] == []
