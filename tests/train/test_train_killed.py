"""A run that is killed, or whose files are damaged or changed, is resumed to the same or refused.

`FASTRL_KILLS` is the number of kills of each loop, by default 3.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fastrl.train.checkpoint import latest
from tests.train.packed import save_reward_model
from tests.train.runs import LOOPS, Process, assert_same, rows, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unreported")]

KILLS = int(os.environ.get("FASTRL_KILLS", "3"))
STEPS = 8


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_run_resumes_to_the_same_metrics_and_weights(small, tmp_path, loop, forkserver):
    settings = {**small, "steps": STEPS, "eval_every": 3, "save_every": 1, "learning_rate": 1e-3}
    settings |= {"kl_coef": 0.05, "prompts_per_step": 8}
    killed, whole = (
        Process(forkserver, loop, settings | {"out": str(tmp_path / name)})
        for name in ("killed", "whole")
    )
    in_write = 0
    for i in range(KILLS):
        step = i * (STEPS - 1) // KILLS - (i == 0)  # the first kill is before anything is logged
        killed_in_write = killed.kill(step, in_write=i % 2 == 1)
        while i % 2 == 1 and not killed_in_write:  # it was over before the kill
            killed_in_write = killed.kill(step, in_write=True)
        in_write += killed_in_write
    killed.finish()
    whole.finish()
    assert in_write >= KILLS // 2
    assert [row["step"] for row in rows(killed.directory)] == list(range(STEPS + 1))
    assert_same(killed.directory, whole.directory)
    assert not [path for path in killed.directory.rglob("*") if path.name.startswith(".")]


def test_two_processes_do_not_use_one_directory(small, forkserver):
    def refused():
        for resume in (True, False):
            with pytest.raises(ValueError, match=r"^out: .*run is in use by another run"):
                run("grpo", settings, resume=resume)

    settings = small | {"steps": 100_000, "save_every": 1}
    Process(forkserver, "grpo", settings).kill(1, in_write=False, while_alive=refused)
    steps = rows(small["out"])[-1]["step"] + 1
    assert run("grpo", settings, resume=True, steps=steps).step == steps
    assert not Path(small["out"], ".lock").exists()


def test_runs_without_a_name_get_the_next_number_and_failed_starts_leave_nothing(small):
    small |= {"out": None, "steps": 1}
    assert [run("ppo", small).directory for _ in "ab"] == [Path("runs/ppo-1"), Path("runs/ppo-2")]
    with pytest.raises(ValueError, match=r"^max_prompt_tokens must cover"):
        run("ppo", small, max_prompt_tokens=2)
    assert not Path("runs/ppo-3").exists()
    assert run("ppo", small, steps=2, resume=True).directory == Path("runs/ppo-2")
    for out in ("train.jsonl/run", "/proc/run"):
        with pytest.raises(ValueError, match=f"^out: {out} cannot be written: "):
            run("ppo", small, out=out)


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "tokenizer.json"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_resumes(small, name):
    run("grpo", small, steps=2, save_every=1)
    last = latest(Path(small["out"]) / "checkpoints")
    content = (last / name).read_bytes()
    changed = bytes([content[0] ^ 1]) + content[1:]
    for damaged in (changed, content[:-1], None):
        (last / name).unlink() if damaged is None else (last / name).write_bytes(damaged)
        expected = "^resume: .*step-000002 cannot be read; delete it to resume from the previous"
        with pytest.raises(ValueError, match=f"{expected} one .*{name}"):
            run("grpo", small, resume=True)
    shutil.rmtree(last)
    assert run("grpo", small, resume=True).step == 3


def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(small, tmp_path, capsys):
    small |= {"steps": 1, "value_model": "separate"}
    directory = run("ppo", small).directory
    before = shutil.copytree(directory, tmp_path / "before")
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ValueError, match=r"^resume: .*run has metrics, but no checkpoint"):
        run("ppo", small, resume=True)
    assert rows(directory) == rows(before)
    (directory / "metrics.jsonl").unlink()  # as if killed before the first checkpoint
    run("ppo", small, resume=True)
    assert "holds no checkpoint; the run begins anew" in capsys.readouterr().out
    assert_same(directory, before)


def test_changed_data_and_weights_are_refused_on_resume(small, base, tmp_path):
    save_reward_model(tmp_path / "scorer")
    small |= {"model": str(base), "lora_rank": 2, "reward": (f"model:{tmp_path / 'scorer'}",)}
    small |= {"kl_coef": 0.1, "steps": 1}
    run("grpo", small)
    more = json.dumps({"prompt": "9 + 1 =", "answer": "10"}).encode() + b"\n"
    for name, path in (
        ("reward_model", tmp_path / "scorer" / "model.safetensors"),
        ("base", base / "model.safetensors"),
        ("prompts", Path(small["prompts"][0])),
        ("held_out", Path(small["prompts"][1])),
    ):
        content = path.read_bytes()
        weights = content[:-2] + bytes([content[-2] ^ 1, content[-1]])
        path.write_bytes(weights if path.suffix == ".safetensors" else content + more)
        with pytest.raises(ValueError, match=f"^resume: {name} has changed since the run began"):
            run("grpo", small, resume=True)
        path.write_bytes(content)
    assert run("grpo", small, resume=True, steps=2).step == 2
