"""GRPO for causal language models: ``python -m fastrl.train.grpo``.

A step samples a group of completions for each prompt, rewards them, and raises the probability of
those that did better than their group, by `fastrl.linear_policy_loss` on the hidden states. Without
arguments a small new model learns to add and subtract; ``--help`` lists what can be set.
"""

import time

import torch

from fastrl import group_advantages
from fastrl.train import checkpoint
from fastrl.train.command_line import run
from fastrl.train.config import GrpoConfig
from fastrl.train.gradients import apply, autocast, minibatches, normalizer
from fastrl.train.interrupt import Interrupt
from fastrl.train.metrics import MetricMeans
from fastrl.train.policy import policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.prompts import deal
from fastrl.train.rewards import RewardError, score
from fastrl.train.rollout import generate
from fastrl.train.run_log import Summary
from fastrl.train.start import begin, evaluate, prepare, reference_model


def train(config: GrpoConfig) -> Summary:
    """Train a model by GRPO, or by what else ``config.objective`` names.

    Args:
        config: Model, prompts, reward and settings.

    Returns:
        Where the run lies and the held-out reward before and after.

    Raises:
        ValueError: Something in the input is wrong. A reward function that fails later on does so
            after a checkpoint.
        FloatingPointError: The gradients are not finite, again after a checkpoint.
    """
    job = prepare(config, "grpo")
    log, model, tokenizer = job.log, job.model, job.tokenizer
    objective = config.policy_objective()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    parts: dict[str, checkpoint.Stateful] = {"optimizer": optimizer}

    with Interrupt() as interrupt:
        begun = begin(job, config, parts, interrupt)
        if begun is None:
            return log.summary(0, interrupted=True)
        step = begun
        rng = checkpoint.rng_state()
        reference = reference_model(job, config) if config.kl_coef > 0 else None

        def save() -> None:
            checkpoint.save(
                log.checkpoints,
                step=step,
                model=model,
                tokenizer=tokenizer,
                parts=parts,
                rng=rng,
                keep=config.keep_checkpoints,
            )

        try:
            if not log.rows:
                save()
                log.write({"step": 0, "held_out_reward": evaluate(job, config)})

            while step < config.steps and not interrupt.requested:
                started = time.perf_counter()

                # Sample a group of completions for each prompt; compare their rewards within it.
                prompts = deal(
                    job.train, count=config.prompts_per_step, step=step, seed=config.seed
                )
                with autocast(config, model):
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
                ref = None if reference is None else rollout_logprobs(reference, rollout, config)

                # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
                metrics = MetricMeans()
                for minibatch in minibatches(len(rewards), config):
                    denominator = normalizer(rollout.mask[minibatch], objective.aggregation)
                    for rows in minibatch.split(config.micro_batch):
                        batch = rollout.rows(rows)
                        loss, measured = policy_loss(
                            policy_outputs(model, batch, config),
                            batch,
                            config,
                            groups.advantages[rows],
                            old_logprobs=None if old is None else old[rows],
                            ref_logprobs=None if ref is None else ref[rows],
                            objective=objective,
                            normalizer=denominator,
                        )
                        loss.backward()
                        metrics.add(measured)
                    norm = apply(optimizer, config, step)

                step, rng = step + 1, checkpoint.rng_state()
                row = {
                    "step": step,
                    "reward": float(rewards.mean()),
                    "informative": float(groups.informative.float().mean()),
                    **metrics.read(),
                    "length": float(rollout.mask.sum(1).float().mean()),
                    "grad_norm": norm,
                    "tokens_per_second": float(rollout.mask.sum())
                    / (time.perf_counter() - started),
                }
                if reference is None:
                    del row["kl"]  # there is nothing to be far from
                try:
                    if step % config.eval_every == 0 or step == config.steps:
                        row["held_out_reward"] = evaluate(job, config)
                finally:
                    log.write(row)
                if step % config.save_every == 0:
                    save()
        except (RewardError, FloatingPointError):
            save()
            raise
        finally:
            log.finish()
        save()
    return log.summary(step, interrupted=interrupt.requested)


if __name__ == "__main__":
    run(GrpoConfig, train)
