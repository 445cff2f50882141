"""TensorBoard and W&B have what metrics.jsonl has, and never stop a run or hold it up."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from fastrl.train import extras
from fastrl.train.config import GrpoConfig
from fastrl.train.run import weights_and_biases
from fastrl.train.run.trackers import TensorBoard, Trackers
from tests.support.train_runs import on_terminal, run, weights

KEY = "0123456789abcdef" * 2 + "deadbeef"


def logged(directory):
    return list(map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()))


def scalars(directory):
    """The values in the event files, by tag, as pairs of step and value."""
    stored = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in stored.Scalars(tag)]
        for tag in stored.Tags()["scalars"]
    }


def expected(rows):
    """What `scalars` returns for the rows of a log."""
    tags = dict.fromkeys(key for row in rows for key in row if key != "step")
    return {
        tag: [(row["step"], pytest.approx(row[tag])) for row in rows if tag in row] for tag in tags
    }


def test_tensorboard_has_the_rows_of_the_log_also_after_a_cut(small):
    small |= {"name": "a", "save_every": 1, "keep_checkpoints": 9, "track": ("tensorboard",)}
    directory = run("grpo", small).directory
    assert scalars(directory) == expected(logged(directory))
    shutil.rmtree(directory / "checkpoints" / "step-000003")
    shutil.rmtree(directory / "checkpoints" / "step-000002")
    run("grpo", small, resume=True, steps=4)
    assert [row["step"] for row in logged(directory)] == [0, 1, 2, 3, 4]
    assert scalars(directory) == expected(logged(directory))
    plain = run("grpo", small, name="plain", track=(), steps=4).directory
    one, two = weights(directory), weights(plain)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_tensorboard_gets_the_rows_that_it_lacks(tmp_path):
    rows = [{"step": step, "reward": step / 8} for step in range(4)]
    TensorBoard(tmp_path, rows[:1]).close(failed=False)
    without = TensorBoard(tmp_path, rows[:3])  # step 1 was not tracked
    without.write(rows[3])
    without.close(failed=True)
    assert scalars(tmp_path) == expected(rows[:4])
    TensorBoard(tmp_path, [rows[0], rows[1], {"step": 2, "reward": 9.0}]).close(failed=False)
    assert scalars(tmp_path)["reward"] == [(0, 0.0), (1, 0.125), (2, 9.0)]


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(small, monkeypatch, capsys):
    def full(writer, key, value, step):
        if step == 2:
            raise OSError("no space left")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    summary = run("grpo", small, steps=4, track=("tensorboard",))
    assert summary.step == 4
    assert [row["step"] for row in logged(summary.directory)] == [0, 1, 2, 3, 4]
    said = [line for line in capsys.readouterr().out.splitlines() if "track tensorboard" in line]
    assert said == [
        "track tensorboard: OSError: no space left; the run continues without it, metrics.jsonl "
        "has every row"
    ]


def records(data):
    """The records of a file of W&B: a header of 7 bytes, then a log as LevelDB writes it."""
    at, record = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def rows_of_offline_runs(directory):
    """The rows that W&B recorded, by its runs."""
    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        stored = map(wandb_internal_pb2.Record.FromString, records(path.read_bytes()))
        found.append(
            [
                {
                    name: json.loads(item.value_json)
                    for item in record.history.item
                    if not (name := item.key or item.nested_key[0]).startswith("_")
                }
                for record in stored
                if record.WhichOneof("record_type") == "history"
            ]
        )
    return found


def test_wandb_without_a_network_records_offline_and_tells_nothing_secret(
    small, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("SOME_SECRET", "correct-horse-battery")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(weights_and_biases, "START_SECONDS", 1.0)
    small |= {"name": "a", "steps": 1, "track": ("wandb", "tensorboard")}
    directory = run("grpo", small).directory
    name = (directory / "wandb-run-id").read_text()
    said = capsys.readouterr().out
    assert "track wandb: W&B cannot be reached (CommError: " in said
    assert f"upload it with wandb sync {directory}/wandb/offline-run-" in said
    run("grpo", small, steps=2, resume=True)
    assert (directory / "wandb-run-id").read_text() == name
    rows = logged(directory)
    assert rows_of_offline_runs(directory) == [rows[:2], rows]
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert any(path.name == "debug-internal.log" for path in files)
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content, path
        assert b"correct-horse-battery" not in content, path
        assert b"WANDB_API_KEY" not in content or "wandb/" in str(path), path


def test_wandb_without_a_key_never_asks_for_one(small, tmp_path):
    settings = {**small, "name": "a", "steps": 1, "group_size": 4, "track": ["wandb"]}
    status, shown, _ = on_terminal(tmp_path, settings, HOME=str(tmp_path), TERM="xterm")
    assert status == 0, shown
    assert b"No API key configured" in shown
    assert b"the run is recorded offline" in shown
    assert len(rows_of_offline_runs(tmp_path / "runs" / "a")) == 1


@pytest.fixture
def server(monkeypatch):
    """W&B as it looks to a run: what was begun and sent."""
    seen = SimpleNamespace(begun=[], sent=[], ended=[], first=0, finish=lambda: None)

    def finish(exit_code):
        seen.ended.append(exit_code)
        seen.finish()

    def init(**options):
        seen.begun.append(options)
        return SimpleNamespace(
            starting_step=seen.first,
            offline=False,
            dir="runs/a/wandb/run-1/files",
            log=lambda row, step: seen.sent.append((step, row)),
            finish=finish,
        )

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return seen


def test_a_resumed_run_continues_at_wandb_without_a_repeated_step(small, server):
    small |= {"name": "a", "track": ("wandb",), "steps": 2, "wandb_project": "mine"}
    directory = run("grpo", small).directory
    server.first = 2  # step 2 did not arrive
    run("grpo", small, steps=4, resume=True)
    assert [(step, row["step"]) for step, row in server.sent] == [(i, i) for i in range(3)] + [
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    assert [row for _, row in server.sent[3:]] == logged(directory)[2:]
    one, two = server.begun
    assert one["id"] == two["id"] != ""
    assert (one["project"], one["name"], one["resume"], one["mode"]) == (
        "mine",
        "a",
        "allow",
        "online",
    )
    assert one["config"] == json.loads((directory / "config.json").read_text()) | {"steps": 2}
    sent_too = one["settings"]
    assert (sent_too.save_code, sent_too.console) == (False, "off")
    assert sent_too.disable_code
    assert sent_too.disable_git
    assert sent_too.x_disable_meta
    assert server.ended == [0, 0]


def test_a_run_that_fails_is_a_failed_run_at_wandb(small, server):
    with pytest.raises(ValueError, match="must be finite"):
        run("grpo", small, track=("wandb",), reward="small_rewards:fails_later", steps=20)
    assert server.ended == [1]


def test_an_upload_that_does_not_end_is_given_up(server, tmp_path, monkeypatch):
    said = []

    def late():
        raise TimeoutError

    server.finish = late
    trackers = Trackers(GrpoConfig(track=("wandb",)), tmp_path, said.append)
    trackers.write([{"step": 0, "reward": 0.5}])
    trackers.close(failed=False)
    assert said == [
        "track wandb: not everything was uploaded within 60 s; upload the rest with wandb sync "
        "runs/a/wandb/run-1"
    ]
    assert server.begun[0]["settings"].finish_timeout == 60
    assert server.begun[0]["settings"].finish_timeout_raises


def test_a_missing_package_is_named_before_any_work(small, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"track wandb needs wandb; .* 'fastrl-kernels\[wandb\]'"):
        run("grpo", small, track=("wandb",))
    assert not Path(small["out_dir"]).exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"track": ("mlflow",)}, "track must be any of tensorboard, wandb, got 'mlflow'"),
        ({"track": ("wandb", "wandb")}, "track must name each tracker once, got wandb wandb"),
        ({"wandb_project": " "}, "wandb_project must be a name, got ' '"),
        ({"sample_every": -1}, "sample_every must be at least 0, got -1"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        GrpoConfig(**given)
