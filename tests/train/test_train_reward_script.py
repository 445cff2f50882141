"""`docs/train_reward_model.py` trains, and the loops accept what it saves."""

import importlib.util
import random
from pathlib import Path

import pytest

from tests.support.trl_runs import needed

needed("trl")

import torch  # noqa: E402

from fastrl.train.config import GrpoConfig  # noqa: E402
from fastrl.train.reward_model import RewardModel  # noqa: E402

PATH = Path(__file__).parents[2] / "docs" / "train_reward_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_reward_model", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_it_trains_a_reward_model(script, tmp_path, monkeypatch, capsys):
    trainers = []

    class Recorded(script.RewardTrainer):
        def __init__(self, *arguments, train_dataset, **options):
            super().__init__(*arguments, train_dataset=train_dataset, **options)
            trainers.append((self, list(train_dataset)))

    train, held_out = script.split(0)
    monkeypatch.setattr(script, "RewardTrainer", Recorded)
    monkeypatch.setattr(script, "split", lambda seed: (train[:32], held_out[:8]))
    script.main(str(tmp_path / "model"), seed=0, answer_steps=2, steps=2)
    assert "held-out accuracy: 0." in capsys.readouterr().out
    ((trainer, rows),) = trainers
    assert (tmp_path / "model" / "model.safetensors").exists()

    # What it trained on is what the reward model reads: prompt, completion and the end token.
    loaded = RewardModel(str(tmp_path / "model"), torch.device("cpu"), GrpoConfig())
    for kind in ("chosen", "rejected"):
        read = [loaded._encode(row["prompt"], row[kind]) for row in rows]
        assert trainer.train_dataset[f"{kind}_ids"][:] == read
    scores = loaded([""] * 4, ["1", "2", "", "12"], rows[:4])
    assert len(set(scores)) > 1


def test_it_is_short():
    assert len(PATH.read_text().splitlines()) <= 60


def test_the_right_answer_is_never_rejected(script):
    """Each prompt has near numbers, others, and texts that are no number."""
    records, _ = script.split(0)
    made = list(script.pairs(records, random.Random(0)))
    assert len(made) > 7 * len(records)
    assert {row["prompt"] for row in made} == {record["prompt"] for record in records}
    assert all(row["chosen"] != row["rejected"] for row in made)
    assert any(row["rejected"] == "" for row in made)
