"""Code and commands in the documents run; what a stranger sees first."""

import ast
import importlib.util
import inspect
import re
import shlex
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastrl
from tests.integrations.packages import needed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
FENCE = re.compile(r'^ *```(\w*)( title="[^"]*")?\n(.*?)^ *```$', flags=re.DOTALL | re.MULTILINE)
#: A block with a title is an excerpt of the file that it names: test_documents.py compares them.
BLOCKS = [
    (str(path.relative_to(ROOT)), language, code)
    for path in DOCUMENTS
    for language, title, code in FENCE.findall(path.read_text())
    if not title
]
#: test_documents.py runs these scripts on small models.
SCRIPTS = {f"docs/examples/{name}.md" for name in ("grpo", "verl")}
#: test_hub_package.py generates the package that its code loads.
HUB = "docs/hub.md"
#: Code within sentences.
INLINE = [
    (path, "inline", " ".join(code.split()))
    for path in (str(path.relative_to(ROOT)) for path in DOCUMENTS)
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", (ROOT / path).read_text()))
]
PYTHON = [b for b in BLOCKS if b[1] == "python" and b[0] not in {*SCRIPTS, HUB}]
COMMANDS = [block for block in BLOCKS if block[1] == "bash"]
COMMANDS += [block for block in INLINE if re.match("(fastrl|make|python|torchrun) ", block[2])]


def name_of(block):
    return f"{block[0]}: {block[2].strip().splitlines()[-1][:40]}"


def test_every_block_is_of_a_kind_that_is_tested():
    """Python runs unchanged; a diff runs with the names that it takes for granted."""
    assert len(PYTHON) >= 8
    kinds = {"python", "bash", "diff", "text"}
    assert {language for _, language, _ in BLOCKS} == kinds
    changes = {path for path, language, _ in BLOCKS if language == "diff"}
    assert "README.md" in changes
    assert all(path.startswith("docs/replace-the-loss/") for path in changes - {"README.md"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", PYTHON, ids=name_of)
def test_example_runs(block, tmp_path, monkeypatch):
    path, _, code = block
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            top = getattr(node, "module", None) or node.names[0].name
            if top.partition(".")[0] in ("datasets", "transformers", "trl"):
                needed(top.partition(".")[0])
            if top.startswith("fastrl.train"):
                needed("transformers")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, path, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("block", COMMANDS, ids=name_of)
def test_commands_exist(block):
    """Make targets, scripts and their options exist; the commands themselves may take hours."""
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    targets = {"...", *(target for rule in rules for target in rule.split())}
    for line in block[2].replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if "=" not in word]
        for word in words[1:] if words[:1] == ["make"] else ():
            assert word in targets, line
        for before, word in pairwise(words):
            if before == "-m" and word.startswith("fastrl"):
                assert importlib.util.find_spec(word), line
            if before.startswith("python") and word.endswith(".py"):
                source = (ROOT / word).read_text()
                options = [option for option in words if option.startswith("--")]
                missing = [option for option in options if f'"{option}"' not in source]
                assert word == "setup.py" or not missing, line


@pytest.mark.parametrize("block", COMMANDS, ids=name_of)
def test_options_of_training_commands_are_valid(block, tmp_path, monkeypatch):
    needed("transformers")
    from fastrl.train.command_line import parse
    from fastrl.train.config import GrpoConfig, PpoConfig

    kinds = {None: GrpoConfig, "grpo": GrpoConfig, "ppo": PpoConfig}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.json").write_text("{}")
    for line in block[2].replace("\\\n", " ").splitlines():
        command = re.search(r"fastrl(?: |\.train\.)(grpo|ppo) (.*)", line)
        if made := re.match(r'make train(?:-(ppo))? ARGS="(.*)"', line):
            parse(kinds[made[1]], shlex.split(made[2]))
        elif command and "--help" not in line:
            parse(kinds[command[1]], shlex.split(command[2], comments=True))


def test_options_of_benchmark_commands_are_valid():
    from fastrl.bench.command_line import SUBCOMMANDS, _parser

    lines = [line for *_, code in COMMANDS for line in code.replace("\\\n", " ").splitlines()]
    calls = [shlex.split(line, comments=True)[2:] for line in lines if line[:13] == "fastrl bench "]
    assert len(calls) > 5
    for words in calls:
        if words[:1] not in ([name] for name in (*SUBCOMMANDS, "--help", "...")):
            _parser().parse_args(words)


def test_the_training_page_names_what_exists():
    """Options of the loops, functions that are called."""
    needed("transformers")
    from fastrl.train.config import GrpoConfig, PpoConfig

    known = {f"--{field.name}" for kind in (GrpoConfig, PpoConfig) for field in fields(kind)}
    texts = [code for path, _, code in INLINE if path == "docs/training.md"]
    words = {word for code in texts if code.startswith("--") for word in code.split()}
    options = {"--" + word[2:].replace("-", "_") for word in words if word[:2] == "--"}
    assert options - known <= {"--help"}
    for name in re.findall(r"fastrl[.]train[.][\w.]+(?=\()", " ".join(texts)):
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_the_diff_in_the_readme():
    ((_, _, code),) = [block for block in BLOCKS if block[:2] == ("README.md", "diff")]
    lines, losses = code.splitlines(), []  # the logits of T positions, and losses of T - 1 tokens

    def my_grpo_loss(logprobs, old_logprobs, advantages, mask):
        ratio, scores = (logprobs - old_logprobs).exp(), advantages[:, None]
        loss = -torch.min(ratio * scores, ratio.clamp(0.8, 1.2) * scores)
        return ((loss * mask).sum(1) / mask.sum(1)).mean()

    for sign in "-+":
        torch.manual_seed(0)
        names = {
            "fastrl": fastrl,
            "my_grpo_loss": my_grpo_loss,
            "logits": torch.randn(4, 5, 11, requires_grad=True),
            "ids": torch.randint(11, (4, 5)),
            "advantages": torch.randn(4),
            "mask": torch.ones(4, 4),
            "old_logprobs": -torch.rand(4, 4) - 2,
        }
        exec("\n".join(line[1:] for line in lines if line[:1] == sign), names)
        names["loss"].backward()
        losses.append((names["loss"].detach(), names["logits"].grad))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


def test_every_public_function_is_in_the_table_of_functions():
    table = (ROOT / "docs" / "which-function.md").read_text()
    functions = [name for name in fastrl.__all__ if inspect.isroutine(getattr(fastrl, name))]
    assert [name for name in functions if f"`{name}`" not in table] == []


def test_a_picture_follows_the_first_sentence():
    title, sentence, picture = README.split("\n\n")[:3]
    assert title == "# fastrl"
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")
    assert picture.startswith("<picture>")
    for theme in ("dark", "light"):
        assert f'"docs/pictures/memory-{theme}.svg"' in picture


def test_fits_on_a_few_screens():
    assert len(README.splitlines()) <= 150
