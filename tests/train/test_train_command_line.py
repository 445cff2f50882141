"""The command line and files of settings: one config from both, and what a person sees."""

import json
import math
import re
import shlex
import sys
from dataclasses import fields

import pytest

pytest.importorskip("transformers")

from fastrl.train.command_line import main, parse
from fastrl.train.config import GrpoConfig, PpoConfig
from tests.support.train_runs import LOOPS, OWN, rows, run

KINDS = [kind for _, kind in LOOPS.values()]


def help_of(kind, capsys, monkeypatch, columns=100):
    """The text of the help, and its groups: title to text."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        parse(kind, ["--help"])
    text = capsys.readouterr().out  # drawn without boxes, since this is no terminal
    parts = re.split(r"\n ([a-z ]*)options *\n", text.partition("\nexamples:")[0])
    return text, {
        title.strip(): group for title, group in zip(parts[1::2], parts[2::2], strict=True)
    }


def entries_of(group):
    """Each option's entry in a group of the help, by its name."""
    entries = re.split(r"\n +--(?=\w)", group)[1:]
    return {re.match(r"\w+", entry)[0]: " ".join(entry.split()) for entry in entries}


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_a_text_and_its_default_in_the_help(kind, capsys, monkeypatch):
    _, groups = help_of(kind, capsys, monkeypatch)
    entries = {
        name: entry for group in groups.values() for name, entry in entries_of(group).items()
    }
    for f in fields(kind):
        shown = {None: "none", (): "empty"}.get(f.default, f.default)
        shown = "unset" if f.name == "scale" else shown
        shown = " ".join(shown) if isinstance(shown, tuple) else shown
        assert f.metadata["help"]
        by_task = "(default: " in f.metadata["help"]
        expected = f.metadata["help"] + ("" if by_task else f" (default: {shown})")
        # it is wrapped, and quoted where a shell would read it otherwise
        wanted, entry = (re.sub(r"[\s']", "", text) for text in (expected, entries[f.name]))
        assert wanted in entry
        assert entries[f.name].count("(default:") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_in_a_group_with_a_sentence(kind, capsys, monkeypatch):
    _, groups = help_of(kind, capsys, monkeypatch)
    assert entries_of(groups.pop("")).keys() == {"config", "plan"}
    assert {kind.loop, "learning", "warm start", "model", "run"} <= groups.keys()
    found = [name for group in groups.values() for name in entries_of(group)]
    assert sorted(found) == sorted(f.name for f in fields(kind))
    for title in groups.keys() - {kind.loop}:  # whose sentence is at the top
        assert re.match(r" -+ *\n +[A-Z][^-]*[.;]", groups[title])


@pytest.mark.parametrize("columns", [60, 140])
def test_the_help_has_the_width_of_the_terminal_and_ends_with_examples(
    columns, capsys, monkeypatch
):
    text, _ = help_of(GrpoConfig, capsys, monkeypatch, columns)
    described, examples = text.partition("\n options")[2].split("examples:\n")
    assert max(map(len, described.splitlines())) == columns
    for line in examples.splitlines():
        arguments = shlex.split(line)[3:]
        if "--config" not in arguments:
            parse(GrpoConfig, arguments)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--group_size=4"], "group_size", 4),
        (["--group-size", "4"], "group_size", 4),
        (["--clip_high", "none"], "clip_high", None),
        (["--clip_high", "null"], "clip_high", None),
        (["--clip_high", "0.3"], "clip_high", 0.3),
        (["--name", "none"], "name", None),
        (["--share_prompts"], "share_prompts", True),
        (["--no-share-prompts"], "share_prompts", False),
        (["--no_share_prompts"], "share_prompts", False),
        (["--scale", "none"], "scale", "none"),
        (["--scale", "batch"], "scale", "batch"),
        (["--stop_strings", "a b", "c"], "stop_strings", ("a b", "c")),
        (["--stop_strings"], "stop_strings", ()),
        (["--baseline", "none"], "baseline", "none"),
        (["--learning_rate", "1e-3"], "learning_rate", 1e-3),
    ],
)
def test_how_a_value_is_written(arguments, field, value):
    assert getattr(parse(GrpoConfig, arguments), field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3"], "Unrecognized options: --step"),
        (["three"], "Unrecognized options: three"),
        (["--steps", "x"], "--steps"),
        (["--precision", "float8"], "invalid choice 'float8'"),
        (["--scale", "all"], "expected one of {group,batch,none}"),
        (["--clip_high", "high"], "--clip_high"),
        (["--plan", "3", "4"], "expected one number at most, got 3 4"),
        (["--config"], "Missing value for argument '--config'"),
    ],
)
def test_an_argument_that_is_not_understood_ends_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(GrpoConfig, arguments)
    assert message in capsys.readouterr().err


def test_a_setting_that_follows_from_others_follows_from_those_of_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("objective: grpo\n")
    assert parse(GrpoConfig, ["--config", str(file)]).scale == "group"
    changed = parse(GrpoConfig, ["--config", str(file), "--objective", "dr_grpo"])
    assert changed.scale == "none"


SETTINGS = {
    "group_size": 4,
    "prompts_per_step": 8,
    "clip_high": 0.3,
    "kl_coef": 1e-3,
    "dynamic_sampling": False,
    "scale": "none",
    "seed": 10,
    "max_new_tokens": 2,
    "steps": 2,
    "warm_start_steps": 0,
    "stop_strings": ["no", "1e-3"],
    "mlp_tile": None,
}
YAML = """
# a comment
group_size: 4
prompts_per_step: +8
clip_high: .3
kl_coef: 1e-3
dynamic_sampling: off
scale: none
seed: 010
max_new_tokens: 2
steps: 2
warm_start_steps: 0
stop_strings: ["no", "1e-3"]
mlp_tile:
"""
TYPED = (
    "--group-size 4 --prompts_per_step 8 --clip_high .3 --kl_coef 1e-3 --no-dynamic_sampling "
    "--scale none --seed 010 --max_new_tokens 2 --steps 2 --warm_start_steps 0 "
    "--stop_strings no 1e-3 --mlp_tile none"
)


def test_yaml_json_and_the_command_line_give_the_same_run(small, tmp_path):
    place = {name: small[name] for name in ("train_file", "held_out_file", "reward", "out_dir")}
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "run.json").write_text(json.dumps(SETTINGS))
    train, kind = LOOPS["grpo"]
    directories = []
    for name, arguments in {
        "yaml": ["--config", str(tmp_path / "run.yaml")],
        "json": ["--config", str(tmp_path / "run.json")],
        "typed": shlex.split(TYPED),
    }.items():
        given = [*arguments, *(text for key, path in place.items() for text in (f"--{key}", path))]
        directories.append(train(parse(kind, [*given, "--name", name])).directory)
    settings = [json.loads((path / "config.json").read_text()) for path in directories]
    assert [one.pop("name") for one in settings] == ["yaml", "json", "typed"]
    assert settings[0] == settings[1] == settings[2]
    assert settings[0] == settings[0] | SETTINGS
    assert rows(directories[0]) == rows(directories[1]) == rows(directories[2])
    assert len(rows(directories[0])) == 3

    again = parse(kind, ["--config", str(directories[0] / "config.json"), "--name", "again"])
    assert rows(train(again).directory) == rows(directories[0])


@pytest.mark.parametrize("word", ["no", "off", "false", "False"])
def test_yaml_booleans(tmp_path, word):
    (tmp_path / "run.yml").write_text(f"share_prompts: {word}\nchat_template: yes\n")
    config = parse(GrpoConfig, ["--config", str(tmp_path / "run.yml")])
    assert (config.share_prompts, config.chat_template) == (False, True)


@pytest.mark.parametrize("number", ["1e-3", "1.e-3", "1E-03", "0.001", "+1e-3", ".001"])
def test_yaml_numbers(tmp_path, number):
    (tmp_path / "run.yaml").write_text(f"learning_rate: {number}")
    assert parse(GrpoConfig, ["--config", str(tmp_path / "run.yaml")]).learning_rate == 1e-3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "steps: fast", "steps must be int, got 'fast'"),
        ("a.yaml", "steps: 0", "steps must be at least 1, got 0"),
        ("a.yaml", "steps: 1:30", "steps must be int, got '1:30'"),
        ("a.yaml", "steps: 2.5", "steps must be int, got 2.5"),
        ("a.yaml", "learning_rate: .inf", "learning_rate must be finite"),
        ("a.yaml", "precision: off", "precision must be one of float32, bfloat16, got False"),
        ("a.yaml", "name: 2024", "name must be str or null, got 2024"),
        ("a.yaml", "stop_strings: [1]", "each of stop_strings must be str, got 1"),
        ("a.yaml", "groupsize: 4", "fields that GrpoConfig does not have: groupsize"),
        ("a.yaml", "steps: 4\nseed: 1\nsteps: 5", "line 3: the key 'steps' is given twice"),
        ("a.yaml", "steps: [", "cannot be read: line 1: "),
        ("a.yaml", "- steps", "must hold an object"),
        ("a.yaml", "3: 4", "must hold an object"),
        ("a.yaml", "", "must hold an object"),
        ("a.yaml", "steps: !!python/object/apply:os.getpid []", "could not determine a constr"),
        ("a.json", '{"steps": 4, "steps": 5}', "the key 'steps' is given twice"),
        ("a.json", '{"steps": "4"}', "steps must be int, got '4'"),
        ("a.json", '{"steps": 4', "cannot be read: Expecting"),
        ("a.json", "[1]", "must hold an object"),
        ("a.txt", "steps: 4", "cannot be read as JSON: Expecting"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_in_one_line(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^config: {re.escape(str(file))}.*{message}") as error:
        parse(GrpoConfig, ["--config", str(file)])
    assert "\n" not in str(error.value)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.yaml cannot be read.*No such file"):
        parse(GrpoConfig, ["--config", str(tmp_path / "no.yaml")])


def test_the_order_of_precedence_is_command_line_file_run(small, tmp_path):
    train, kind = LOOPS["grpo"]
    train(kind(**{**OWN["grpo"], **small, "steps": 1, "save_every": 7, "eval_every": 7}, name="a"))
    (tmp_path / "run.yaml").write_text(f"eval_every: 8\nsteps: 8\nout_dir: {small['out_dir']}")
    resumed = parse(
        kind,
        shlex.split(f"--config {tmp_path / 'run.yaml'} --resume --name a --steps 100 --no-dora"),
    )
    assert (resumed.save_every, resumed.eval_every, resumed.steps) == (7, 8, 100)
    assert resumed.group_size == 4
    place = shlex.split(f"--resume --name a --out_dir {small['out_dir']}")
    assert parse(kind, [*place, "--save_every", "50"]).save_every == 50  # which is the default


def test_plan_is_read_with_and_without_a_number(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("fastrl.train.plan.report", lambda _, limit: seen.append(limit) or "text")
    for arguments in (["--plan"], ["--plan", "24"], ["--seed", "1", "--plan", "--steps", "3"]):
        with pytest.raises(SystemExit, match="0"):
            main(PpoConfig, None, arguments)
    assert seen == [math.inf, 24.0, math.inf]
    assert capsys.readouterr().out == "text\n" * 3


def test_a_run_of_another_loop_is_named(small):
    out = run("grpo", small, name="a", steps=1)
    arguments = ["--resume", "--name", "a", "--out_dir", str(out.directory.parent)]
    with pytest.raises(ValueError, match="they are settings of grpo"):
        parse(PpoConfig, arguments)


def test_an_interrupt_that_no_run_handles_is_a_line(monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["grpo"])
    with pytest.raises(SystemExit) as end:
        main(GrpoConfig, interrupted)
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_in_the_last_step_stops_nothing(small):
    out = run("ppo", small | {"reward": "small_rewards:interrupts"}, steps=2, eval_every=1)
    assert sys.modules["small_rewards"].calls == 7  # of which the last one interrupts
    assert (out.step, out.interrupted) == (2, False)
