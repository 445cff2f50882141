"""GRPO for causal language models: ``python -m fastrl.train.grpo``.

A step samples a group of completions for each prompt, rewards them, and raises the probability of
completions that did better than their group, with `fastrl.linear_policy_loss` on the hidden states.
By default a small new model learns to add and subtract; ``--help`` lists the options.
"""

import time

import torch

from fastrl import group_advantages
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig
from fastrl.train.gradients import apply, autocast, minibatches, normalizer
from fastrl.train.metrics import MetricMeans
from fastrl.train.policy import policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.prompts import deal
from fastrl.train.rewards import score
from fastrl.train.rollout import generate
from fastrl.train.run_log import Summary
from fastrl.train.start import prepare
from fastrl.train.training_run import training_run


def train(config: GrpoConfig) -> Summary:
    """Train a model with GRPO, or with the variant that ``config.objective`` names.

    Args:
        config: Model, prompts, reward and settings.

    Returns:
        Where the run is stored and the held-out reward before and after.

    Raises:
        ValueError: An input is invalid. If a reward function fails later, a checkpoint is saved
            first.
        FloatingPointError: The gradients are not finite; a checkpoint is saved first.
    """
    job = prepare(config, "grpo")
    model, tokenizer = job.model, job.tokenizer
    objective = config.policy_objective()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )

    with training_run(job, config, {"optimizer": optimizer}) as run:
        for step in run.steps():
            started = time.perf_counter()

            # Sample a group of completions for each prompt; compare their rewards within it.
            prompts = deal(job.train, count=config.prompts_per_step, step=step, seed=config.seed)
            with autocast(config, model.device):
                rollout, completions = generate(
                    model,
                    tokenizer,
                    prompts,
                    group_size=config.group_size,
                    max_new_tokens=config.max_new_tokens,
                    temperature=config.temperature,
                )
            records = [p.record for p in prompts for _ in range(config.group_size)]
            rewards = score(job.reward, records, completions).to(model.device)
            groups = group_advantages(
                rewards,
                group_size=config.group_size,
                baseline=config.baseline,
                scale=config.scale,
            )

            # On policy the ratio is 1 by definition and needs no old log-probabilities.
            on_policy = config.epochs == 1 and config.minibatches == 1
            old = None if on_policy else rollout_logprobs(model, rollout, config)
            ref = None
            if run.reference is not None:
                ref = rollout_logprobs(run.reference, rollout, config)

            # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
            metrics = MetricMeans()
            for minibatch in minibatches(len(rewards), config):
                denominator = normalizer(rollout.mask[minibatch], objective.aggregation)
                for rows in minibatch.split(config.micro_batch):
                    batch = rollout.rows(rows)
                    policy = policy_loss(
                        policy_outputs(model, batch, config),
                        batch,
                        config,
                        groups.advantages[rows],
                        old_logprobs=None if old is None else old[rows],
                        ref_logprobs=None if ref is None else ref[rows],
                        objective=objective,
                        normalizer=denominator,
                    )
                    policy.loss.backward()
                    metrics.add(policy.metrics)
                norm = apply(optimizer, config, step)

            tokens = float(rollout.mask.sum())
            run.finish_step(
                {
                    "reward": float(rewards.mean()),
                    "informative": float(groups.informative.float().mean()),
                    **metrics.read(),
                    "length": tokens / len(rewards),
                    "grad_norm": norm,
                    "tokens_per_second": tokens / (time.perf_counter() - started),
                }
            )
    return run.summary()


if __name__ == "__main__":
    main(GrpoConfig, train)
