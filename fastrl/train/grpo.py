"""GRPO for causal language models: ``python -m fastrl.train.grpo``.

A step samples a group of completions for each prompt, rewards them, and raises the probability of
completions that did better than their group, with `fastrl.linear_policy_loss` on the hidden states.
By default a small new model learns to add and subtract; ``--help`` lists the options.
"""

import time
from dataclasses import replace

from fastrl import group_advantages
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig
from fastrl.train.gradients import minibatches, normalizer
from fastrl.train.groups import SampledGroups
from fastrl.train.metrics import MetricMeans, sampler_kl
from fastrl.train.optimizers import make_optimizer
from fastrl.train.policy import batches, policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.rewards import score
from fastrl.train.run_log import Summary
from fastrl.train.sampling import rollout_correction
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
    model = job.model
    correction = rollout_correction(config)
    objective = replace(config.policy_objective(), rollout_correction=correction)
    optimizer = make_optimizer(model.parameters(), config)

    with training_run(job, config, {"optimizer": optimizer}) as run:
        for step in run.steps():
            started = time.perf_counter()

            # Sample a group of completions for each prompt, and reward them.
            sampled = SampledGroups(config)
            while sampled.missing:
                prompts = sampled.prompts(job.train, step)
                part, completions = job.sampler.sample(prompts, config.group_size)
                records = [p.record for p in prompts for _ in range(config.group_size)]
                sampled.add(part, score(job.reward, records, completions).to(model.device))
            rollout, rewards = sampled.batch()

            # Compare the rewards within each group. A completion without advantage has no gradient,
            # unless the KL or the entropy asks for one, and does not enter the model.
            groups = group_advantages(
                rewards,
                group_size=config.group_size,
                baseline=config.baseline,
                scale=config.scale or "group",
            )
            mask = rollout.counted(config.truncated)
            has_loss = mask.any(1)
            if config.kl_coef == 0 and config.entropy_coef == 0:
                has_loss &= groups.advantages != 0
            learned = has_loss.nonzero()[:, 0]

            # On policy the ratio is 1 by definition and needs no old log-probabilities.
            on_policy = config.epochs == 1 and config.minibatches == 1
            old = None if on_policy else rollout_logprobs(model, rollout, learned, config)
            ref = None
            if run.reference is not None:
                with run.reference.policy() as reference:
                    ref = rollout_logprobs(reference, rollout, learned, config)

            # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
            metrics = MetricMeans()
            for minibatch in minibatches(len(rewards), config, config.group_size):
                denominator = normalizer(mask[minibatch], objective.aggregation)
                for batch in batches(rollout, minibatch[has_loss[minibatch]], mask, config):
                    before = None if old is None else batch.take(old)
                    of_sampler = batch.take(rollout.logprobs)
                    policy = policy_loss(
                        policy_outputs(model, batch, config),
                        batch,
                        config,
                        groups.advantages[batch.rows],
                        old_logprobs=before,
                        ref_logprobs=None if ref is None else batch.take(ref),
                        rollout_logprobs=None if correction is None else of_sampler,
                        objective=objective,
                        normalizer=denominator,
                    )
                    policy.loss.backward()
                    kl_sampler = sampler_kl(
                        policy.logprobs if before is None else before, of_sampler
                    )
                    metrics.add({**policy.metrics, "kl_sampler": kl_sampler})
                norm = run.apply(optimizer)

            tokens = float(rollout.mask.sum())
            run.finish_step(
                {
                    "reward": float(rewards.mean()),
                    "informative": float(groups.informative.float().mean()),
                    **metrics.read(),
                    "length": tokens / len(rewards),
                    "truncated": float(rollout.truncated.float().mean()),
                    "left_out": 1 - len(learned) / len(rewards),
                    "grad_norm": norm,
                    "tokens_per_second": tokens / (time.perf_counter() - started),
                }
            )
    return run.summary()


if __name__ == "__main__":
    main(GrpoConfig, train)
