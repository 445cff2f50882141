"""Where prompts come from: Parquet, data sets, renamed columns, conversations."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets

from fastrl.train import extras
from fastrl.train.config import GrpoConfig
from fastrl.train.data.messages import prompt_text
from fastrl.train.data.prompts import Columns, encode, read_jsonl
from fastrl.train.data.sources import read_records
from fastrl.train.model.small_model import character_tokenizer
from fastrl.train.rewards import make_rewards
from tests.support.train_runs import rows, run

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RECORDS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i} for i in range(5)]
CHAT = [
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of data sets that no other test has filled, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def jsonl(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def parquet(path, records):
    datasets.Dataset.from_list(records).to_parquet(path)
    return str(path)


def read(**settings):
    return read_records(GrpoConfig(**settings))


def read_file(path, **settings):
    """What a file and its copy hold."""
    copy = Path(path).with_name(f"held_out{Path(path).suffix}")
    if Path(path).exists():
        shutil.copy(path, copy)
    return read(train_file=str(path), held_out_file=str(copy), **settings)


@pytest.fixture
def directory(tmp_path):
    """A data set in a directory."""
    jsonl(tmp_path / "data" / "train.jsonl", RECORDS[:3])
    jsonl(tmp_path / "data" / "test.jsonl", RECORDS[3:])
    return str(tmp_path / "data")


def test_parquet_holds_the_same_records_as_jsonl(tmp_path):
    files = {
        "train_file": parquet(tmp_path / "odd name [1].parquet", RECORDS),
        "held_out_file": jsonl(tmp_path / "held_out.jsonl", RECORDS),
    }
    train, held_out = read(**files)
    assert train == held_out == RECORDS


def test_messages_in_parquet_are_those_of_jsonl(tmp_path):
    path = parquet(tmp_path / "x.parquet", [{"prompt": CHAT, "n": 1.5}, {"prompt": CHAT[:1]}])
    train, _ = read_file(path)
    assert train == [{"prompt": CHAT, "n": 1.5}, {"prompt": CHAT[:1], "n": None}]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}], r'x\.parquet row 2: "prompt" must be a non-empty'),
        ([{"prompt": "a"}, {"prompt": ""}], r'x\.parquet row 2: "prompt" must be a non-empty'),
        ([{"question": "a"}], r'x\.parquet row 1: "prompt" must be .*, got None'),
        ([{"prompt": CHAT}, {"prompt": CHAT[:2]}], r'x\.parquet row 2: "prompt": the last message'),
    ],
)
def test_a_malformed_row_of_parquet_is_named(tmp_path, records, message):
    path = parquet(tmp_path / "x.parquet", records)
    with pytest.raises(ValueError, match=message):
        read_file(path)


def test_files_that_are_no_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    for content, message in (
        (None, "x.parquet cannot be read: there is no such file"),
        (b"PAR1 and not more", "x.parquet cannot be read: ArrowInvalid: .*arquet"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_file(path)
    parquet(path, [{"prompt": "a"}])
    datasets.Dataset.from_dict({"prompt": []}).to_parquet(path)
    with pytest.raises(ValueError, match=r"x\.parquet holds no prompts"):
        read_file(path)


def test_a_data_set_of_a_directory(directory):
    assert read(dataset=directory) == (RECORDS[:3], RECORDS[3:])
    train, held_out = read(dataset=directory, train_split="train[:2]", held_out_split="train[2:]")
    assert (train, held_out) == (RECORDS[:2], RECORDS[2:3])
    with pytest.raises(ValueError, match=r"cannot be read: ValueError: Unknown split \"dev\""):
        read(dataset=directory, held_out_split="dev")


def test_a_malformed_row_of_a_data_set_is_named(directory):
    jsonl(Path(directory) / "test.jsonl", [*RECORDS[3:], {"prompt": "", "answer": "", "level": 0}])
    with pytest.raises(ValueError, match=r"^dataset '.*data' split 'test' row 3: \"prompt\" must"):
        read(dataset=directory)
    (Path(directory) / "test.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"^dataset '.*data' cannot be read: \w+: JSON parse"):
        read(dataset=directory)


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("extension", ["pkl", "pickle", "py", "txt", "png"])
def test_other_formats_are_refused_and_not_executed(tmp_path, monkeypatch, extension):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test", "data"):
        content = pickle.dumps(Payload())
        if extension == "py":
            content = b"from pathlib import Path; Path('executed').touch()"
        (folder / f"{split}.{extension}").write_bytes(content)
    with pytest.raises(ValueError, match=r"^dataset '.*data' (cannot be read|must consist of)"):
        read(dataset=str(folder))
    assert not (tmp_path / "executed").exists()


def test_a_pickle_that_a_data_set_declares_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.pkl").write_bytes(pickle.dumps(Payload()))
    (tmp_path / "data" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: train.pkl\n---\n"
    )
    with pytest.raises(ValueError, match=r"^dataset '.*data' (cannot be read|must consist of)"):
        read(dataset=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"^dataset 'pandas' (cannot be read|must consist of|is)"):
        read(dataset="pandas")
    assert not (tmp_path / "executed").exists()


def test_without_a_network_a_data_set_of_the_hub_is_one_sentence():
    with pytest.raises(ValueError, match=r"^dataset 'a/b' is neither in the cache .* reached: \w+"):
        read(dataset="a/b")


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    gone = str(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"^dataset .*gone': there is no such directory, and on"):
        read(dataset=gone)


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"needs datasets; .*fastrl-kernels\[data\]"):
        read(dataset="a/b")
    path = parquet(tmp_path / "x.parquet", RECORDS)
    with pytest.raises(ValueError, match=r"x\.parquet needs datasets"):
        read_file(path)


def test_columns_are_renamed(tmp_path):
    given = [{"question": "1 + 1", "solution": "2", "level": 0}]
    path = jsonl(tmp_path / "x.jsonl", given)
    columns = {"prompt_column": "question", "answer_column": "solution"}
    train, _ = read_file(path, **columns)
    assert train == [{"prompt": "1 + 1", "answer": "2", "level": 0}]
    with pytest.raises(ValueError, match=r"x\.jsonl:1: prompt_column 'q' is missing, got \['level"):
        read_jsonl(path, Columns(prompt="q"))
    with pytest.raises(ValueError, match=r"answer_column 'level' must not hide .* 'answer'"):
        read_jsonl(jsonl(tmp_path / "y.jsonl", RECORDS), Columns(answer="level"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "a", "train_file": "b", "held_out_file": "c"}, "dataset must not be used"),
        ({"dataset_config": "main"}, "dataset_config must be used with dataset"),
        ({"dataset_revision": "v1"}, "dataset_revision must be used with dataset"),
        ({"held_out_split": "dev"}, "held_out_split must be used with dataset"),
        ({"dataset": "a", "held_out_split": "train"}, "held_out_split must not be train_split"),
        ({"prompt_column": "q"}, "prompt_column must be used with train_file or dataset"),
        ({"system_prompt": "s"}, "system_prompt must be used with train_file or dataset"),
        ({"dataset": "a", "prompt_column": "answer"}, "answer_column must not be prompt_column"),
    ],
)
def test_settings_of_the_data_that_exclude_one_another(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GrpoConfig(**settings)


def rendered(prompt, **settings):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    settings = {"chat_template": False, "max_tokens": 200, **settings}
    (encoded,) = encode([{"prompt": prompt}], tokenizer, **settings)
    return tokenizer.decode(encoded.token_ids)


def test_conversations_go_through_the_chat_template():
    assert rendered(CHAT) == (
        "<user>1 + 1</user><assistant>2</assistant><user>2 + 2</user><assistant>"
    )
    assert rendered("1 + 1") == "1 + 1"
    assert rendered("1 + 1", chat_template=True) == "<user>1 + 1</user><assistant>"


def test_the_system_prompt_is_for_prompts_without_one():
    assert rendered("1", chat_template=True, system_prompt="Add.") == (
        "<system>Add.</system><user>1</user><assistant>"
    )
    assert rendered(CHAT[-1:], system_prompt="Add.").startswith("<system>Add.</system><user>2 + 2")
    own = [{"role": "system", "content": "Own."}, *CHAT]
    assert rendered(own, system_prompt="Add.").startswith("<system>Own.</system><user>1")
    with pytest.raises(ValueError, match=r"^system_prompt must be used with chat_template or"):
        rendered("1", system_prompt="Add.")


def test_what_the_template_refuses_is_named():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="chat_template: the tokenizer has none"):
        encode([{"prompt": CHAT}], tokenizer, chat_template=False, max_tokens=99)
    tokenizer.chat_template = "{{ raise_exception('no conversation of ' ~ messages | length) }}"
    expected = r"^chat_template: .* TemplateError: no conversation of 3, .*'assistant', 'user'\]"
    with pytest.raises(ValueError, match=expected):
        encode([{"prompt": CHAT}], tokenizer, chat_template=False, max_tokens=99)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be text or a list of messages, got"),
        (["hello"], "message 1: must be an object, got str"),
        ([{"content": "a"}], 'message 1: "role" must be one of system, user, assistant, got None'),
        (
            [*CHAT, {"role": "tool", "content": "a"}],
            'message 4: "role" must be one of .*, got \'to',
        ),
        ([{"role": "user"}], 'message 1: "content" must be a non-empty string, got None'),
        ([{"role": "user", "content": [{"type": "image"}]}], 'message 1: "content" must be a non'),
        (CHAT[:2], "the last message must be of the user, got role 'assistant'"),
        ([CHAT[0], {"role": "system", "content": "a"}], "message 2: only the first may be of the"),
        ([{**CHAT[0], "tool_calls": ["f"]}], r"message 1: must have .*, got also \['tool_calls'\]"),
    ],
)
def test_a_malformed_message_is_named(tmp_path, messages, message):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "fine"}, {"prompt": messages}])
    with pytest.raises(ValueError, match=rf'x\.jsonl:2: "prompt": {message}'):
        read_jsonl(path)


def test_reward_functions_get_the_last_message_and_the_record(tmp_path, monkeypatch):
    (tmp_path / "chat_rewards.py").write_text(
        "seen = []\n"
        "def judge(prompts, completions, records):\n"
        "    seen.extend(zip(prompts, records))\n"
        "    return [1.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record = {"prompt": CHAT, "answer": "4"}
    with make_rewards(GrpoConfig(reward="chat_rewards:judge")) as rewards:
        rewards.score([record], ["x"], [1])
    import chat_rewards

    assert chat_rewards.seen == [("2 + 2", record)]
    assert prompt_text({"prompt": "text"}) == "text"


def test_a_run_on_conversations_of_a_data_set(small, base, tmp_path):
    tokenizer = base / "tokenizer_config.json"
    tokenizer.write_text(
        json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": TEMPLATE})
    )
    records = [{"conversation": CHAT, "number": i} for i in range(8)]
    for split in ("train", "test"):
        jsonl(tmp_path / "data" / f"{split}.jsonl", records)
    small |= {"train_file": None, "held_out_file": None, "model": str(base), "steps": 1}
    directory = run(
        "grpo",
        small,
        dataset=str(tmp_path / "data"),
        prompt_column="conversation",
        answer_column="number",
        system_prompt="Add.",
        reward=["number_equality", "small_rewards:digits"],
    ).directory
    logged = rows(directory)
    assert len(logged) == 2
    assert "held_out_reward/number_equality" in logged[0]
    assert not (directory / "data").exists()  # no embedded task was written
