"""bench/longest_sequence.py on a tiny model: ours, and TRL's trainer with and without fastrl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.packages import needed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(folder, settings, *arguments):
    command = [sys.executable, str(ROOT / "bench" / "longest_sequence.py"), "--smoke"]
    command += ["--model", "0.6B", "--settings", settings, "--out", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("settings", ["on", "trl", "trl-fastrl"])
def test_each_part_of_a_step_is_measured(settings, tmp_path):
    if settings != "on":
        needed("trl")
    run(tmp_path, settings, "--start", "512", "--most", "512", "--halvings", "0")
    (row,) = map(json.loads, (tmp_path / "longest_sequence.jsonl").read_text().splitlines())
    assert "failed" not in row, row
    ours = settings == "on"
    for part, passes in (("logprobs", 1 if ours else 2), ("learn", 1 if ours else 4)):
        tokens = row[f"tokens_per_second_{part}"] * row[f"seconds_{part}"]
        assert tokens == pytest.approx(512 * passes)
    assert row["seconds_update"] > 0
    assert row.get("fused") == {"trl-fastrl": True}.get(settings)


def test_the_longest_is_found(tmp_path):
    said = run(tmp_path, "linear", "--start", "1536")  # the limit is 2,048
    assert said.splitlines()[-1] == "0.6B, linear: 1920 tokens fit"
