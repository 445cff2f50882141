"""PPO in full: the estimates of the advantage, the value model, the KL penalty, the early stop."""

import pytest
import torch

pytest.importorskip("transformers")

from fastrl.integrations.transformers import backbone
from fastrl.train.advantages import advantages_and_returns, compared, token_rewards
from fastrl.train.config import PpoConfig
from fastrl.train.data.prompts import encode
from fastrl.train.kl_penalty import KlPenalty
from fastrl.train.metrics import MetricMeans
from fastrl.train.model.loading import load
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.value_model import ValueModel, rollout_values_and_logprobs
from fastrl.train.policy import rollout_logprobs
from fastrl.train.run.checkpoint import latest
from fastrl.train.sampling import make_sampler
from tests.support.train_runs import rows, run, weights

REWARDS = torch.tensor([[0.0, 1.0, 3.0], [1.0, 2.0, 9.0]])
VALUES = torch.tensor([[0.5, 1.5, 2.5], [1.0, 0.0, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
#: Of PPO, so that a step has several updates on small batches.
QUICK = {"learning_rate": 1e-2, "warmup_steps": 0, "steps": 2, "eval_every": 10}


class TestAdvantages:
    def estimate(self, name, values=VALUES, **settings):
        config = PpoConfig(advantage=name, gamma=0.5, lam=0.5, **settings)
        return advantages_and_returns(REWARDS, values, MASK, MASK, config)

    def test_reward_is_the_discounted_return(self):
        advantages, returns = self.estimate("reward", None)
        assert advantages.tolist() == [[1.25, 2.5, 3], [2, 2, 0]]
        assert torch.equal(advantages, returns)

    def test_value_is_the_return_minus_the_value_normalized(self):
        advantages, returns = self.estimate("value")
        assert returns.tolist() == [[1.25, 2.5, 3], [2, 2, 0]]
        plain = torch.tensor([0.75, 1.0, 0.5, 1.0, 2.0])  # R - V
        expected = (plain - plain.mean()) / plain.std()
        torch.testing.assert_close(advantages[MASK], expected, rtol=1e-4, atol=1e-4)

    def test_gae_mixes_what_follows_with_the_values(self):
        # the deltas are 0.25, 0.75, 0.5 and 0, 2; gamma lam = 0.25
        plain = torch.tensor([0.25 + 0.25 * (0.75 + 0.25 * 0.5), 0.875, 0.5, 0.5, 2.0])
        advantages, returns = self.estimate("gae")
        expected = (plain - plain.mean()) / plain.std()
        torch.testing.assert_close(advantages[MASK], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(returns[MASK], plain + VALUES[MASK])

    def test_mean_and_spread_are_of_the_tokens_that_count(self):
        counted = MASK & torch.tensor([[True], [False]])  # the second was truncated
        config = PpoConfig(advantage="value", gamma=0.5, truncated="mask")
        advantages, _ = advantages_and_returns(REWARDS, VALUES, MASK, counted, config)
        assert advantages[0].mean() == pytest.approx(0, abs=1e-6)
        assert advantages[0].std() == pytest.approx(1, rel=1e-4)
        assert advantages[1].tolist() == [0, 0, 0]

    def test_group_compares_the_rewards_of_a_prompt_before_the_penalty(self):
        """Two prompts: rewards 0 and 1, and equal ones, which the penalty does not tell apart."""
        config = PpoConfig(advantage="group", group_size=2)
        mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]).bool()
        penalty = torch.tensor([[0.01, 0.02], [0.03, 9.0], [0.0, 0.01], [-0.02, 9.0]])
        rewards = token_rewards(compared(torch.tensor([0.0, 1, 1, 1]), config), penalty, mask)
        advantages, _ = advantages_and_returns(rewards, None, mask, mask, config)
        half = 0.5**0.5
        expected = [[-half - 0.03, -half - 0.02], [half - 0.03, 0], [-0.01, -0.01], [0.02, 0]]
        torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("name", ["reward", "value", "gae"])
    def test_the_others_take_rewards_as_they_are(self, name):
        rewards = torch.tensor([0.0, 1.0])
        assert torch.equal(compared(rewards, PpoConfig(advantage=name)), rewards)


@pytest.fixture
def sampled(small):
    """A model, a rollout of its completions, and the settings of both."""

    def make(**settings):
        config = PpoConfig(max_new_tokens=4, **settings)
        torch.manual_seed(3)
        model, tokenizer = load(None, "cpu")
        save_memory(model, config)
        records = [{"prompt": f"{i} + 1 ="} for i in range(6)]
        prompts = encode(records, tokenizer, chat_template=False, max_tokens=32)
        rollout, _ = make_sampler(model, tokenizer, config).sample(prompts, 1)
        return model, rollout, config

    return make


class TestValueModel:
    @pytest.mark.parametrize("loss", ["linear", "logits"])
    def test_values_and_logprobs_take_one_pass_of_the_shared_backbone(self, sampled, loss):
        model, rollout, config = sampled(loss=loss)
        critic = ValueModel(model, config)
        torch.nn.init.normal_(critic.outer.weight)
        calls = []
        backbone(model).register_forward_hook(lambda *_: calls.append(1))
        values, logprobs = rollout_values_and_logprobs(model, critic, rollout, config)
        assert len(calls) == 1
        alone = rollout_logprobs(model, rollout, torch.arange(6), config)
        torch.testing.assert_close(logprobs, alone)
        torch.manual_seed(3)
        plain, _ = load(None, "cpu")  # the same model, on each sequence by itself
        for i in range(6):
            length = int(rollout.mask[i].sum())
            ids = rollout.prompts[i] + rollout.token_ids[i, : length - 1].tolist()
            states = backbone(plain)(torch.tensor([ids])).last_hidden_state[0, -length:]
            expected = critic.outer(torch.relu(critic.inner(states)))[:, 0]
            torch.testing.assert_close(values[i, :length], expected, rtol=1e-4, atol=1e-5)
            assert (values[i, length:] == 0).all()

    def test_a_separate_one_begins_with_the_policys_weights_and_leaves_them_alone(self, sampled):
        model, _, config = sampled(value_model="separate")
        critic = ValueModel(model, config)
        with torch.no_grad():
            backbone(model).embed_tokens.weight.add_(1.0)  # as a warm start would
        critic.follow(model)
        own, followed = critic.backbone.state_dict(), backbone(model).state_dict()
        assert all(torch.equal(own[name], followed[name]) for name in followed)
        assert not {id(p) for p in critic.parameters()} & {id(p) for p in model.parameters()}

    def test_a_separate_one_follows_the_warm_start_of_a_run(self, small):
        settings = small | QUICK | {"warm_start_steps": 3, "warm_start_batch": 4, "steps": 1}
        out = run("ppo", settings, value_model="separate", name="a", value_coef=0.0)
        again = run("ppo", settings, value_model="shared", name="b", value_coef=0.0)
        # equal values of 0 in the first step, and a value loss without weight: equal policies
        one, other = weights(out.directory), weights(again.directory)
        assert all(torch.equal(one[name], other[name]) for name in one)
        state = torch.load(latest(out.directory / "checkpoints") / "state.pt", weights_only=True)
        kept = {name for name in state["value_head"] if name.startswith("backbone.")}
        assert len(kept) > 10

    def test_a_separate_one_in_bfloat16_keeps_what_it_follows(self, small):
        settings = small | QUICK | {"warm_start_steps": 20, "learning_rate": 1e-5, "steps": 1}
        out = run("ppo", settings, value_model="separate", weights="bfloat16", minibatches=1)
        after = weights(out.directory)["model.layers.0.mlp.up_proj.weight"]
        state = torch.load(latest(out.directory / "checkpoints") / "state.pt", weights_only=True)
        own = state["value_head"]["backbone.layers.0.mlp.up_proj.weight"]
        assert (own.float() - after.float()).abs().max() < 1e-3  # the warm start moves it by 0.01

    @pytest.mark.parametrize(
        "changes",
        [
            {"value_model": "separate"},
            {"advantage": "group", "group_size": 4, "prompts_per_step": 4},
            {"advantage": "reward"},
            {"kl_target": 1e-4, "kl_coef": 0.1, "kl_horizon": 32},
            {"stop_kl": 1e-3, "epochs": 2},
            {"value_loss": "huber", "value_clip": None, "entropy_coef": 0.01},
        ],
        ids=str,
    )
    def test_a_resumed_run_continues_as_it_would_have(self, small, changes):
        settings = small | QUICK | changes
        whole = run("ppo", settings, name="whole", steps=3)
        run("ppo", settings, name="cut", steps=1)
        cut = run("ppo", settings, name="cut", steps=3, resume=True)
        assert rows(cut.directory)[2:] == rows(whole.directory)[2:]  # step 1 was the last, measured
        one, other = weights(whole.directory), weights(cut.directory)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_huber_loss_grows_slower_than_the_squared(small):
    settings = (
        small | QUICK | {"value_clip": None, "reward": "small_rewards:far", "lam": 1.0, "steps": 1}
    )
    squared = run("ppo", settings, name="mse", minibatches=1)
    huber = run("ppo", settings, name="huber", minibatches=1, value_loss="huber")
    # values of 0 and returns of 4: 4^2 / 2 and 4 - 1 / 2
    losses = [rows(out.directory)[1]["value_loss"] for out in (squared, huber)]
    assert losses == pytest.approx([8, 3.5])


class TestKlPenalty:
    def config(self, **changes):
        return PpoConfig(**{"kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 1000} | changes)

    @pytest.mark.parametrize(
        ("kl", "factor"), [(0.02, 1.0), (0.021, 1.025), (1.0, 1.1), (0.0, 0.9), (0.018, 0.95)]
    )
    def test_it_moves_towards_the_target(self, kl, factor):
        penalty = KlPenalty(self.config())
        penalty.update(kl, 500)
        assert penalty.coefficient == pytest.approx(0.1 * factor)

    def test_without_a_target_it_stays(self):
        penalty = KlPenalty(self.config(kl_target=None))
        penalty.update(5.0, 500)
        assert penalty.coefficient == 0.1

    def test_a_run_logs_the_coefficient_of_each_step(self, small):
        out = run("ppo", small | QUICK, kl_coef=0.5, kl_target=1e-6, kl_horizon=16, steps=3)
        coefficients = [row["kl_coef"] for row in rows(out.directory)[1:]]
        # in the first step policy and reference are the same
        assert coefficients == pytest.approx([0.5, 0.4, 0.48])

    def test_a_run_subtracts_the_kl_times_the_coefficient(self, small):
        losses = []
        for coefficient in (0.0, 1e-9, 1.0):
            settings = {"kl_coef": coefficient, "value_coef": 0.0, "name": str(coefficient)}
            out = run("ppo", small | QUICK, **settings)
            losses.append(rows(out.directory)[2]["value_loss"])
        # of values of 0 and the same tokens, since the first step has no KL
        assert losses[1] == pytest.approx(losses[0])
        assert losses[2] > 2 * losses[0]


class TestEarlyStop:
    def test_it_leaves_out_updates_of_a_step_that_went_too_far(self, small):
        settings = small | QUICK | {"epochs": 3, "minibatches": 4}
        free = rows(run("ppo", settings, name="free").directory)[1:]
        held = rows(run("ppo", settings, name="held", stop_kl=1e-3).directory)[1:]
        assert [row["updates"] for row in free] == [12, 12]
        assert all(1 <= row["updates"] < 12 for row in held)

    def test_the_kl_is_of_the_minibatch_weighted_by_tokens(self):
        from types import SimpleNamespace

        metrics = MetricMeans()
        batch = SimpleNamespace(input_ids=torch.zeros(1, 3), repeated=False)
        for kl, tokens in ((5.0, 1), (0.3, 1), (0.1, 3)):
            if kl == 0.3:
                metrics.begin_minibatch()
            seen = {"kl_old": torch.tensor(kl), "active_tokens": torch.tensor(float(tokens))}
            metrics.add(seen, torch.tensor(0.0), batch)
        assert metrics.minibatch_kl() == pytest.approx(0.15)
        metrics.begin_minibatch()
        assert metrics.minibatch_kl() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "group"}, "group_size must be at least 2 with advantage=group, got 1"),
        (
            {"advantage": "reward", "value_model": "separate"},
            "value_model must be shared with advantage=reward, which has none",
        ),
        ({"value_model": "separate", "lora_rank": 4}, "value_model must be shared with lora_rank"),
        ({"kl_target": 0.1, "kl_coef": 0.0}, "kl_coef must be above 0 with kl_target"),
        (
            {"kl_target": 0.1, "kl_horizon": 100},
            "kl_horizon must be at least the completions of a step, 512, got 100",
        ),
        ({"stop_kl": 0.0}, "stop_kl must be above 0, got 0.0"),
        ({"advantage": "td"}, "advantage must be one of reward, value, gae, group, got 'td'"),
    ],
)
def test_settings_that_exclude_one_another(settings, message):
    with pytest.raises(ValueError, match=message):
        PpoConfig(**settings)
