"""The loss and the log-probabilities of what was sampled, and what surrounds them."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from fastrl import Objective
from fastrl import policy_loss as policy_loss_of_logprobs
from fastrl.train.advantages import token_rewards
from fastrl.train.config import GrpoConfig
from fastrl.train.data.prompts import Prompt
from fastrl.train.distributed import ranks
from fastrl.train.gradients import apply, minibatches, normalizer
from fastrl.train.groups import SampledGroups
from fastrl.train.metrics import MetricMeans, explained_variance, lengths, sampler_kl
from fastrl.train.model.loading import load
from fastrl.train.model.recomputation import save_memory
from fastrl.train.packing import micro_batches
from fastrl.train.policy import batches, policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.rewards import Scored
from fastrl.train.rollout import Rollout, concatenate
from fastrl.train.sampling import TokenCount
from tests.support.train_runs import LOOPS, run

LENGTHS = (6, 1, 4, 2, 6, 3)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model, _ = load(None, "cpu")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that the policy is far from uniform
    save_memory(model, GrpoConfig())
    return model


@pytest.fixture
def rollout(model):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(3, 90, (6, 6), generator=generator)
    mask = torch.arange(6) < lengths[:, None]
    made = Rollout(
        prompts=[[5, 6, 7], [8], [9, 10, 11, 12]],
        prompt_of=torch.tensor([0, 0, 1, 1, 2, 2]),
        token_ids=ids,
        mask=mask,
        logprobs=torch.zeros(6, 6),
        truncated=lengths == 6,
    )
    logprobs = rollout_logprobs(model, made, torch.arange(6), GrpoConfig())
    return made._replace(logprobs=logprobs)


def learn(model, rollout, config, objective, **options):
    """Gradients and means of the metrics over micro-batches."""
    model.zero_grad()
    means = MetricMeans()
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, 1.0])
    old = options.get("old")
    for batch in batches(rollout, torch.arange(6), rollout.mask, config):
        outputs = policy_outputs(model, batch, config)
        assert (outputs.logits is None) == (config.loss == "linear")
        result = policy_loss(
            outputs,
            batch,
            config,
            advantages[batch.rows],
            old_logprobs=None if old is None else batch.take(old),
            ref_logprobs=batch.take(options["ref"]) if "ref" in options else None,
            objective=objective,
            normalizer=normalizer(rollout.mask, objective.aggregation),
        )
        result.loss.backward()
        means.add(result.metrics, sampler_kl(result.logprobs, batch.take(rollout.logprobs)), batch)
    return [p.grad.clone() for p in model.parameters()], means.read()


@pytest.mark.parametrize("route", ["linear", "logits"])
def test_old_logprobs_equal_the_ones_of_the_loss(model, rollout, route):
    config = GrpoConfig(tokens_per_micro_batch=15, temperature=0.7, loss=route)
    old = rollout_logprobs(model, rollout, torch.arange(6), config)
    assert not old.requires_grad
    _, metrics = learn(model, rollout, config, Objective.preset("grpo"), old=old)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl_old"] <= 1e-8


def test_both_routes_give_the_same_gradients_and_metrics(model, rollout):
    objective = Objective.preset("dapo", kl_coef=0.1)
    outcomes = []
    for route in ("linear", "logits"):
        config = GrpoConfig(temperature=0.7, loss=route)
        old = rollout_logprobs(model, rollout, torch.arange(6), config) + 0.1
        outcomes.append(learn(model, rollout, config, objective, old=old, ref=old))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-4, atol=1e-6)
    assert outcomes[0][1] == pytest.approx(outcomes[1][1], rel=1e-4, abs=1e-6)


def test_metrics_do_not_depend_on_micro_batches(model, rollout):
    old = rollout.logprobs + 0.3 * torch.randn(rollout.mask.shape)
    objective = Objective.preset("grpo")
    measured = [
        learn(model, rollout, GrpoConfig(tokens_per_micro_batch=n), objective, old=old)[1]
        for n in (1, 12, 1000)
    ]
    assert measured[0] == pytest.approx(measured[2], rel=1e-5, abs=1e-7)
    assert measured[1] == pytest.approx(measured[2], rel=1e-5, abs=1e-7)
    assert measured[0]["learned_tokens"] == 3 + 3 + 1 + 1 + 4 + 4 + sum(LENGTHS) - 6
    assert measured[0]["kl_sampler"] == pytest.approx(0, abs=1e-8)


def test_means_of_nothing_are_absent():
    means = MetricMeans()
    assert means.read() == {"learned_tokens": 0.0}
    repeated = SimpleNamespace(input_ids=torch.ones(1, 3), repeated=True)
    means.add(
        {"kl": torch.tensor(1.0), "active_tokens": torch.tensor(2.0)}, torch.ones(()), repeated
    )
    assert means.read() == {"learned_tokens": 0.0}


def test_the_kl_of_the_sampler():
    of_policy, of_sampler = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
    expected = (torch.tensor(0.5).exp() - 1 - 0.5) / 2
    assert sampler_kl(of_policy, of_sampler) == pytest.approx(float(expected))


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
    assert explained_variance(returns - 5, returns, mask) == 1  # a constant error is no variance
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


def test_minibatches_are_of_whole_groups():
    config = GrpoConfig(prompts_per_step=7, group_size=3, minibatches=2, epochs=2)
    made = list(minibatches(21, config, 3))
    assert [len(rows) for rows in made] == [12, 9, 12, 9]
    assert sorted(torch.cat(made[:2]).tolist()) == list(range(21))
    assert all(
        torch.equal(rows.view(-1, 3) // 3, rows[::3, None].expand(-1, 3) // 3) for rows in made
    )


def test_a_minibatch_in_which_all_is_left_out_is_a_step_of_gradient_zero():
    weight, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    config = GrpoConfig(learning_rate=0.1, warmup_steps=0)
    optimizers = [torch.optim.AdamW([w], weight_decay=0.1) for w in (weight, other)]
    for step, gradient in enumerate((1.0, 0.0, 2.0)):
        other.grad = torch.full((2,), gradient)
        weight.grad = other.grad.clone() if gradient else None
        for optimizer in optimizers:
            apply(optimizer, config, step)
        assert weight.grad is None  # the next step begins with none
    assert torch.equal(weight, other)


@pytest.mark.parametrize("count", [3, 9])
def test_ranks_pack_each_completion_once_and_keep_step(rollout, count):
    rows = torch.arange(6)
    made = [
        list(micro_batches(rollout, rows, rollout.mask, tokens=10, rank=rank, ranks=count))
        for rank in range(count)
    ]
    counted = [batch for share in made for batch in share if not batch.repeated]
    assert torch.equal(torch.cat([batch.rows for batch in counted]).sort().values, rows)
    assert len({len(share) for share in made}) == 1
    repeats = [[batch.repeated for batch in share] for share in made]
    assert any(map(any, repeats))
    assert all(of_rank == sorted(of_rank) for of_rank in repeats)  # the own ones come first
    for share in made:
        assert [batch.last for batch in share] == [False] * (len(share) - 1) + [True]


def test_a_row_that_one_of_two_ranks_repeats_counts_once(model, rollout, monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(ranks, "add_up", lambda logprobs: logprobs)
    summed = torch.zeros_like(rollout.logprobs)
    for rank in range(2):
        monkeypatch.setattr(ranks, "index", lambda rank=rank: rank)
        summed += rollout_logprobs(model, rollout, torch.tensor([2]), GrpoConfig())
    torch.testing.assert_close(summed[2], rollout.logprobs[2])


@pytest.mark.parametrize("loop", LOOPS)
def test_an_update_is_over_the_counted_tokens_of_its_minibatch(small, loop, monkeypatch):
    """And with several updates the first log-probabilities are those of before."""
    module = sys.modules[LOOPS[loop][0].__module__]
    masks, old = [], []

    def spied(mask, aggregation):
        masks.append(mask)
        return normalizer(mask, aggregation)

    def loss(*arguments, **options):
        old.append(options["old_logprobs"])
        return policy_loss(*arguments, **options)

    monkeypatch.setattr(module, "normalizer", spied)
    monkeypatch.setattr(module, "policy_loss", loss)
    run(loop, small, name="a", steps=1, minibatches=2, truncated="mask")
    assert len(masks) == 2
    assert len({len(mask) for mask in masks}) == 1
    assert sum(len(mask) for mask in masks) == {"grpo": 64, "ppo": 16}[loop]
    assert any((~mask.any(1)).any() for mask in masks)
    assert all(logprobs is not None for logprobs in old)


@pytest.mark.parametrize("gradient", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_no_weight(gradient):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, gradient])
    optimizer = torch.optim.AdamW([weight])
    with pytest.raises(FloatingPointError, match="gradients of step 3 are not finite"):
        apply(optimizer, GrpoConfig(), 2)
    assert torch.equal(weight, torch.ones(2))


class TestSampledGroups:
    TRAIN = [Prompt({"prompt": str(i)}, [i]) for i in range(20)]  # noqa: RUF012

    def round(self, sampled, step, rewards):
        prompts = sampled.prompts(self.TRAIN, step)
        count = 2 * len(prompts)
        shape = (count, 3)
        rollout = Rollout(
            prompts=[p.token_ids for p in prompts],
            prompt_of=torch.arange(count) // 2,
            token_ids=torch.ones(shape, dtype=torch.long),
            mask=torch.ones(shape, dtype=torch.bool),
            logprobs=torch.zeros(shape),
            truncated=torch.zeros(count, dtype=torch.bool),
        )
        total = torch.tensor(rewards[:count])
        scored = Scored(total, {"double": 2 * total}, total == 7)
        sampled.add(rollout, scored, TokenCount(8, 9))
        return [p.token_ids[0] for p in prompts]

    def test_one_round_keeps_everything(self):
        sampled = SampledGroups(GrpoConfig(prompts_per_step=4, group_size=2))
        self.round(sampled, 0, [0.0] * 8)
        assert sampled.missing == 0
        assert torch.equal(sampled.batch()[1].total, torch.zeros(8))

    def test_groups_without_information_are_replaced(self):
        config = GrpoConfig(prompts_per_step=4, group_size=2, dynamic_sampling=True)
        sampled = SampledGroups(config)
        first = self.round(sampled, 0, [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
        assert (len(first), sampled.missing) == (4, 2)
        second = self.round(sampled, 0, [1.0, 1.0, 0.0, 2.0])
        assert second != first[:2]  # from another order
        third = self.round(sampled, 0, [3.0, 0.0])
        assert (len(second), len(third), sampled.missing) == (2, 1, 0)
        rollout, scored = sampled.batch()
        assert scored.total.tolist() == [0, 1, 1, 0, 0, 2, 3, 0]
        assert torch.equal(scored.parts["double"], 2 * scored.total)
        kept = [rollout.prompts[i][0] for i in rollout.prompt_of.tolist()]
        assert kept[::2] == [first[0], first[3], second[1], third[0]]
        again = SampledGroups(config)
        assert [p.token_ids[0] for p in again.prompts(self.TRAIN, 0)] == first

    def test_the_last_round_leaves_groups_without_information(self):
        config = GrpoConfig(
            prompts_per_step=4, group_size=2, dynamic_sampling=True, max_sampling_rounds=2
        )
        sampled = SampledGroups(config)
        self.round(sampled, 1, [7.0, 7.0] + [5.0] * 6)
        self.round(sampled, 1, [0.0, 1.0] + [7.0] * 6)
        assert sampled.missing == 0
        rollout, scored = sampled.batch()
        assert scored.total.tolist() == [0, 1, 7, 7, 5, 5, 5, 5]
        assert sampled.failures == 8  # of both rounds, also where no row is left of them
        assert len(rollout.mask) == 8
        assert lengths(rollout, sampled.tokens) == {
            "tokens": 24,
            "length": 3,
            "truncated": 0,
            "real_tokens": 16,
            "padded_tokens": 18,
        }


def test_rollouts_of_different_lengths_are_joined(rollout):
    short = rollout.rows(torch.tensor([1, 3]))
    short = short._replace(
        token_ids=short.token_ids[:, :2], mask=short.mask[:, :2], logprobs=short.logprobs[:, :2]
    )
    joined = concatenate([short, rollout])
    assert joined.prompt_of.tolist() == [0, 1, 3, 3, 4, 4, 5, 5]
    assert joined.mask.sum(1).tolist() == [1, 2, *LENGTHS]
    assert joined.prompts[3:] == rollout.prompts


def test_truncated_completions_can_be_masked(rollout):
    assert torch.equal(rollout.counted("count"), rollout.mask)
    assert rollout.counted("mask").any(1).tolist() == [n < 6 for n in LENGTHS]
