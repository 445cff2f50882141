"""Code and commands in the documents run; what a stranger sees first."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from dataclasses import fields
from itertools import pairwise

import pytest

import fastrl
from tests.integrations.packages import needed
from tests.repo.blocks import BLOCKS, INLINE, ROOT, TEXTS

README = TEXTS["README.md"]
#: test_documents.py runs the scripts, on small models, and test_changes.py that for verl;
#: test_hub_package.py generates the package that the code of its page loads.
ELSEWHERE = {"docs/examples/grpo.md", "docs/examples/verl.md", "docs/hub.md"}
UNTITLED = [block for block in BLOCKS if not block.title]
PYTHON = [b for b in UNTITLED if b.language == "python" and b.page not in ELSEWHERE]
TYPED = [block for block in INLINE if re.match("(fastrl|make|python|torchrun) ", block.code)]
COMMANDS = [
    line
    for block in [*(block for block in UNTITLED if block.language == "bash"), *TYPED]
    for line in block.code.replace("\\\n", " ").splitlines()
]


def test_every_block_is_of_a_kind_that_is_tested():
    """Python runs unchanged; a diff runs with the names that it takes for granted."""
    assert len(PYTHON) >= 8
    assert {block.language for block in UNTITLED} == {"python", "bash", "diff", "text"}
    changes = {block.page for block in UNTITLED if block.language == "diff"}
    assert "README.md" in changes
    assert all(page.startswith("docs/replace-the-loss/") for page in changes - {"README.md"})
    assert sum(line.startswith("fastrl bench ") for line in COMMANDS) > 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_example_runs(block, tmp_path, monkeypatch):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            top = getattr(node, "module", None) or node.names[0].name
            if top.partition(".")[0] in ("datasets", "transformers", "trl"):
                needed(top.partition(".")[0])
            if top.startswith("fastrl.train"):
                needed("transformers")
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, block.page, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("line", sorted({*COMMANDS} - {""}))
def test_commands_exist(line):
    """Make targets, scripts and their options exist; the commands themselves may take hours."""
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    targets = {"...", *(target for rule in rules for target in rule.split())}
    words = [word for word in shlex.split(line, comments=True) if "=" not in word]
    for word in words[1:] if words[:1] == ["make"] else ():
        assert word in targets
    for before, word in pairwise(words):
        if before == "-m" and word.startswith("fastrl"):
            assert importlib.util.find_spec(word)
        if before.startswith("python") and word.endswith(".py"):
            source = (ROOT / word).read_text()
            options = [option for option in words if option.startswith("--")]
            missing = [option for option in options if f'"{option}"' not in source]
            assert word == "setup.py" or not missing


def training_configs():
    needed("transformers")
    from fastrl.train.config import GrpoConfig, PpoConfig

    return {None: GrpoConfig, "grpo": GrpoConfig, "ppo": PpoConfig}


TRAINING = r"fastrl(?: |\.train\.)(grpo|ppo) (?!.*--help)(.*)|make train(?:-(ppo))? ARGS=\"(.*)\""


@pytest.mark.parametrize("line", [line for line in COMMANDS if re.search(TRAINING, line)])
def test_options_of_training_commands_are_valid(line, tmp_path, monkeypatch):
    kinds = training_configs()
    from fastrl.train.command_line import parse

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.json").write_text("{}")
    loop, words, made, arguments = re.search(TRAINING, line).groups()
    parse(kinds[loop or made], shlex.split(words or arguments, comments=True))


def test_options_of_benchmark_commands_are_valid():
    from fastrl.bench.command_line import SUBCOMMANDS, _parser

    calls = [shlex.split(line, comments=True) for line in COMMANDS]
    for words in (words[2:] for words in calls if words[:2] == ["fastrl", "bench"]):
        if words[:1] not in ([name] for name in (*SUBCOMMANDS, "--help", "...")):
            _parser().parse_args(words)


def test_the_training_page_names_options_that_exist():
    known = {f"--{field.name}" for kind in training_configs().values() for field in fields(kind)}
    texts = [block.code for block in INLINE if block.page == "docs/training.md"]
    words = {word for code in texts if code.startswith("--") for word in code.split()}
    options = {"--" + word[2:].replace("-", "_") for word in words if word[:2] == "--"}
    assert options - known <= {"--help"}
    for name in re.findall(r"fastrl[.]train[.][\w.]+(?=\()", " ".join(texts)):
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_every_public_function_is_in_the_table_of_functions():
    table = TEXTS["docs/which-function.md"]
    functions = [name for name in fastrl.__all__ if inspect.isroutine(getattr(fastrl, name))]
    assert [name for name in functions if f"`{name}`" not in table] == []


def test_a_picture_follows_the_first_sentence_and_the_readme_fits_on_a_few_screens():
    title, sentence, picture = README.split("\n\n")[:3]
    assert title == "# fastrl"
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")
    assert picture.startswith("<picture>")
    for theme in ("dark", "light"):
        assert f'"docs/pictures/memory-{theme}.svg"' in picture
    assert len(README.splitlines()) <= 150
