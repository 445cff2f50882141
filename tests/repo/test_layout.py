"""The layout of the repository: import rules, the files of an op, names of files."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl import library, native

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "fastrl").rglob("*.py"))
MOST_LINES = 400
MOST_FILES = 25
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")

# By part of the package: what it may import from fastrl (* are the public names), and from others.
CORE = "backend checks command_start contract fakes library native objective segments tracing"
ALLOWED = {
    "core": (f"triton {CORE}", "torch"),
    "objective": ("objective checks contract", "torch"),
    "triton": (f"triton {CORE}", "torch triton numpy"),
    "reference": ("reference objective contract tracing", "torch"),
    "ops": (f"ops reference {CORE}", "torch"),
    "integrations": (
        "* ops integrations backend contract objective",
        "torch transformers trl vllm",
    ),
    "bench": (
        "* bench train integrations backend command_start",
        "torch transformers trl matplotlib",
    ),
    "train": (
        f"* ops integrations train {CORE}",
        "torch transformers tokenizers matplotlib numpy tqdm filelock math_verify "
        "latex2sympy2_extended bitsandbytes datasets peft torchao vllm safetensors tyro jinja2 "
        "tensorboard wandb",
    ),
}
#: What `import fastrl` must neither need nor load.
EXTRAS = sorted({one for _, others in ALLOWED.values() for one in others.split()} - {"torch"})

# The reference of a fused op is a composition of others and has no separate file. The loops over
# rows are in Python for every device, and are tested and measured together.
LOOPS = {"rows_stats", "rows_loss"}
COMPOSED = {"logits_policy_loss", *LOOPS}
TOGETHER = dict.fromkeys((*LOOPS, "linear_token_stats", "linear_policy_loss"), "linear")

PASS = re.compile(r"_(fwd|bwd)_?$")


def part(path):
    names = path.relative_to(ROOT / "fastrl").with_suffix("").parts
    return names[0] if len(names) > 1 else "core"


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: a relative import"
            if node.module in ("fastrl", "fastrl.ops", "fastrl.train"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.fixture(scope="module")
def files():
    """The files of the repository, by their path in it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {
        Path(name): ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    ours, others = (names.split() for names in ALLOWED[part(path)])
    if path.parent == ROOT / "fastrl" and path.stem in ("__init__", "doctor"):
        ours = ["*", "ops", "triton", "doctor", *CORE.split()]
    if path == ROOT / "fastrl" / "__main__.py":
        ours = ["console"]
    if path == ROOT / "fastrl" / "console.py":
        ours = ["*", "bench", "command_start", "doctor", "train"]
    for name in imported(path):
        top, _, inner = name.partition(".")
        if top == "fastrl":
            first = inner.partition(".")[0]
            allowed = ("*" if first in ("", *fastrl.__all__) else first) in ours
        else:
            allowed = top in others or top in sys.stdlib_module_names
        assert allowed, f"{path.relative_to(ROOT)} must not import {name}"


LOADED = """
before = set(sys.modules)
import fastrl
print(*{name.partition('.')[0] for name in set(sys.modules) - before})
"""


def test_import_needs_only_torch_and_loads_nothing_else():
    without = f"import sys, torch\nsys.modules.update(dict.fromkeys({EXTRAS}))\nimport fastrl"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=120)
    command = [sys.executable, "-c", f"import sys, torch\n{LOADED}"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert not set(loaded.stdout.split()) & set(EXTRAS)


@pytest.mark.parametrize(
    ("folder", "heading"),
    [("train", "## The training loops"), ("ops", "### Inside `fastrl/ops`")],
)
def test_files_import_from_above(folder, heading):
    """In the list of files and subfolders in docs/architecture.md, in the direction of the data."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.partition(f"\n{heading}\n")[2].split("```")[1]
    lines = [re.split(r"\s{2,}", line)[0] for line in block.splitlines()[1:] if line]
    order = [name for line in lines for name in line.split(", ")]
    root, back = ROOT / "fastrl" / folder, []
    modules = [path for path in MODULES if part(path) == folder and path != root / "__init__.py"]
    places = {path: path.relative_to(root).with_suffix("").parts[0] for path in modules}
    assert sorted(order) == sorted(set(places.values()))
    for path, place in places.items():
        names = [name.split(".") for name in imported(path) if name.startswith(f"fastrl.{folder}.")]
        back += [f"{place}: {n[2]}" for n in names if order.index(n[2]) > order.index(place)]
    assert back == []


def registered_ops():
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return sorted({name for name in names if name.startswith("fastrl::")})


@pytest.mark.parametrize("name", [name for name in registered_ops() if name.endswith("_fwd")])
def test_every_part_of_a_registered_op_exists(name):
    stem = name.removeprefix("fastrl::").removesuffix("_fwd")
    expected = [
        f"fastrl/ops/{'_rows/operators' if stem in LOOPS else stem}.py",
        f"tests/ops/test_{TOGETHER.get(stem, stem)}.py",
    ]
    if stem not in COMPOSED:
        expected.append(f"fastrl/reference/{stem}.py")
    if stem not in LOOPS:
        expected += [
            f"csrc/cpu/*/{stem}.cpp",
            f"fastrl/triton/*/{stem}.py",
        ]
    if stem not in LOOPS and not f"{stem}_fwd".startswith(library.NOT_IN_CUDA):
        expected += [f"csrc/cuda/torch/{stem}.cpp", f"csrc/cuda/*/{stem}.cu"]
    missing = [path for path in expected if not list(ROOT.glob(path))]
    assert not missing


@pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
@pytest.mark.parametrize("name", [name for name in registered_ops() if PASS.search(name)])
def test_the_extension_implements(name):
    keys = ("CPU", "CompositeExplicitAutograd")
    assert any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


@pytest.mark.parametrize("key", ["CUDA", "CPU"])
def test_triton_implements_what_its_namespace_holds(key):
    every = torch._C._dispatch_get_all_op_names()
    names = [name for name in every if name.startswith("fastrl_triton")]
    assert len(names) >= 8
    lacking = [n for n in names if not torch._C._dispatch_has_kernel_for_dispatch_key(n, key)]
    assert lacking == []


def test_public_names_are_sorted_and_their_functions_have_test_files():
    assert list(fastrl.__all__) == sorted(fastrl.__all__)
    for name in fastrl.__all__:
        value = getattr(fastrl, name)
        if inspect.isfunction(value):
            stem = value.__module__.rpartition(".")[2]
            assert list(ROOT.glob(f"tests/*/test_{TOGETHER.get(stem, stem)}.py")), name


@pytest.mark.parametrize(
    "program", ["pytest -q -p no:cacheprovider --collect-only", "tests.fuzz --help"]
)
def test_an_installed_package_named_tests_is_not_found_first(program, tmp_path):
    """The wheel of verl brings one."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    command = [sys.executable, "-m", *program.split()]
    if "pytest" in program:
        command += ["--doctest-modules", "tests/fuzz", "tests/repo/test_layout.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_files_are_short_and_named_after_their_ideas(files):
    sources = {name: path for name, path in files.items() if path.suffix in SOURCES}
    lengths = {name: len(path.read_text().splitlines()) for name, path in sources.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
    forbidden = re.compile(r"^_?(utils?|helpers?|common|misc)$")
    assert [name for name in files if forbidden.match(name.stem)] == []


def test_folders_of_tests_are_small_and_share_by_imports_of_names(files):
    """Support code lies beside its main user."""
    tests = [name for name in files if name.is_relative_to("tests")]
    folders = Counter(name.parent.as_posix() for name in tests)
    assert "tests/support" not in folders
    assert {name: count for name, count in folders.items() if count > MOST_FILES} == {}
    stars = re.compile(r"^from tests\S* import \*", re.MULTILINE)
    modules = [name for name in tests if name.suffix == ".py"]
    assert [name for name in modules if stars.search(files[name].read_text())] == []


def test_no_two_test_files_outside_of_packages_have_the_same_name(files):
    """pytest imports them by their name alone, and does not run the second."""
    tests = [name for name in files if name.match("test_*.py")]
    alone = [name.name for name in tests if name.parent / "__init__.py" not in files]
    assert [name for name, count in Counter(alone).items() if count > 1] == []


# written so that these lines do not match themselves
@pytest.mark.parametrize(
    ("text", "suffixes"),
    [
        (
            r"(?<![\w.}])/(?:home|Users|root|work|workspace|mnt|scratch)/\w",
            (*SOURCES, ".md", ".toml", ".yaml", ".yml", ".cfg", ""),
        ),
        (
            r"(coefficients|stats|metrics)" + r"\[\d|\br" + r"ange\(7\)|columns\(col" + "umns",
            SOURCES,
        ),
    ],
    ids=["a path of a developer's machine", "the contract, which is read by name"],
)
def test_no_file_contains(text, suffixes, files):
    found = [
        f"{name}: {line.strip()}"
        for name, path in files.items()
        if path.suffix in suffixes
        for line in path.read_text().splitlines()
        if re.search(text, line)
    ]
    assert found == []
