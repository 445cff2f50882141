"""PPO for causal language models: ``fastrl ppo``.

A step samples completions, rewards each at its last token, subtracts a KL penalty per token, turns
rewards into advantages, and learns from them with a clipped policy loss and a clipped value loss.
``--advantage`` selects the estimate of the advantages: plain rewards, rewards minus values,
generalized advantage estimates (the default), or comparison within groups. By default a small new
model learns to add and subtract; ``--help`` lists the options.
"""

from dataclasses import replace
from statistics import fmean

import torch

from fastrl import kl_divergence, masked_mean, value_loss
from fastrl.train.advantages import KlPenalty, advantages_and_returns, compared, token_rewards
from fastrl.train.checkpoint import Stateful
from fastrl.train.command_line import main
from fastrl.train.config import PpoConfig
from fastrl.train.metrics import MetricMeans, explained_variance, lengths, reward_std, sampler_kl
from fastrl.train.optimizers import make_optimizer
from fastrl.train.packing import minibatches, normalizer
from fastrl.train.policy import batches, completion_logprobs, policy_loss, policy_outputs
from fastrl.train.prompts import deal
from fastrl.train.run import TrainingRun
from fastrl.train.run_log import Summary
from fastrl.train.sampling import rollout_correction
from fastrl.train.second_models import ValueModel, rollout_values_and_logprobs

VALUE_COEF, VALUE_CLIP = 0.5, 0.2


def train(config: PpoConfig) -> Summary:
    """Train a model with PPO, and a value model with it if the advantages need one.

    The message of an error in a step tells where ``--resume`` continues.

    Args:
        config: The settings.

    Returns:
        How the run ended: its directory, its last step, and the held-out rewards.

    Raises:
        ValueError: An input is invalid, or a reward function fails later.
        FloatingPointError: The logits, gradients or weights of a step are not finite.
        OSError: The disk is full.

    Examples:
        >>> from fastrl.train.ppo import PpoConfig, train
        >>> summary = train(PpoConfig(steps=200, out="runs/first"))  # doctest: +SKIP
    """
    run = TrainingRun(config)
    model = run.model
    correction = rollout_correction(config)
    objective = replace(config.policy_objective(), rollout_correction=correction)
    critic = ValueModel(model, config) if config.has_values else None
    trained = [*model.parameters(), *(critic.parameters() if critic else ())]
    optimizer = make_optimizer(trained, config)
    penalty = KlPenalty(config)
    parts: dict[str, Stateful] = {"optimizer": optimizer}
    if critic is not None:
        parts["value_head"] = critic
    if config.kl_target is not None:
        parts["kl_penalty"] = penalty

    def follow() -> None:
        if critic is not None:
            critic.follow(model)

    with run.saved(parts, warm_started=follow):
        for step in run.steps():
            # Sample completions for each prompt, and reward them.
            count, seed = config.prompts_per_step, config.seed
            rollout, scored = run.sample(deal(run.train, count=count, step=step, seed=seed))
            rewards = scored.total.to(model.device)

            # Values and log-probabilities of the policy that sampled, and of the reference.
            everything = torch.arange(len(rewards))
            values = None
            with run.phase("logprobs"):
                if critic is None:
                    old = completion_logprobs(model, rollout, everything, config)
                else:
                    values, old = rollout_values_and_logprobs(model, critic, rollout, config)
                ref = old
                if run.reference is not None:
                    ref = run.reference.logprobs(rollout, everything)

            # Turn rewards into advantages. Reaching the length limit ends a sequence as well.
            # A completion without a reward is left out.
            known = scored.known.to(model.device)[:, None]
            mask, counted = rollout.mask & known, rollout.counted(config.truncated) & known
            counts = counted.any(1).cpu()
            if not counts.any():
                run.say_nothing_counts()
            kl = penalty.coefficient * kl_divergence(old, ref, estimator="k1")
            per_token = token_rewards(compared(rewards, config), kl, mask)
            advantages, returns = advantages_and_returns(per_token, values, mask, counted, config)

            # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
            metrics = MetricMeans()
            norms: list[float] = []
            with run.phase("learn"):
                for minibatch in minibatches(len(rewards), config):
                    if not counts[minibatch].any():
                        continue
                    denominator = normalizer(counted[minibatch], objective.aggregation)
                    metrics.begin_minibatch()
                    for batch in batches(rollout, minibatch, counted, config):
                        before, of_sampler = batch.take(old), batch.take(rollout.logprobs)
                        outputs = policy_outputs(model, batch, config)
                        policy = policy_loss(
                            outputs,
                            batch,
                            config,
                            batch.take(advantages),
                            # with score centering the run is on policy
                            old_logprobs=before if config.score_centering is None else None,
                            rollout_logprobs=None if correction is None else of_sampler,
                            rollout_top_k=batch.top_logprobs(rollout),
                            objective=objective,
                            normalizer=denominator,
                        )
                        loss, seen = policy.loss, dict(policy.metrics)
                        if critic is not None:
                            assert values is not None
                            error = value_loss(
                                critic(outputs, batch, config),
                                batch.take(returns),
                                torch.ones_like(batch.token_ids, dtype=torch.bool),
                                old_values=batch.take(values),
                                clip=VALUE_CLIP,
                                normalizer=denominator,
                            )
                            loss = loss + VALUE_COEF * error.loss
                            seen["value_loss"] = error.loss * denominator / len(batch.token_ids)
                            seen["value_clip_fraction"] = error.metrics["clip_fraction"]
                        loss.backward()
                        metrics.add(seen, sampler_kl(before, of_sampler), batch)
                    if config.stop_kl is not None and metrics.minibatch_kl() > config.stop_kl:
                        optimizer.zero_grad()
                        break
                    norms.append(run.apply(optimizer))

            row = {
                **run.rewards.means(scored),
                **reward_std(scored),
                **metrics.read(),
                "kl_coef": penalty.coefficient,
                **lengths(rollout, run.sampler.engine.computed()),
                "grad_norm": fmean(norms or [0.0]),
                "updates": len(norms),
            }
            if known.any():
                row["kl"] = float(masked_mean(kl_divergence(old, ref), mask))
                penalty.update(row["kl"], int(known.sum()))
            if known.any() and values is not None:
                row["explained_variance"] = explained_variance(values, returns, mask)
            run.finish_step(row)
    return run.summary()


if __name__ == "__main__":
    main(PpoConfig, train)
