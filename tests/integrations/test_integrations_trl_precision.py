"""In which precision TRL's trainers multiply their LM head."""

import pytest
import torch

from tests.support.trl_runs import make_trainer, needed, run, save_model

needed("trl")
from fastrl.integrations.trl import loss as loss_module  # noqa: E402
from fastrl.integrations.trl import scoring, use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"bf16": True}, torch.bfloat16),
        ({"bf16": True, "cast_lm_head_to_fp32": True}, None),
    ],
)
def test_the_head_is_called_under_the_autocast_of_the_trainer(
    options, expected, tmp_path, monkeypatch
):
    """On a GPU its GEMMs follow; a CPU multiplies in float32 all the same."""
    seen = []

    def watched(function):
        def run(*arguments, **given):
            cast = torch.is_autocast_enabled("cpu")
            seen.append(torch.get_autocast_dtype("cpu") if cast else None)
            return function(*arguments, **given)

        return run

    monkeypatch.setattr(loss_module.fastrl, "linear_policy_loss", watched(
        loss_module.fastrl.linear_policy_loss
    ))  # fmt: skip
    monkeypatch.setattr(scoring, "linear_token_stats", watched(scoring.linear_token_stats))
    path = save_model(tmp_path / "model")
    trainer = make_trainer(path, output_dir=tmp_path, max_steps=1, beta=0.04, **options)
    run(trainer, use_fastrl)
    assert len(seen) >= 2  # the reference's log-probabilities, and the loss
    assert set(seen) == {expected}
