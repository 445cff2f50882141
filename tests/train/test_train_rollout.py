"""The log-probabilities of what was sampled, and the loss; sampling has its own tests."""

import pytest
import torch

pytest.importorskip("transformers")

from fastrl import Objective, logits_policy_loss
from fastrl import policy_loss as policy_loss_of_logprobs
from fastrl.train.config import GrpoConfig
from fastrl.train.gradients import normalizer
from fastrl.train.metrics import MetricMeans, explained_variance
from fastrl.train.models import load
from fastrl.train.policy import policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.ppo import token_rewards
from fastrl.train.prompts import encode
from fastrl.train.sampling import make_sampler

RECORDS = [{"prompt": p} for p in ("7 + 5 =", "nine minus three =", "1")]


@pytest.fixture(scope="module")
def model_and_tokenizer():
    torch.manual_seed(3)
    model, tokenizer = load(None, "cpu")
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] += 0.4 * torch.randn(128)
        model.lm_head.weight.mul_(20)  # so that the policy is far from uniform
    return model, tokenizer


def sample(model, tokenizer, **options):
    prompts = encode(RECORDS, tokenizer, chat_template=False, max_tokens=32)
    config = GrpoConfig(**{"max_new_tokens": 6, **options})
    return make_sampler(model, tokenizer, config).sample(prompts, 4)


@pytest.mark.parametrize("route", ["linear", "logits"])
def test_old_logprobs_equal_the_ones_of_the_loss(model_and_tokenizer, route):
    model, tokenizer = model_and_tokenizer
    rollout, _ = sample(model, tokenizer)
    config = GrpoConfig(micro_batch=5, temperature=0.7, loss=route)
    old = rollout_logprobs(model, rollout, config)
    assert not old.requires_grad
    loss = policy_loss(
        policy_outputs(model, rollout, config),
        rollout,
        config,
        torch.randn(len(old)),
        old_logprobs=old,
        objective=Objective.preset("grpo"),
        normalizer=torch.tensor(len(old)),
    )
    for name in ("ratio_mean", "ratio_max", "ratio_min"):
        assert abs(loss.metrics[name].item() - 1) <= 1e-5
    assert loss.metrics["kl_old"].item() <= 1e-8


def test_both_routes_give_the_same_loss_and_gradients(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rollout, _ = sample(model, tokenizer)
    torch.manual_seed(5)
    advantages = torch.randn(len(rollout.mask))
    outcomes = []
    for route in ("linear", "logits"):
        config = GrpoConfig(temperature=0.7, loss=route)
        old = rollout_logprobs(model, rollout, config) + 0.1
        outputs = policy_outputs(model, rollout, config)
        assert (outputs.logits is None) == (route == "linear")
        result = policy_loss(
            outputs,
            rollout,
            config,
            advantages,
            old_logprobs=old,
            ref_logprobs=old,
            objective=Objective.preset("dapo", kl_coef=0.1),
            normalizer=rollout.mask.sum(),
        )
        model.zero_grad()
        result.loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        outcomes.append((*result._replace(loss=result.loss.detach()), grads))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-4, atol=1e-6)


def test_metrics_do_not_depend_on_micro_batches(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rollout, _ = sample(model, tokenizer)
    logits = policy_outputs(model, rollout, GrpoConfig(loss="logits")).logits.detach()
    old = rollout_logprobs(model, rollout, GrpoConfig()) + 0.3 * torch.randn(rollout.mask.shape)
    advantages = torch.randn(len(old))

    def measure(size):
        means = MetricMeans()
        for rows in torch.arange(len(old)).split(size):
            part = rollout.rows(rows)
            means.add(
                logits_policy_loss(
                    logits[rows],
                    part.token_ids,
                    advantages[rows],
                    part.mask,
                    old_logprobs=old[rows],
                ).metrics
            )
        return means.read()

    assert measure(5) == pytest.approx(measure(100), abs=1e-6)


def test_ppo_rewards_the_last_token():
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    penalty = torch.full((3, 3), 0.5)
    assert token_rewards(torch.tensor([1.0, 2.0, 3.0]), penalty, mask).tolist() == [
        [-0.5, 0.5, 0.0],
        [-0.5, -0.5, 1.5],
        [2.5, 0.0, 0.0],
    ]


def test_explained_variance():
    returns, mask = torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.zeros(1, 3), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == -3
    assert explained_variance(returns, torch.ones(1, 3), mask) == 0


@pytest.mark.parametrize("preset", ["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "luspo", "sapo"])
def test_the_normalizer_makes_gradients_of_micro_batches_add_up(preset):
    """Any split gives the gradient of the whole batch, also with empty sequences."""
    lengths = torch.tensor([5, 1, 0, 7, 2, 0, 3, 7])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    old, advantages = torch.randn(8, 7), torch.randn(8)
    objective = GrpoConfig(objective=preset, max_new_tokens=7).policy_objective()

    def gradient(rows_of_parts, denominator):
        logprobs = (old + 0.1).requires_grad_()
        for rows in rows_of_parts:
            policy_loss_of_logprobs(
                logprobs[rows],
                advantages[rows],
                mask[rows],
                old_logprobs=old[rows],
                objective=objective,
                normalizer=denominator,
            ).loss.backward()
        return logprobs.grad

    whole = gradient([torch.arange(8)], None)
    for size in (1, 3, 8):
        denominator = normalizer(mask, objective.aggregation)
        split = gradient(torch.arange(8).split(size), denominator)
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-7)
    assert whole.abs().sum() > 0
