"""PPO for causal language models: ``python -m fastrl.train.ppo``.

A step samples a completion for each prompt, rewards it at its last token, subtracts a KL penalty
per token, and learns from generalized advantage estimates with a clipped policy loss and a clipped
value loss. By default a small new model learns to add and subtract; ``--help`` lists the options.
"""

import torch
from torch import Tensor

from fastrl import Objective, gae, kl_divergence, masked_mean, value_loss, whiten
from fastrl.train.command_line import main
from fastrl.train.config import PpoConfig
from fastrl.train.data.prompts import deal
from fastrl.train.gradients import minibatches, normalizer
from fastrl.train.metrics import MetricMeans, explained_variance, lengths, sampler_kl
from fastrl.train.model.value_head import ValueHead, rollout_values
from fastrl.train.optimizers import make_optimizer
from fastrl.train.policy import batches, policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.run.run_log import Summary
from fastrl.train.run.start import prepare
from fastrl.train.run.training_run import training_run
from fastrl.train.sampling import rollout_correction


def token_rewards(rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Rewards per token [N, T]: the sequence's [N] at its last token, minus a penalty per token."""
    lengths = mask.sum(1, keepdim=True)
    last = mask & (mask.cumsum(1) == lengths)
    return torch.where(last, rewards[:, None], 0.0) - torch.where(mask, penalty, 0.0)


def train(config: PpoConfig) -> Summary:
    """Train a model with PPO and a value head on its last hidden state.

    Args:
        config: Model, prompts, reward and settings.

    Returns:
        Where the run is stored and the held-out reward before and after.

    Raises:
        ValueError: An input is invalid, or a reward function fails later.
        FloatingPointError: The logits, gradients or weights of a step are not finite.
        OSError: The disk is full.

    The message of an error in a step tells where ``--resume`` continues.
    """
    job = prepare(config, "ppo")
    model = job.model
    correction = rollout_correction(config)
    objective = Objective.preset(
        "ppo",
        clip_low=config.clip,
        clip_high=config.clip,
        entropy_coef=config.entropy_coef,
        rollout_correction=correction,
    )
    head = ValueHead(model.get_input_embeddings().weight.shape[1]).to(model.device)
    optimizer = make_optimizer([*model.parameters(), *head.parameters()], config)

    with (
        job.rewards,
        training_run(job, config, {"optimizer": optimizer, "value_head": head}) as run,
    ):
        for step in run.steps():
            # Sample a completion for each prompt.
            prompts = deal(job.train, count=config.prompts_per_step, step=step, seed=config.seed)
            with run.phase("generate"):
                rollout, completions = job.sampler.sample(prompts, 1)
            mask = rollout.mask
            records = [prompt.record for prompt in prompts]
            with run.phase("score"):
                scored = job.rewards.score(records, completions, rollout.lengths)
            rewards = scored.total.to(model.device)

            # Turn rewards into advantages. Reaching the length limit ends a sequence as well.
            everything = torch.arange(len(rewards))
            with run.phase("logprobs"):
                old = rollout_logprobs(model, rollout, everything, config)
                old_values = rollout_values(model, head, rollout, config)
                ref = old
                if run.reference is not None:
                    ref = run.reference.logprobs(rollout, everything, config)
            penalty = config.kl_coef * kl_divergence(old, ref, estimator="k1")
            advantages, returns = gae(
                token_rewards(rewards, penalty, mask),
                old_values,
                mask,
                gamma=config.gamma,
                lam=config.lam,
            )
            counted = rollout.counted(config.truncated)
            advantages = whiten(advantages, counted)

            # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
            metrics = MetricMeans()
            value_losses = []
            with run.phase("learn"):
                for minibatch in minibatches(len(rewards), config):
                    denominator = normalizer(counted[minibatch], objective.aggregation)
                    for batch in batches(rollout, minibatch, counted, config):
                        before, of_sampler = batch.take(old), batch.take(rollout.logprobs)
                        outputs = policy_outputs(model, batch, config)
                        policy = policy_loss(
                            outputs,
                            batch,
                            config,
                            batch.take(advantages),
                            old_logprobs=before,
                            rollout_logprobs=None if correction is None else of_sampler,
                            objective=objective,
                            normalizer=denominator,
                        )
                        critic = value_loss(
                            head(outputs.states),
                            batch.take(returns),
                            torch.ones_like(batch.token_ids, dtype=torch.bool),
                            old_values=batch.take(old_values),
                            clip=config.value_clip,
                            normalizer=denominator,
                        )
                        (policy.loss + config.value_coef * critic.loss).backward()
                        metrics.add(policy.metrics, sampler_kl(before, of_sampler), batch)
                        value_losses.append(critic.loss.detach())
                    norm = run.apply(optimizer)

            run.finish_step(
                {
                    **job.rewards.means(scored),
                    "reward_std": float(rewards.std(correction=0)),
                    **metrics.read(),
                    "kl": float(masked_mean(kl_divergence(old, ref), mask)),
                    "value_loss": float(sum(value_losses)) / (config.epochs * config.minibatches),
                    "explained_variance": explained_variance(old_values, returns, mask),
                    **lengths(rollout, [job.sampler.tokens]),
                    "grad_norm": norm,
                }
            )
    return run.summary()


if __name__ == "__main__":
    main(PpoConfig, train)
