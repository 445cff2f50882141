"""TRL's trainers log the same numbers at every step with fastrl and without."""

import itertools
import os

import pytest
import torch

from tests.support.trl_runs import make_trainer, needed, run, save_model

trl = needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.06},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.02},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
ALL = [
    {"loss": loss, "beta": beta, "gradient_accumulation_steps": parts, "num_iterations": times}
    for loss, beta, parts, times in itertools.product(LOSSES, (0.0, 0.04), (1, 4), (1, 2))
]
# every loss with every value of every option; FASTRL_TRL_ALL=1 runs all combinations
SOME = [
    {"loss": loss, "beta": beta, "gradient_accumulation_steps": parts, "num_iterations": times}
    for loss, (beta, parts, times) in itertools.product(LOSSES, [(0.0, 4, 2), (0.04, 1, 2)])
] + [
    {"loss": "grpo", "beta": 0.04, "gradient_accumulation_steps": 4, "num_iterations": 1},
    {"loss": "dapo", "beta": 0.0, "gradient_accumulation_steps": 1, "num_iterations": 1},
]
TIMES = {"step_time", "epoch"}


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


def settings(config):
    chosen = dict(config)
    return {"epsilon": 0.05, **LOSSES[chosen.pop("loss")], **chosen}


def assert_same_numbers(ours, theirs):
    assert len(ours) == len(theirs) == 10
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.keys() - {METRIC} == b.keys()
        assert a.get(METRIC, 0) == 0
        for name in b.keys() - TIMES:
            assert a[name] == pytest.approx(b[name], abs=1e-4, nan_ok=True), (step, name)


def compare(path, tmp_path, kind="GRPO", **options):
    theirs, their_losses, _ = run(make_trainer(path, kind, tmp_path, **options))
    ours, our_losses, handle = run(make_trainer(path, kind, tmp_path, **options), use_fastrl)
    assert_same_numbers(ours, theirs)
    torch.testing.assert_close(our_losses, their_losses, rtol=0, atol=1e-4)
    assert any(entry["grad_norm"] > 1e-3 for entry in ours)
    return handle, ours


def name_of(config):
    return "-".join(str(value) for value in config.values())


@pytest.mark.parametrize("config", ALL if os.environ.get("FASTRL_TRL_ALL") else SOME, ids=name_of)
def test_every_step_logs_the_same_numbers(config, tiny_path, tmp_path):
    handle, steps = compare(tiny_path, tmp_path, **settings(config))
    assert handle.fused
    clipped = [step.get("clip_ratio/region_mean", step.get("cispo_clip_ratio")) for step in steps]
    if config["num_iterations"] == 2 and config["loss"] != "sapo":
        assert max(clipped) > 0
    two_policies = config["num_iterations"] == 2 or config["beta"] > 0
    assert (METRIC in steps[0]) == (handle.fused and two_policies)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_rloo_logs_the_same_numbers(beta, tiny_path, tmp_path):
    options = {"beta": beta, "num_iterations": 2, "learning_rate": 0.02, "epsilon": 0.1}
    handle, _ = compare(tiny_path, tmp_path, "RLOO", **options)
    assert handle.fused


OTHERS = {
    "luspo": ({"loss_type": "luspo"}, True),
    "delta": ({"delta": 1.1}, True),
    "a temperature": ({"temperature": 0.7}, True),
    "masked truncation": ({"mask_truncated_completions": True, "max_completion_length": 9}, True),
    "vespo": ({"loss_type": "vespo"}, False),
    "a low cispo cap": ({"loss_type": "cispo", "epsilon_high": 0.9}, True),
    "a negative beta": ({"beta": -0.01}, False),
    "plain KL": ({"use_bias_correction_kl": False}, True),
    "off-policy mask": ({"off_policy_mask_threshold": 0.01}, True),
    "top entropy": ({"top_entropy_quantile": 0.4}, True),
    "top entropy and a bonus": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.02}, False),
    "GSPO and an off-policy mask": (
        {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.01},
        True,
    ),
    "entropy bonus": ({"entropy_coef": 0.02, "gradient_accumulation_steps": 2}, True),
    "adaptive bonus": (
        {
            "use_adaptive_entropy": True,
            "entropy_target": 3.5,
            "entropy_coef_delta": 0.02,
            "gradient_accumulation_steps": 2,
        },
        True,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_log_the_same_numbers(name, tiny_path, tmp_path):
    options, fused = OTHERS[name]
    options = {"loss_type": "dapo", "epsilon": 0.05, "beta": 0.04, "num_iterations": 2, **options}
    handle, _ = compare(tiny_path, tmp_path, **options)
    assert handle.fused == fused
    assert (handle.reason is None) == fused


@pytest.mark.parametrize("fused", [None, False])
def test_evaluation_logs_the_same_numbers(fused, tiny_path, tmp_path):
    found = []
    for use in (False, True):
        trainer = make_trainer(tiny_path, output_dir=tmp_path, loss_type="dapo", beta=0.04)
        if use:
            use_fastrl(trainer, fused=fused)
        trainer.eval_dataset = trainer.train_dataset
        torch.manual_seed(0)
        values = trainer.evaluate()
        found.append({k: v for k, v in values.items() if "runtime" not in k and "per_sec" not in k})
    assert found[1].pop(f"eval_{METRIC}", 0) == 0
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_the_head_is_not_called_and_undo_restores_the_methods(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, max_steps=2)
    names = ("_compute_loss", "_get_per_token_logps_and_entropies")
    called = []

    def prompt_and_completion():
        return torch.tensor([[0, 5, 6, 7, 8], [9, 10, 11, 12, 0]]), torch.ones(2, 5).long()

    ids, mask = prompt_and_completion()
    mask[0, 0] = mask[1, 4] = 0
    with use_fastrl(trainer) as handle:
        assert all(name in trainer.__dict__ for name in names)
        with torch.no_grad():
            trainer.model.lm_head.register_forward_pre_hook(lambda *_: called.append(1))
            score = trainer._get_per_token_logps_and_entropies
            ours = score(trainer.model, ids, mask, 3, batch_size=1, compute_entropy=True)
        assert called == []
    assert not any(name in trainer.__dict__ for name in names)
    handle.undo()
    with torch.no_grad():
        theirs = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 3, batch_size=1, compute_entropy=True
        )
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert ours[2] is theirs[2] is None
    assert ours[0][1, 2] == ours[1][1, 2] == 0


def test_a_trl_with_another_loss_stops_the_run(tiny_path, tmp_path, monkeypatch):
    own = trl.GRPOTrainer._compute_loss

    def changed(self, model, inputs):
        return own(self, model, inputs) * 2 + 1

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", changed)
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    use_fastrl(trainer)
    with pytest.raises(RuntimeError, match=r"this version of TRL computes .*fused=False"):
        trainer.train()


def test_a_trl_that_calls_its_model_otherwise_stops_the_run(tiny_path, tmp_path, monkeypatch):
    name = "_get_per_token_logps_and_entropies"

    def with_logits(self, model, input_ids, attention_mask, logits_to_keep, **_):
        return model(input_ids=input_ids, attention_mask=attention_mask).logits, None, None

    def without_model(self, *_, **__):
        return torch.zeros(1), None, None

    found = (
        (with_logits, "without `fused_lm_head=True`"),
        (without_model, "calls its model 0 times"),
    )
    for own, sentence in found:
        monkeypatch.setattr(trl.GRPOTrainer, name, signed(own))
        trainer = make_trainer(tiny_path, output_dir=tmp_path)
        use_fastrl(trainer)
        ids = torch.tensor([[3, 4, 5]])
        with pytest.raises(RuntimeError, match=sentence):
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 1)
        monkeypatch.undo()


def signed(function):
    function.__wrapped__ = trl.GRPOTrainer._get_per_token_logps_and_entropies
    return function
