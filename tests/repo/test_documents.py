"""What the pages that explain say of the code: formulas, excerpts, errors."""

import ast
import random
import re
import runpy
import sys

import pytest
import torch

from fastrl import Objective
from fastrl.objective.presets import PRESETS
from tests.integrations.packages import needed
from tests.repo.blocks import BLOCKS, ROOT, TEXTS, changes, script

EXCERPTS = [block for block in BLOCKS if block.title]


def test_every_preset_has_a_formula_that_is_compared_a_section_and_a_row_of_names():
    parts = re.split(r"^## (.*)$", TEXTS["docs/objectives.md"], flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    compared = re.findall(r'^    "(\w+)": \(', found["The same in torch"], flags=re.MULTILINE)
    assert sorted(compared) == sorted(PRESETS)
    headings = " ".join(heading for heading in found if "`" in heading)
    assert sorted(re.findall(r"`(\w+)`", headings)) == sorted(PRESETS)
    first_cells = re.findall(r"^\| (`.*?) \|", found["Names in other trainers"], flags=re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert set(PRESETS) - named == {"m2po"}  # AReaL's alone, below the table


def test_the_page_of_objectives_has_every_paper_of_the_docstring():
    papers = set(re.findall(r"\d{4}\.\d{5}", Objective.preset.__doc__))
    assert len(papers) > 10
    linked = re.findall(r"/abs/(\d{4}\.\d{5})\)", TEXTS["docs/objectives.md"])
    assert papers - set(linked) == set()


def test_excerpts_are_in_the_files_that_they_name():
    assert sum(block.page == "docs/how-a-kernel-works.md" for block in EXCERPTS) >= 9
    for block in EXCERPTS:
        assert f"\n{block.code}" in (ROOT / block.title).read_text(), block.page


def texts_of(node):
    """Yield the strings of a module, with ... where something is formatted into them."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.JoinedStr):
            yield "".join(x.value if isinstance(x, ast.Constant) else "..." for x in child.values)


#: The first cells of the tables that are headed `message`.
MESSAGES = [
    row.split("|")[1].strip()
    for table in re.findall(
        r"^\| message \|.*\n\|[- |]+\|\n((?:\|.*\n)+)", TEXTS["docs/errors.md"], re.MULTILINE
    )
    for row in table.splitlines()
]


@pytest.fixture(scope="module")
def raised():
    """The texts of all modules that a user may meet."""
    modules = (ROOT / "fastrl").rglob("*.py")
    return [text for path in modules for text in texts_of(ast.parse(path.read_text()))]


def is_in_order(parts, text):
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@pytest.mark.parametrize("message", MESSAGES)
def test_the_errors_of_the_page_are_those_of_the_code(message, raised):
    assert re.fullmatch(r"`[^`]+`", message)
    parts = message.strip("`").split("...")
    assert max(map(len, parts)) > 10
    assert any(is_in_order(parts, text) for text in raised)


def test_the_page_of_errors_lists_what_is_met_most_often():
    assert len(MESSAGES) > 40


# --- scripts of docs/examples


def test_grpo_takes_40_lines():
    lines = [line.strip() for line in script("docs/examples/grpo.md").splitlines()]
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= 40


@pytest.fixture
def small_models(tmp_path, monkeypatch):
    """Small models in folders with the names of those that the scripts load."""
    needed("transformers")
    from fastrl.train.loading import character_tokenizer, small_model

    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    random.seed(0)
    teacher = "Qwen/Qwen3-1.7B-Base"
    for name in ("Qwen/Qwen3-0.6B-Base", teacher, "HuggingFaceTB/SmolLM2-135M-Instruct"):
        model = small_model(tokenizer)
        if name == teacher:
            with torch.no_grad():  # it prefers some tokens
                model.lm_head.weight.mul_(4)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def faster(monkeypatch):
    """A learning rate for small models."""
    optimizer = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda weights, lr: optimizer(weights, lr=2e-3))


def numbers_after(word, text):
    return [float(x) for x in re.findall(rf"{word} (-?[\d.]+)", text)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_grpo_script_raises_the_reward(small_models, faster, capsys):
    exec(script("docs/examples/grpo.md"), {"__name__": "script"})
    rewards = numbers_after("reward", capsys.readouterr().out)
    assert len(rewards) == 25
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_distillation_script_nears_the_teacher(small_models, faster, capsys):
    runpy.run_path(str(ROOT / "docs" / "examples" / "distillation.py"))
    text = capsys.readouterr().out
    divergences, agreements = numbers_after("divergence", text), numbers_after("agreement", text)
    assert len(divergences) == 30
    assert divergences[-1] < 0.6 * divergences[0]
    assert agreements[-1] > agreements[0] + 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_first_run_logs_the_same_with_fastrl(small_models, capsys, monkeypatch):
    needed("trl")
    path, logs = ROOT / "docs" / "first_run.py", []
    for arguments in ([], ["--fastrl"]):
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path))
        printed = capsys.readouterr().out
        assert ("the loss is fused" in printed) is bool(arguments)
        assert "peak memory: " in printed
        steps = map(ast.literal_eval, re.findall(r"^step \d+ (.*)$", printed, flags=re.MULTILINE))
        logs.append([[step[name] for name in ("reward", "loss", "grad_norm")] for step in steps])
    assert len(logs[0]) == 3
    for before, after in zip(*logs, strict=True):
        assert after == pytest.approx(before, abs=2e-3)  # three digits are printed


# --- drawings


def drawing(name):
    """The two drawings of a name, which differ in their colours only."""
    drawings = [
        (ROOT / f"docs/pictures/{name}-{theme}.svg").read_text() for theme in ("light", "dark")
    ]
    plain, dark = (re.sub(r"#[0-9a-f]{6}", "", text) for text in drawings)
    assert plain == dark
    return plain


def test_the_picture_of_fusing_has_the_bytes_that_are_counted():
    text = TEXTS["docs/how-a-kernel-works.md"]
    counted = re.findall(r"assert bytes_per_logit\(\w+\) == (\d+)", text)
    box = re.compile(r'class="(?:forward|backward)" .*? width="(\d+)".*?\n.*?>(\d+)<')
    drawn = drawing("fusing")
    assert re.findall(r">(\d+) bytes<", drawn) == [*counted, "0"]
    rows = re.split(r'class="head"', drawn)[1:]
    for row, total in zip(rows, counted, strict=False):
        boxes = box.findall(row)
        assert all(int(width) == 28 * int(size) for width, size in boxes)
        assert sum(int(size) for _, size in boxes) == int(total)


def test_the_picture_of_the_six_words_has_the_tensors_of_its_page():
    page = "docs/six-words.md"
    (bounds,) = set(re.findall(r"cu_seqlens=torch.tensor\(\[(.*?)\]\)", TEXTS[page]))
    exec(changes(page)[0][1], names := {})
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", drawing("tensors"))
    after = {name: shown[at + 1 :] for at, name in enumerate(shown)}
    assert after["cu_seqlens"][:3] == bounds.split(", ")
    words = {10: "pad", 11: "end", 12: "+", 13: "="}
    for place, row in enumerate(names["ids"].tolist()):
        assert after[f"ids[{place}]"][:7] == [words.get(token, str(token)) for token in row]
    packed, padded = names["mask"][names["real"]], names["mask"][0]
    assert [int(x) for x in after["mask"][:11]] == packed.tolist()  # the last of that name
    first = shown.index("mask") + 1
    assert [int(x) for x in shown[first : first + 6]] == padded.tolist()
    marked = [x.split()[1].replace("\N{MINUS SIGN}", "-") for x in shown if "advantage " in x]
    assert [float(x) for x in marked] == pytest.approx(names["advantages"].tolist(), abs=0.01)


# --- places and variables

PLACE = re.compile(r"`((?:fastrl|csrc|tests|bench|docs)/[\w./*-]+(?:\.\w+|/))`")
#: In the documents for developers, also outside of code.
ANYWHERE = re.compile(r"\b(?:fastrl|csrc|tests|bench|docs)/[\w./*]*\w[\w.*]*(?![\w.*<-])")
FOR_DEVELOPERS = ("docs/architecture.md", "docs/extending.md", "CONTRIBUTING.md")
#: A file in a folder of fastrl/ops.
IN_OPS = re.compile(r"(?<![\w/])(_\w+/\w+\.py)")


@pytest.mark.parametrize("page", [page for page in TEXTS if page.startswith(("docs", "CONTRIB"))])
def test_places_in_the_source_exist(page):
    text = TEXTS[page]
    named = {*PLACE.findall(text), *(ANYWHERE.findall(text) if page in FOR_DEVELOPERS else ())}
    if page == "docs/architecture.md":
        named |= {f"fastrl/ops/{path}" for path in IN_OPS.findall(text)}
    assert [place for place in named if not list(ROOT.glob(place.rstrip("/")))] == []


#: How Python, C++ and the Makefile read a variable of the environment.
READS = re.compile(
    r"""environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"|"(\w+)"\ (?:not\ )?in\ os\.environ
    |getenv\("(\w+)"\)|^(\w+)\ \?=|export\ (\w+)\ \?=""",
    flags=re.MULTILINE | re.VERBOSE,
)
READERS = (
    "fastrl/**/*.py",
    "bench/**/*.py",
    "tests/**/*.py",
    "csrc/**/*.*",
    "setup.py",
    "Makefile",
)


def test_the_page_of_the_environment_lists_the_variables_that_are_read():
    rows = re.findall(r"^\| (`.*?) \|", TEXTS["docs/environment.md"], flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    sources = [path.read_text() for reader in READERS for path in ROOT.glob(reader)]
    read = {name for text in sources for names in READS.findall(text) for name in names if name}
    assert len(read) >= 30
    assert read - {"PATH"} <= listed
    words = {word for text in sources for word in re.findall(r"\w+", text)}
    # trackers.py makes these of the tracker's name
    assert listed - {"WANDB_PROJECT", "TRACKIO_PROJECT"} <= words
