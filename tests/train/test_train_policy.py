"""The gradients of a step are the reference's on plain models; its parts, by hand."""

import copy
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from fastrl import (
    RolloutCorrection,
    TopKLogprobs,
    discounted_returns,
    gae,
    group_advantages,
    logits_policy_loss,
    masked_mean,
    token_stats,
    whiten,
)
from fastrl.integrations.transformers import backbone
from fastrl.train import optimizers
from fastrl.train.advantages import KlPenalty
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.groups import SampledGroups
from fastrl.train.metrics import MetricMeans, explained_variance
from fastrl.train.prompts import Prompt
from fastrl.train.rewards import Scored
from fastrl.train.rollout import Completion, concatenate, rollout_of
from fastrl.train.run import TrainingRun
from fastrl.train.sampling import Sampler
from fastrl.train.second_models import ValueModel
from tests.train.packed import assert_equal, make_model, padded, plain
from tests.train.runs import LOOPS, rows, run

REFERENCE = {"backend": "reference"}
STEPS = {"steps": 2, "max_new_tokens": 5, "learning_rate": 3e-3, "warmup_steps": 0}
STEPS |= {"eval_every": 9, "tokens_per_micro_batch": 60, "clip_low": 0.02, "group_size": 4}
STEPS |= {"schedule": "constant", "prompts_per_step": 6}
STEPS |= {"stop": tuple("abcdefghijklmnopqrstuvwxyz")}  # a quarter of all tokens
CENTERED = {"score_centering": 6, "minibatches": 1, "temperature": 1.3}
REINFORCE = {**CENTERED, "objective": "reinforce", "clip_low": None}
CASES = [
    ("grpo", {"objective": "dapo", "truncated": "mask", "rollout_correction": "truncate"}),
    ("grpo", {"kl_coef": 0.3, "epochs": 2, "minibatches": 1, "temperature": 0.7, "loss": "logits"}),
    ("grpo", {"objective": "dr_grpo", "minibatches": 1}),
    ("ppo", {"kl_coef": 0.3, "gamma": 0.9, "lam": 0.7, "truncated": "mask", "entropy_coef": 0.1}),
    ("ppo", {"value_model": "separate", "advantage": "value", "rollout_correction": "truncate"}),
    ("ppo", {"advantage": "group", "temperature": 0.7, "epochs": 2}),
    ("ppo", {"advantage": "reward", "gamma": 0.5, "kl_coef": 0.3}),
    ("ppo", {"loss": "logits", "steps": 1}),
    ("grpo", {**REINFORCE, "rollout_correction": "none"}),
    ("grpo", {**REINFORCE, "rollout_correction": "truncate"}),
    ("grpo", {**CENTERED, "objective": "dapo", "rollout_correction": "mask", "loss": "logits"}),
    ("ppo", {**CENTERED, "rollout_correction": "truncate"}),
]


def watch(monkeypatch, loop):
    """Record what a run learns from, and the models and gradients of its updates."""
    module = sys.modules[LOOPS[loop][0].__module__]
    seen = SimpleNamespace(rollouts=[], rewards=[], minibatches=[], updates=[], critic=None)
    right = SimpleNamespace(**vars(module), sample=Sampler.sample, apply=optimizers.apply)

    def critic(*arguments):
        seen.critic = ValueModel(*arguments)
        return seen.critic

    def minibatches(*arguments, **options):
        for minibatch in right.minibatches(*arguments, **options):
            seen.minibatches.append(minibatch)
            yield minibatch

    def sample(self, *arguments):
        rollout, texts = right.sample(self, *arguments)
        seen.model = self._model
        mask = rollout.mask.clone()
        mask[::2, 1] &= rollout.mask[::2].sum(1) < 3  # the others' second token is of a tool
        noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
        logprobs = (rollout.logprobs + 0.7 * noise).where(mask, 0.0)  # not quite the policy's
        top = rollout.top_logprobs
        top = top and top._replace(logprobs=top.logprobs - 0.5 * noise.abs()[..., None])
        changed = {"mask": mask, "logprobs": logprobs, "top_logprobs": top}
        seen.rollouts.append(rollout._replace(**changed))
        return seen.rollouts[-1], texts

    def apply(optimizer, config, step):
        trained = optimizer.param_groups[0]["params"]
        gradients = [torch.zeros(1), *(p.grad.clone() for p in trained)]
        seen.updates.append((step, plain(seen.model), copy.deepcopy(seen.critic), gradients))
        return right.apply(optimizer, config, step)

    if loop == "ppo":
        monkeypatch.setattr(module, "ValueModel", critic)
    monkeypatch.setattr(module, "minibatches", minibatches)
    monkeypatch.setattr(Sampler, "sample", sample)
    monkeypatch.setattr(optimizers, "apply", apply)
    monkeypatch.setattr(TrainingRun, "show", lambda *a: seen.rewards.append(a[3].total))
    return seen


def outputs(model, critic, rollout):
    """Logits and values of plain sequences, and the parameters that they have gradients for."""
    model, critic = copy.deepcopy(model), copy.deepcopy(critic)
    logits, states = padded(model, rollout)
    if critic is None:
        return logits, None, [*model.parameters()]
    trained = [*model.parameters(), *critic.inner.parameters(), *critic.outer.parameters()]
    if critic.backbone is not None:
        own = copy.deepcopy(model)
        backbone(own).load_state_dict(critic.backbone.state_dict())
        _, states = padded(own, rollout)
        trained += backbone(own).parameters()
    return logits, critic.outer(torch.relu(critic.inner(states)))[..., 0].double(), trained


def estimates(config, rewards, kl, values, mask, counted):
    """PPO's advantages and returns; a sequence's reward is at its last token."""
    per_token = -config.kl_coef * kl.where(mask, 0.0)
    last = [int(tokens.nonzero()[-1]) for tokens in mask]
    per_token[torch.arange(len(last)), last] += rewards
    if values is None:
        return discounted_returns(per_token, mask, gamma=config.gamma, **REFERENCE), None
    given = {"gamma": config.gamma, "lam": config.lam if config.advantage == "gae" else 1.0}
    advantages, returns = gae(per_token, values, mask, **given, **REFERENCE)
    return whiten(advantages, counted), returns


def expected(config, seen, i):
    """Gradients of update ``i`` by the reference; ratio, sampler KL and entropy of its tokens."""
    step, model, critic, _ = seen.updates[i]
    first = next(update for update in seen.updates if update[0] == step)
    rollout, rewards = seen.rollouts[step], seen.rewards[step].double()
    mask, of_sampler, chosen = rollout.mask, rollout.logprobs.double(), seen.minibatches[i]
    counted = mask & ~rollout.truncated[:, None] if config.truncated == "mask" else mask

    def stats(logits):
        return token_stats(logits, rollout.token_ids, temperature=config.temperature, **REFERENCE)

    with torch.no_grad():
        logits, old_values, _ = outputs(*first[1:3], rollout)
        old, ref = stats(logits)[0], stats(outputs(*seen.updates[0][1:3], rollout)[0])[0]
    logits, values, trained = outputs(model, critic, rollout)
    logprobs, entropy = stats(logits.detach())[:2]
    scale = "none" if getattr(config, "objective", "") == "dr_grpo" else "group"
    compared = group_advantages(rewards, group_size=4, scale=scale, **REFERENCE).advantages
    objective, learned = config.policy_objective(), counted
    given = {"token_ids": rollout.token_ids, "advantages": compared, "mask": counted}
    if config.loop == "ppo":
        rewards = compared if config.advantage == "group" else rewards
        estimated = estimates(config, rewards, old - ref, old_values, mask, counted)
        given["advantages"], returns = estimated
    elif config.kl_coef:
        given["ref_logprobs"] = ref
    else:
        learned = counted & (compared != 0)[:, None]
    if config.rollout_correction in ("truncate", "mask"):
        correction = RolloutCorrection(kind=config.rollout_correction, level="token", high=2.0)
        objective = replace(objective, rollout_correction=correction)
        given["rollout_logprobs"] = of_sampler
    given = {name: value[chosen] for name, value in given.items()}
    if config.score_centering is None:
        given["old_logprobs"] = old[chosen]
    else:  # the ratio is 1
        given["rollout_top_k"] = TopKLogprobs(*(x[chosen] for x in rollout.top_logprobs))
        old = logprobs
    settings = {"temperature": config.temperature, "objective": objective, **REFERENCE}
    loss = logits_policy_loss(logits[chosen], **given, **settings).loss
    if critic is not None:
        near = old_values + (values - old_values).clamp(-0.2, 0.2)
        error = torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
        loss = loss + 0.5 * masked_mean(error[chosen], counted[chosen])
    loss.backward()
    to_sampler = old - of_sampler
    measured = (logprobs - old).exp(), to_sampler.exp() - 1 - to_sampler, entropy
    tokens = torch.stack(measured)[:, chosen][:, learned[chosen]]
    return [torch.zeros(1), *(p.grad for p in trained)], tokens


@pytest.mark.parametrize(("loop", "changes"), CASES, ids=str)
def test_gradients_of_a_run_are_those_of_padded_sequences(small, monkeypatch, loop, changes):
    seen = watch(monkeypatch, loop)
    settings = {"minibatches": 2, **STEPS, **changes}
    logged = rows(run(loop, small, **settings).directory)[-1]
    config = LOOPS[loop][1](**{**small, **settings})
    assert len(seen.updates) == config.steps * config.epochs * config.minibatches
    of_last = []
    for i, (step, *_, gradients) in enumerate(seen.updates):
        truth, tokens = expected(config, seen, i)
        assert_equal(truth, gradients, 2e-5)
        of_last += [tokens] if step == config.steps - 1 else []
    ratio, kl, entropy = torch.cat(of_last, 1)
    assert logged["clip_fraction"] > 0 or config.epochs * config.minibatches == 1
    assert 0 < logged["truncated"] < 1
    measured = [logged[name] for name in ("ratio_mean", "ratio_max", "kl_sampler", "entropy")]
    exact = [ratio.mean(), ratio.max(), kl.mean(), entropy.mean()]
    assert measured == pytest.approx([float(value) for value in exact], rel=1e-4)


def test_the_coefficient_of_the_penalty_moves_towards_its_target():
    cases = ((0.02, 5000, 1), (0.021, 5000, 1.025), (1.0, 5000, 1.1), (0.0, 20000, 0.8))
    for kl, completions, factor in cases:
        for target, moved in ((0.02, factor), (None, 1)):
            penalty = KlPenalty(PpoConfig(kl_coef=0.1, kl_target=target))
            penalty.update(kl, completions)
            assert penalty.coefficient == pytest.approx(0.1 * moved)


def test_the_kl_of_a_minibatch_is_weighted_by_tokens():
    metrics, batch = MetricMeans(), SimpleNamespace(input_ids=torch.zeros(1, 3))
    assert metrics.read() == {"learned_tokens": 0.0}
    for kl, tokens in ((5.0, 1), (0.3, 1), (0.1, 3)):
        if kl == 0.3:
            metrics.begin_minibatch()
        seen = {"kl_old": kl, "ratio_max": kl, "active_tokens": tokens}
        seen = {name: torch.tensor(float(value)) for name, value in seen.items()}
        metrics.add(seen, torch.tensor(0.0), batch)
    assert metrics.minibatch_kl() == pytest.approx(0.15)
    metrics.begin_minibatch()
    assert metrics.minibatch_kl() == 0
    means = {"kl_old": 5.6 / 5, "kl_sampler": 0, "ratio_max": 5, "learned_tokens": 9}
    assert metrics.read() == pytest.approx(means)


def test_explained_variance():
    returns, mask = torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(-returns, returns, mask) == -3
    assert explained_variance(returns - 5, returns, mask) == 1  # a constant is no variance
    assert explained_variance(returns, torch.ones(1, 3) * 0.1, mask) == 0


def test_groups_without_information_are_replaced_until_the_last_round():
    train = [Prompt({"prompt": str(i)}, [i]) for i in range(20)]
    one = Completion(torch.ones(3).long(), torch.zeros(3), ended=False)
    sampled = SampledGroups(GrpoConfig(prompts_per_step=4, group_size=2, sampling_rounds=3))
    asked = []
    for rewards in ([0, 1, 7, 7, 0, 0, 1, 0], [1, 1, 7, 2], [3, 3]):
        prompts, total = sampled.prompts(train, 0), torch.tensor(rewards).float()
        asked.append([prompt.token_ids[0] for prompt in prompts])
        assert len(prompts) == len(rewards) // 2 == sampled.missing
        scored = Scored(total, total, {"double": 2 * total}, total == 7)
        sampled.add(rollout_of(prompts, [one] * len(total), torch.device("cpu")), scored)
    assert sampled.missing == 0
    assert asked[1] != asked[0][:2]  # from another order
    rollout, scored = sampled.batch()
    assert scored.total.tolist() == [0, 1, 1, 0, 7, 2, 7, 7]
    assert torch.equal(scored.parts["double"], 2 * scored.total)
    kept = [rollout.prompts[i][0] for i in rollout.prompt_of.tolist()]
    assert kept[::2] == [asked[0][0], asked[0][3], asked[1][1], asked[0][1]]
    assert sampled.failures == 3  # of all rounds


PROMPTS = [Prompt({}, [1, 2]), Prompt({}, [3])]
HOLE, LOGPROBS = torch.tensor([True, False, True]), torch.tensor([-1.0, math.nan, -3.0])
OF_A_TOOL = Completion(torch.tensor([4, 5, 6]), LOGPROBS, ended=True, sampled=HOLE)
CUT = Completion(torch.tensor([4, 5]), torch.tensor([-1.0, -1.0]), ended=False)


def test_a_rollout_counts_what_was_sampled_and_pads_what_is_shorter():
    made = rollout_of(PROMPTS, [OF_A_TOOL, CUT], torch.device("cpu"))
    assert torch.equal(made.counted("count"), made.mask)
    assert made.counted("mask").any(1).tolist() == [True, False]
    short = rollout_of(PROMPTS[1:], [CUT], torch.device("cpu"))
    joined = concatenate([short, made.rows(torch.tensor([1, 0]))])
    assert joined.prompts == [[3], [1, 2], [3]]
    assert joined.prompt_of.tolist() == [0, 2, 1]
    assert joined.token_ids.tolist() == [[4, 5, 0], [4, 5, 0], [4, 5, 6]]
    assert joined.mask.int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 1]]
    assert joined.logprobs.tolist() == [[-1, -1, 0], [-1, -1, 0], [-1, 0, -3]]
    assert joined.truncated.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"sampled": torch.zeros(3).bool()}, ValueError, "a mask for each, got"),
        ({"sampled": torch.ones(2).bool()}, ValueError, "a mask for each, got"),
        ({"logprobs": torch.zeros(2)}, ValueError, "a mask for each, got"),
        ({"sampled": None}, FloatingPointError, "the logits are not finite"),
    ],
)
def test_a_rollout_without_its_numbers_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        rollout_of(PROMPTS[:1], [OF_A_TOOL._replace(**wrong)], torch.device("cpu"))


def test_a_separate_value_model_begins_with_the_weights_of_the_policy():
    model, _ = make_model()
    critic = ValueModel(model, PpoConfig(value_model="separate"))
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1.0)  # as a warm start would
    critic.follow(model)
    own, followed = critic.backbone.state_dict(), backbone(model).state_dict()
    assert all(torch.equal(own[name], followed[name]) for name in followed)
    assert not {id(p) for p in critic.parameters()} & {id(p) for p in model.parameters()}
