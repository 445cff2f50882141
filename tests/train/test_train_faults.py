"""What goes wrong in a run is named, loses nothing, and can be continued from."""

import json
import os
import shutil
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.train import gradients
from fastrl.train.command_line import main, parse
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.model.loading import load
from fastrl.train.run import checkpoint, run_log
from fastrl.train.run.checkpoint import latest
from fastrl.train.run.run_directory import check_resumable, settings_of
from fastrl.train.settings.options import choices
from tests.support.train_runs import LOOPS, rows, run, start_process, wait_for, weights


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def failing(monkeypatch):
    """Make a call of `gradients.apply` fail: with infinite gradients, or in the optimizer."""
    apply = gradients.apply
    calls = []

    def fail_at(call, error=None):
        def apply_or_fail(optimizer, config, step):
            calls.append(step)
            if len(calls) == call and error is None:
                next(iter(optimizer.param_groups[0]["params"])).grad.fill_(float("inf"))
            elif len(calls) == call:
                optimizer.param_groups[0]["params"][0].data += 1  # as if it stepped in part
                raise error
            return apply(optimizer, config, step)

        calls.clear()
        monkeypatch.setattr(gradients, "apply", apply_or_fail)

    yield fail_at
    monkeypatch.setattr(gradients, "apply", apply)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no memory left")])
def test_no_checkpoint_holds_a_part_of_a_step(small, failing, loop, error):
    small |= {"minibatches": 2, "save_every": 1}
    failing(4, error)  # the second minibatch of the second step
    kind = FloatingPointError if error is None else type(error)
    with pytest.raises(kind, match=r"; --resume continues from .*step-000001$"):
        run(loop, small, name="a")
    directory = Path(small["out_dir"]) / "a"
    assert latest(directory / "checkpoints").name == "step-000001"
    failing(0)
    assert run(loop, small, name="a", resume=True).step == 3
    whole = run(loop, small, name="whole").directory
    assert rows(directory) == rows(whole)
    assert equal(weights(directory), weights(whole))


@pytest.mark.parametrize("loop", LOOPS)
def test_an_error_before_the_first_optimizer_step_loses_no_step(small, failing, loop):
    small |= {"minibatches": 2, "save_every": 100}
    failing(5)  # the first minibatch of the third step
    with pytest.raises(FloatingPointError, match=r"step 3 are not finite; .*step-000002$"):
        run(loop, small, name="a")
    failing(0)
    directory = run(loop, small, name="a", resume=True).directory
    whole = run(loop, small, name="whole").directory
    assert rows(directory) == rows(whole)
    assert equal(weights(directory), weights(whole))


def test_any_error_between_steps_leaves_a_checkpoint(small, monkeypatch):
    def exhausted(*arguments, **options):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(sys.modules["fastrl.train.grpo"], "rollout_logprobs", exhausted)
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory left; .*step-000000$"):
        run("grpo", small, name="a", save_every=100)


def test_a_failed_checkpoint_does_not_hide_the_first_error(small, failing, monkeypatch):
    save = checkpoint.save

    def full(directory, *, step, **options):
        if step == 2:
            raise checkpoint.CheckpointError("step-000002 could not be written: no space")
        return save(directory, step=step, **options)

    monkeypatch.setattr(checkpoint, "save", full)
    failing(9)  # four minibatches per step
    expected = "not finite; step-000002 could not be written: no space; --resume continues from"
    with pytest.raises(FloatingPointError, match=f"{expected} .*step-000000$"):
        run("grpo", small, name="a", save_every=100)


def other_value(f):
    """A valid value of a field that is not its default."""
    of_choice = [choice for choice in choices(f.type) if choice not in (f.default, None)]
    if of_choice:
        return of_choice[0]
    if f.type is bool:
        return not f.default
    texts = {"name": "b", "out_dir": "elsewhere", "device": "meta", "wandb_project": "other"}
    return (texts | {"track": ("wandb",)}).get(f.name) or 1 + (f.default or 0)


@pytest.mark.parametrize("kind", [GrpoConfig, PpoConfig])
def test_what_changes_no_result_may_change_when_a_run_is_resumed(kind):
    config = kind()
    before = json.loads(json.dumps(settings_of(config)))
    free = {f.name for f in fields(kind) if not f.metadata["result"]}
    assert {"device", "tokens_per_micro_batch", "gradient_checkpointing", "loss", "steps"} <= free
    for f in fields(kind):
        if f.name in free:
            check_resumable(replace(config, **{f.name: other_value(f)}), before)
    for name, value in {"learning_rate": 1.0, "seed": 3, "end_tokens": ("#",)}.items():
        with pytest.raises(ValueError, match=f"^{name} must remain .* when a run is resumed"):
            check_resumable(replace(config, **{name: value}), before)


def test_a_run_is_resumed_with_other_settings_of_memory(small):
    small |= {"name": "a", "kl_coef": 0.05}
    run("grpo", small, steps=1)
    other = {"tokens_per_micro_batch": 40, "gradient_checkpointing": True, "device": "cpu"}
    directory = run("grpo", small, steps=2, resume=True, loss="logits", **other).directory
    whole = run("grpo", small, name="whole", steps=2).directory
    one, two = weights(directory), weights(whole)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4


def test_a_run_of_an_earlier_version_is_resumed(small):
    directory = run("grpo", small, name="a", steps=1).directory
    settings = json.loads((directory / "config.json").read_text())
    for name in ("tokens_per_micro_batch", "lora_targets", "truncated", "weights"):
        del settings[name]
    (directory / "config.json").write_text(json.dumps({**settings, "micro_batch": 64}))
    place = ["--resume", "--name", "a", "--out_dir", small["out_dir"], "--steps", "2"]
    train, kind = LOOPS["grpo"]
    with pytest.raises(ValueError, match="truncated must remain 'count'"):
        train(parse(kind, [*place, "--truncated", "mask"]))
    assert train(parse(kind, place)).step == 2
    (directory / "config.json").write_text(json.dumps({**settings, "of_tomorrow": 1}))
    with pytest.raises(ValueError, match=r"does not have: of_tomorrow"):
        train(parse(kind, place))


def test_two_processes_do_not_use_one_directory(small, tmp_path):
    settings = small | {"steps": 100_000, "save_every": 1, "name": "a"}
    process = start_process(tmp_path, settings)
    directory = Path(small["out_dir"]) / "a"
    try:
        wait_for(process, lambda: (directory / "checkpoints" / "step-000001").exists())
        for resume in (True, False):
            with pytest.raises(ValueError, match="a is in use by another run"):
                run("grpo", settings, resume=resume)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    steps = rows(directory)[-1]["step"] + 1
    assert run("grpo", settings, resume=True, steps=steps).step == steps
    assert not (directory / ".lock").exists()


def test_a_run_that_does_not_start_leaves_nothing(small, tmp_path):
    with pytest.raises(ValueError, match="has no function"):
        run("grpo", small, reward="small_rewards:gone", out_dir=str(tmp_path / "x" / "y"))
    assert not (tmp_path / "x").exists()
    assert [run("grpo", small, steps=1).directory.name for _ in range(2)] == ["grpo-1", "grpo-2"]


def test_two_new_runs_at_once_get_different_names(small):
    logs = [run_log.RunLog(LOOPS["grpo"][1](**small), "grpo") for _ in range(2)]
    assert [log.directory.name for log in logs] == ["grpo-1", "grpo-2"]
    for log in logs:
        log.close()
    assert not list(Path(small["out_dir"]).iterdir())


def test_a_run_killed_before_its_first_checkpoint_begins_anew(small, capsys):
    small |= {"warm_start_steps": 2, "value_model": "separate", "keep_checkpoints": 9, "steps": 1}
    directory = run("ppo", small, name="a").directory
    before, of_policy = rows(directory), weights(directory)
    of_values = torch.load(latest(directory / "checkpoints") / "state.pt")["value_head"]
    shutil.rmtree(directory / "checkpoints")
    for name in ("metrics.jsonl", "samples.jsonl"):
        (directory / name).unlink(missing_ok=True)
    assert rows(run("ppo", small, name="a", resume=True).directory) == before
    assert "holds no checkpoint; the run begins anew" in capsys.readouterr().out
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {
        "step-000000",
        "step-000001",
    }
    assert equal(weights(directory), of_policy)
    again = torch.load(latest(directory / "checkpoints") / "state.pt")["value_head"]
    assert equal(again, of_values)


def test_checkpoints_of_another_run_are_not_mixed_with_a_new_one(small):
    directory = run("grpo", small, name="a", steps=1).directory
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"^name: .*a has no config.json, but holds step-000001"):
        run("grpo", small, name="a")


def test_a_run_that_lost_its_log_continues_with_its_weights(small):
    small |= {"value_model": "separate", "steps": 2}
    whole = rows(run("ppo", small, name="whole", steps=3).directory)
    directory = run("ppo", small, name="a").directory
    (directory / "metrics.jsonl").unlink()
    run("ppo", small, name="a", resume=True, steps=3)
    assert rows(directory) == whole[-1:]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(small, loop):
    directory = run(loop, small, name="a", steps=1).directory
    log = (directory / "metrics.jsonl").read_text()
    shutil.rmtree(directory / "checkpoints")
    for kept in (log, log.splitlines(keepends=True)[0]):
        (directory / "metrics.jsonl").write_text(kept)
        with pytest.raises(ValueError, match=r"checkpoints holds no checkpoint, but .*has rows"):
            run(loop, small, name="a", steps=2, resume=True)
        assert (directory / "metrics.jsonl").read_text() == kept


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(small, monkeypatch):
    """Root may read everything, so the system's answer is given in its place."""
    directory = run("grpo", small, name="a", steps=1).directory
    log = (directory / "metrics.jsonl").read_text()
    listdir = os.listdir

    def denied(path):
        if Path(path).name == "checkpoints":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(PermissionError, match=r"Permission denied: .*a/checkpoints"):
        run("grpo", small, name="a", steps=2, resume=True)
    monkeypatch.undo()
    assert (directory / "metrics.jsonl").read_text() == log
    assert (directory / "config.json").exists()


def test_a_full_disk_is_named_and_gets_its_space_back(small, tmp_path):
    """A file of more than 3 MiB cannot be written: first, the optimizer's state of step 1."""
    process = start_process(
        tmp_path, {**small, "save_every": 1, "name": "a"}, limit="ulimit -f 6144"
    )
    process.communicate(timeout=60)
    error = (tmp_path / "stderr.txt").read_text().splitlines()[-1]
    checkpoints = Path(small["out_dir"]) / "a" / "checkpoints"
    assert process.returncode == 2
    assert error == (
        f"error: {checkpoints}/step-000001 could not be written: File too large; "
        f"--resume continues from {checkpoints}/step-000000"
    )
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000"]
    assert (checkpoints.parent / "curves.png").exists()
    assert run("grpo", small, name="a", resume=True).step == 3


def test_a_log_that_cannot_be_written_ends_the_run(small, monkeypatch, capsys):
    def write(log, row):
        if row["step"] == 2:
            log.metrics.unlink()
            log.metrics.symlink_to("/dev/full")
        original(log, row)

    original = run_log.RunLog.write
    monkeypatch.setattr(run_log.RunLog, "write", write)
    monkeypatch.setattr(
        sys, "argv", ["grpo", *(f"--{key}={value}" for key, value in small.items()), "--name=a"]
    )
    with pytest.raises(SystemExit, match="2"):
        main(GrpoConfig, lambda config: LOOPS["grpo"][0](replace(config, save_every=1)))
    directory = Path(small["out_dir"]) / "a"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {directory}/metrics.jsonl could not be written: No space left on device; "
        f"--resume continues from {directory}/checkpoints/step-000001"
    )


def test_curves_that_cannot_be_drawn_do_not_end_a_run(small, monkeypatch, failing, capsys):
    def full(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(run_log, "draw", full)
    assert run("grpo", small, name="a", steps=1).step == 1
    assert "curves.png could not be drawn: OSError: no space left" in capsys.readouterr().out
    failing(1)
    with pytest.raises(FloatingPointError, match="not finite"):
        run("grpo", small, name="b")


def test_the_summary_names_the_step_of_its_reward(small):
    summary = run("grpo", small, reward="small_rewards:interrupts", eval_every=2, steps=50)
    assert summary.step == 3  # the seventh call: two on trial, one at the start, one in step 2
    assert "stopped after step 3" in str(summary)
    assert "0.500 before, 0.500 after 2 steps" in str(summary)
    assert "0.500 before\n" in str(summary._replace(evaluated=0))


def test_a_prompt_longer_than_the_context_is_named(small):
    prompt = "1" * 512
    Path(small["train_file"]).write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    with pytest.raises(
        ValueError,
        match=r"max_prompt_tokens must be below 512, .*; got a prompt of 512 tokens, '1",
    ):
        run("grpo", small)


def test_a_changed_byte_in_a_checkpoint_is_found(small):
    last = latest(run("grpo", small, name="a", steps=1).directory / "checkpoints")
    for damaged in ("model.safetensors", "state.pt", "tokenizer.json"):
        content = (last / damaged).read_bytes()
        middle = len(content) // 2
        changed = bytes([content[middle] ^ 1])
        (last / damaged).write_bytes(content[:middle] + changed + content[middle + 1 :])
        with pytest.raises(ValueError, match=f"step-000001 cannot be read.*{damaged} is damaged"):
            run("grpo", small, name="a", resume=True)
        (last / damaged).unlink()
        with pytest.raises(ValueError, match=f"step-000001 cannot be read.*{damaged} is missing"):
            run("grpo", small, name="a", resume=True)
        (last / damaged).write_bytes(content)
    assert run("grpo", small, name="a", resume=True).step == 3


def test_a_checkpoint_without_checksums_is_resumed_with_a_line(small, capsys):
    last = latest(run("grpo", small, name="a", steps=1).directory / "checkpoints")
    (last / "checksums.json").unlink()
    assert run("grpo", small, name="a", resume=True).step == 3
    assert f"{last} has no checksums; damaged files may go unnoticed" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(small, tmp_path, value):
    model, tokenizer = load(None, "cpu")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"finite weights, .* in 'model.layers.1.mlp.up_proj.wei"):
        run("grpo", small, model=str(tmp_path / "model"))


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(small, monkeypatch):
    def apply(optimizer, config, step):
        norm = original(optimizer, config, step)
        if step == 1:
            optimizer.param_groups[0]["params"][0].data[2, 3] = float("nan")
        return norm

    original = gradients.apply
    monkeypatch.setattr(gradients, "apply", apply)
    with pytest.raises(
        FloatingPointError,
        match=r"^the weights after step 2 .* in 'model.embed_tokens.weight'; .*step-000001$",
    ):
        run("grpo", small, save_every=1, keep_checkpoints=1, minibatches=1)


def test_a_full_memory_ends_in_one_line(monkeypatch, capsys):
    def exhausted(config):
        raise torch.OutOfMemoryError("CUDA out of memory; --resume continues from x")

    monkeypatch.setattr(sys, "argv", ["grpo"])
    with pytest.raises(SystemExit, match="2"):
        main(GrpoConfig, exhausted)
    error = "error: CUDA out of memory; --resume continues from x\n"
    assert capsys.readouterr().err == error


def test_an_old_checkpoint_half_deleted_is_not_taken_for_whole(small, monkeypatch):
    def killed(path, **options):
        if path.name == ".step-000000.partial":
            raise KeyboardInterrupt
        return rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", killed)
    small |= {"name": "a", "save_every": 1, "keep_checkpoints": 1}
    with pytest.raises(KeyboardInterrupt):
        run("grpo", small)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoints = run("grpo", small, resume=True).directory / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-000003"]
