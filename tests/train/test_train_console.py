"""The command ``fastrl``: its subcommands, what they import, and the report of the doctor."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import fastrl.train
from fastrl import console, doctor
from tests.support.train_runs import OWN, rows, run

ROOT = Path(__file__).parents[2]


def test_the_command_is_installed_under_its_name():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["fastrl"].split(":")
    assert getattr(sys.modules[module], function) is console.main


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_the_help_lists_every_command(arguments, capsys):
    console.main(arguments)
    text = capsys.readouterr().out
    for command in ("grpo", "ppo", "reward", "doctor"):
        assert f"\n  {command} " in text


def test_version(capsys):
    console.main(["--version"])
    assert capsys.readouterr().out == f"fastrl {fastrl.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "error: there is no command 'train'; fastrl --help lists them\n"),
        (["doctor", "who"], "error: doctor takes no arguments, got who\n"),
        (["grpo", "--steps", "0"], "error: steps must be at least 1, got 0\n"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        console.main(arguments)
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_a_loop_trains_as_its_function_does(loop, small, tmp_path, capsys):
    small |= {"steps": 1, **OWN[loop]}
    (tmp_path / "run.json").write_text(json.dumps({**small, "name": "a"}))
    with pytest.raises(SystemExit, match="0"):
        console.main([loop, "--config", str(tmp_path / "run.json")])
    assert "held-out reward" in capsys.readouterr().out
    expected = run(loop, small, name="b").directory
    assert rows(tmp_path / "runs" / "a") == rows(expected)


def test_a_loop_whose_settings_are_in_its_own_module(monkeypatch, tmp_path, capsys):
    (tmp_path / "sorting.py").write_text(
        """
from dataclasses import dataclass
from pathlib import Path
from fastrl.train.config import LoopConfig
from fastrl.train.run.run_log import Summary
from fastrl.train.settings.options import option

@dataclass
class SortingConfig(LoopConfig):
    loop = "sorting"
    swaps: int = option(3, "Swaps.")

def train(config):
    return Summary(Path(config.name), config.swaps, None, interrupted=True)
"""
    )
    monkeypatch.setattr(fastrl.train, "__path__", [*fastrl.train.__path__, str(tmp_path)])
    monkeypatch.setitem(console.LOOPS, "sorting", "sort")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="130"):
        console.main(["sorting", "--swaps", "4", "--name", "a"])
    assert "stopped after step 4" in capsys.readouterr().out


def fresh_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_help_of_a_loop_loads_no_model_library():
    code = (
        "import sys; from fastrl.console import main\n"
        "try: main(['grpo', '--help'])\n"
        "finally: print(sorted({'transformers', 'matplotlib', 'peft'} & set(sys.modules)))"
    )
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    assert "usage: fastrl grpo" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_without_the_extra_a_sentence_says_how_to_install_it():
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'transformers' else find(name)\n"
        "from fastrl.console import main; main(['--version']); main(['grpo'])"
    )
    done = fresh_python(code)
    assert done.returncode == 2
    assert done.stderr == (
        "error: fastrl.train needs transformers; "
        "install it with: pip install 'fastrl-kernels[train]'\n"
    )


REQUIRED = [
    "torch>=2.10",
    "transformers>=4.56; extra == 'train'",
    'tqdm; extra == "train"',
    "filelock>=999; extra == 'train'",
    "no-such-package>=1; sys_platform == 'linux' and extra == 'vllm'",
    "pytest>=8; extra == 'bench'",
]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_doctor_has_help(capsys, flag):
    console.main(["doctor", flag])
    assert capsys.readouterr().out.startswith("usage: fastrl doctor\n")


def test_the_doctor_names_packages_that_are_missing_or_old(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIRED)
    console.main(["doctor"])
    text = capsys.readouterr().out
    version = importlib.metadata.version("transformers")
    old = importlib.metadata.version("filelock")
    assert f"train      transformers {version}, tqdm " in text
    assert (
        f"filelock {old}, but 999 or later is needed; pip install 'fastrl-kernels[train]'" in text
    )
    assert "no-such-package missing; pip install 'fastrl-kernels[vllm]'" in text
    assert "pytest" not in text


def test_the_doctor_reports_backends_gpus_threads_and_disk(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-of-a-person")
    text = doctor.report()
    for part in ("default backend", "  reference  usable", "GPUs: ", "threads of torch: ", "GiB"):
        assert part in text
    assert "secret-of-a-person" not in text


def test_the_module_prints_what_the_doctor_does():
    done = subprocess.run(
        [sys.executable, "-m", "fastrl"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"fastrl {fastrl.__version__}, torch ")
    assert "optional packages" in done.stdout


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "fastrl", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout == f"fastrl {fastrl.__version__}\n"
