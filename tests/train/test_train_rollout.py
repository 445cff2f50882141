"""Sampling, and the log-probabilities of what was sampled."""

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
from fastrl.train.rollout import completion_mask, generate

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
    settings = {"max_new_tokens": 6, "temperature": 1.0, "group_size": 4} | options
    return generate(model, tokenizer, prompts, **settings)


def test_the_end_token_is_the_last_action():
    ids = torch.tensor([[5, 1, 1, 7], [5, 6, 7, 8], [1, 5, 0, 0], [5, 2, 6, 1]])
    assert completion_mask(ids, [1, 2]).tolist() == [
        [True, True, False, False],
        [True, True, True, True],
        [True, False, False, False],
        [True, True, False, False],
    ]


def test_samples_stop_at_the_end_token_and_are_padded(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rollout, completions = sample(model, tokenizer, group_size=64)
    ended = (rollout.token_ids == tokenizer.eos_token_id).any(1)
    assert ended.any()
    assert not ended.all()
    assert rollout.mask[~ended].all()
    for ids, mask, text in zip(rollout.token_ids, rollout.mask, completions, strict=True):
        n = int(mask.sum())
        assert mask[:n].all()
        assert (ids[n:] == tokenizer.pad_token_id).all()
        assert (ids[: n - 1] != tokenizer.eos_token_id).all()
        assert tokenizer.decode(ids[:n], skip_special_tokens=True) == text


def test_groups_are_consecutive_and_prompts_padded_on_the_left(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rollout, _ = sample(model, tokenizer)
    prompt_ids = rollout.input_ids[:, : -rollout.token_ids.shape[1]]
    texts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    assert texts == [r["prompt"] for r in RECORDS for _ in range(4)]
    assert rollout.attention_mask[:, prompt_ids.shape[1] - 1].all()


def test_greedy_depends_neither_on_padding_nor_on_the_generator(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    state = torch.get_rng_state()
    _, together = sample(model, tokenizer, temperature=None, group_size=1)
    assert torch.equal(state, torch.get_rng_state())
    for record, completion in zip(RECORDS, together, strict=True):
        alone = encode([record], tokenizer, chat_template=False, max_tokens=32)
        assert generate(model, tokenizer, alone, max_new_tokens=6, temperature=None)[1] == [
            completion
        ]


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


def test_samples_follow_the_logprobs_at_the_temperature(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    n = 500
    for temperature in (0.5, 2.0):
        rollout, _ = sample(
            model, tokenizer, group_size=n, max_new_tokens=1, temperature=temperature
        )
        for k in range(len(RECORDS)):
            one = rollout.rows(torch.tensor([k * n]))
            logits = policy_outputs(model, one, GrpoConfig(loss="logits")).logits
            p = (logits[0, 0] / temperature).softmax(-1)
            drawn = rollout.token_ids[k * n : (k + 1) * n, 0]
            seen = torch.bincount(drawn, minlength=len(p)) / n
            assert (seen - p).abs().max() < 4 * (0.25 / n) ** 0.5


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
