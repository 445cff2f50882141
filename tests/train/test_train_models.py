"""Models that a run starts or resumes from: damaged, changed, moved, or ending otherwise."""

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train.model.loading import load
from fastrl.train.run import run_log
from fastrl.train.run.checkpoint import latest
from tests.support.train_runs import LOOPS, rows, run

LORA = {"lora_rank": 2, "steps": 1}


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_adapter_is_not_resumed_on_other_weights(small, base):
    pytest.importorskip("peft")
    small |= {"model": str(base), "name": "a", **LORA}
    run("grpo", small)
    kept = base.with_name("kept")
    shutil.copytree(base, kept)
    model, _ = load(str(base), "cpu")
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(base)
    with pytest.raises(ValueError, match="model must have the weights with which the run began"):
        run("grpo", small, steps=2, resume=True)
    shutil.rmtree(base)
    kept.rename(base)
    assert run("grpo", small, steps=2, resume=True).step == 2


def test_a_run_from_an_adapter_needs_it_only_to_start(small, base):
    pytest.importorskip("peft")
    first = run("grpo", small, model=str(base), name="a", **LORA).directory
    adapter = base.with_name("adapter")
    shutil.copytree(latest(first / "checkpoints"), adapter)
    run("grpo", small, model=str(adapter), name="b", **LORA)
    shutil.rmtree(adapter)
    small |= {"model": str(adapter), **LORA}
    assert run("grpo", small, name="b", resume=True, steps=2).step == 2


@pytest.mark.parametrize("as_what", ["checkpoint", "model"])
def test_damaged_weights_are_named_wherever_they_come_from(small, base, as_what):
    if as_what == "checkpoint":
        directory = latest(run("grpo", small, steps=1).directory / "checkpoints")
        damage(directory / "model.safetensors")
        message = r"model: .* is damaged: model.safetensors is damaged"
    else:
        directory = base
        content = (base / "model.safetensors").read_bytes()
        (base / "model.safetensors").write_bytes(content[:5000])
        message = "model must be a causal LM with its tokenizer"
    with pytest.raises(ValueError, match=message):
        run("grpo", small, model=str(directory), name="b")


def test_the_end_token_of_a_model_may_be_0(base):
    settings = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 0}))
    model, _ = load(str(base), "cpu")
    assert model.generation_config.eos_token_id == 0


def test_a_lost_log_does_not_invent_the_reward_before_the_first_step(small):
    directory = run("grpo", small, name="a", steps=2).directory
    (directory / "metrics.jsonl").unlink()
    run("grpo", small, name="a", steps=3, resume=True)
    assert [row["step"] for row in rows(directory)] == [3]


def test_a_run_that_does_not_start_keeps_the_files_of_others(small, tmp_path, monkeypatch):
    data = tmp_path / "runs" / "mine" / "data"
    data.mkdir(parents=True)
    for name in ("train", "held_out"):
        shutil.copy(tmp_path / f"{name}.jsonl", data)
    small |= {f"{name}_file": str(data / f"{name}.jsonl") for name in ("train", "held_out")}

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(run_log, "replace_file", fails)
    with pytest.raises(OSError, match="no space left"):
        run("grpo", small, name="mine")
    assert sorted(path.name for path in data.iterdir()) == ["held_out.jsonl", "train.jsonl"]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_optimizer_that_is_not_available_leaves_no_lock(small, loop):
    with pytest.raises(ValueError, match="optimizer must not be") as error:
        run(loop, small, name="a", optimizer="adamw_offloaded", device="cpu")
    assert error.tb is not None  # its frames are alive, as in a notebook
    assert run(loop, small, name="a", steps=1).step == 1


def test_a_low_temperature_is_not_taken_for_a_fault_of_packing(small):
    assert run("grpo", small, steps=1, temperature=1e-3).step == 1


def test_a_kill_after_the_last_checkpoint_leaves_nothing_when_resumed(small):
    directory = run("grpo", small, name="a", steps=3, save_every=1).directory / "checkpoints"
    kept = sorted(path.name for path in directory.iterdir())
    shutil.copytree(directory / kept[-1], directory / ".step-000001.partial")  # half removed
    run("grpo", small, name="a", steps=3, save_every=1, resume=True)
    assert sorted(path.name for path in directory.iterdir()) == kept
