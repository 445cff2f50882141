"""bench/longest_sequence.py on a tiny model: ours, and TRL's trainer with and without fastrl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.packages import needed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("settings", ["on", "trl", "trl-fastrl"])
def test_each_part_of_a_step_is_measured(settings, tmp_path):
    if settings != "on":
        needed("trl")
    command = [sys.executable, str(ROOT / "bench" / "longest_sequence.py"), "--smoke"]
    command += ["--model", "0.6B", "--settings", settings, "--out", str(tmp_path)]
    command += ["--start", "512", "--most", "512", "--halvings", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, (tmp_path / "longest_sequence.jsonl").read_text().splitlines())
    assert "failed" not in row, row
    for part in ("logprobs", "learn", "update"):
        assert row[f"seconds_{part}"] > 0
    ours = settings == "on"
    for part, passes in (("logprobs", 1 if ours else 2), ("learn", 1 if ours else 4)):
        tokens = row[f"tokens_per_second_{part}"] * row[f"seconds_{part}"]
        assert tokens == pytest.approx(512 * passes)
    assert ("predicted_gb_learn" in row) == ours
    assert row.get("fused") == {"trl-fastrl": True}.get(settings)
    assert ("seconds_rollout" in row) != ours


def run(folder, *arguments):
    command = [sys.executable, str(ROOT / "bench" / "longest_sequence.py"), "--smoke"]
    command += ["--model", "0.6B", "--settings", "linear", "--out", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_the_longest_is_found(tmp_path):
    said = run(tmp_path, "--start", "1536")  # 3,072 and 2,304 are above the limit of 2,048
    assert said.splitlines()[-1] == "0.6B, linear: 1920 tokens fit"


def test_a_failure_is_not_a_length(tmp_path):
    said = run(tmp_path, "--total-seconds", "0.3")
    assert "no tokens fit; not tried further: longer than 0 s" in said
