"""A run that has diverged: TRL's weights become NaN; with fastrl it continues, with a warning."""

import types
import warnings

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import batch_of, run

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.rules import objective_of  # noqa: E402
from fastrl.integrations.trl.saturation import (  # noqa: E402
    METRIC,
    SATURATES_AT,
    count_saturated,
    has_ratios,
)
from fastrl.reference.objectives import MAX_LOG_RATIO  # noqa: E402

#: Steps so long that after the first one old and new log-probabilities are far apart.
DIVERGING = {
    "loss_type": "grpo",
    "beta": 0.04,
    "num_iterations": 3,
    "learning_rate": 50.0,
    "max_grad_norm": 0.0,
    "max_steps": 4,
}


def finite(trainer):
    return all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def saturation_warnings(caught):
    return [found for found in caught if "the run has diverged" in str(found.message)]


def test_a_diverged_run_continues_with_a_metric_and_one_warning(tiny_path):
    trainer = make_trainer(tiny_path, **DIVERGING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps, losses, handle = run(trainer, use_fastrl)
    assert handle.fused
    assert len(steps) == DIVERGING["max_steps"]
    assert finite(trainer)
    assert torch.tensor(losses).isfinite().all()
    assert steps[0][METRIC] == 0
    assert all(0 < step[METRIC] <= 1 for step in steps[1:3])
    (found,) = saturation_warnings(caught)
    assert found.category is RuntimeWarning
    assert "beyond 40" in str(found.message)  # the bias-corrected KL is TRL's default
    assert METRIC in str(found.message)


@pytest.mark.parametrize("use", [{}, {"use": lambda t: use_fastrl(t, fused=False)}])
def test_in_trl_the_same_run_makes_the_weights_nan(use, tiny_path):
    trainer = make_trainer(tiny_path, **DIVERGING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            run(trainer, **use)
    assert not finite(trainer)
    assert not saturation_warnings(caught)


def two_completions(trainer, **changes):
    """A batch of two completions of two tokens, for a trainer that begins a step."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return batch_of(torch.tensor([[5, 6, 7, 8]] * 2), 2, **changes)


def trainer_of(beta, corrected, level="token"):
    return types.SimpleNamespace(
        beta=beta,
        importance_sampling_level=level,
        args=types.SimpleNamespace(use_bias_correction_kl=corrected),
    )


@pytest.mark.parametrize(
    ("beta", "corrected", "expected"),
    [(0.0, True, [1, 4]), (0.04, False, [2, 4]), (0.04, True, [4, 4])],
)
def test_count_saturated(beta, corrected, expected):
    assert SATURATES_AT == MAX_LOG_RATIO
    inputs = {
        "completion_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "old_per_token_logps": torch.tensor([[-81.0, -41.0, 0.0, 0.0, -99.0]]),
        "ref_per_token_logps": torch.tensor([[0.0, 0.0, -90.0, -45.0, -99.0]]),
    }
    trainer = trainer_of(beta, corrected)
    assert count_saturated(trainer, inputs, torch.zeros(1, 5)).tolist() == expected
    assert has_ratios(trainer, inputs)
    del inputs["old_per_token_logps"]
    assert has_ratios(trainer, inputs) == (beta > 0)


def test_count_saturated_ratios_of_sequences():
    inputs = {
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "old_per_token_logps": torch.tensor([[-190.0, -90.0, 0.0, -999.0], [-200.0, 0, 0, -999.0]]),
    }
    trainer = trainer_of(0.0, False, "sequence")
    assert count_saturated(trainer, inputs, torch.zeros(2, 4)).tolist() == [3, 6]


def test_a_saturated_ratio_that_trl_can_represent_is_not_compared(tiny_path):
    """Between 80 and 88 TRL's loss is finite but differs from ours."""
    trainer = make_trainer(tiny_path, loss_type="grpo", beta=0.0)
    old = torch.tensor([[-4.0, -4.0], [-89.0, -4.0]])
    inputs = two_completions(trainer, advantages=[1.0, -1.0], old_per_token_logps=old)
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    assert theirs.isfinite()
    use_fastrl(trainer)
    with pytest.warns(RuntimeWarning, match="25.00% of the tokens .*beyond 80"):
        ours = trainer.compute_loss(trainer.model, dict(inputs))
    assert ours.isfinite()
    assert ours < theirs / 2
    assert trainer._metrics["train"][METRIC] == [0.25]


def test_an_adaptive_bonus_of_0_does_not_enter_the_objective(tiny_path):
    """TRL enables the bonus all the same."""
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.0, "beta": 0.0, "loss_type": "grpo"}
    objective = objective_of(make_trainer(tiny_path, **options))
    assert objective.entropy_coef == objective.kl_coef == 0
    assert objective.aggregation == "seq-mean-token-mean"


def test_rloo_that_has_diverged_stays_finite(tiny_path):
    trainer = make_trainer(tiny_path, "RLOO")
    # the ratio of the first is e^290: inf
    old = torch.tensor([-300.0, -8.0])
    inputs = two_completions(trainer, advantages=[-1.0, 1.0], old_logps=old)
    assert not trainer.compute_loss(trainer.model, dict(inputs)).isfinite()
    use_fastrl(trainer)
    with pytest.warns(RuntimeWarning, match=r"50.00% of the tokens"):
        loss = trainer.compute_loss(trainer.model, dict(inputs))
    assert loss.isfinite()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in trainer.model.parameters())
