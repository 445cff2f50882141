"""PPO for causal language models: ``python -m fastrl.train.ppo``.

A step samples a completion for each prompt, rewards it at its last token, charges every token for
leaving the model that the run started from, and learns from generalised advantage estimates with a
clipped policy loss and a clipped value loss. Without arguments a small new model learns to add and
subtract; ``--help`` lists what can be set.
"""

import time

import torch
from torch import Tensor

from fastrl import (
    Objective,
    gae,
    kl_divergence,
    masked_mean,
    value_loss,
    whiten,
)
from fastrl.train import checkpoint
from fastrl.train.command_line import run
from fastrl.train.config import PpoConfig
from fastrl.train.gradients import apply, autocast, minibatches, normalizer
from fastrl.train.interrupt import Interrupt
from fastrl.train.metrics import MetricMeans, explained_variance
from fastrl.train.policy import policy_loss, policy_outputs, rollout_logprobs
from fastrl.train.prompts import deal
from fastrl.train.rewards import RewardError, score
from fastrl.train.rollout import generate
from fastrl.train.run_log import Summary
from fastrl.train.start import begin, evaluate, prepare, reference_model
from fastrl.train.value_head import ValueHead, rollout_values


def token_rewards(rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """The reward of a sequence [N] at its last token, less what each token is charged [N, T]."""
    lengths = mask.sum(1, keepdim=True)
    last = mask & (mask.cumsum(1) == lengths)
    return torch.where(last, rewards[:, None], 0.0) - torch.where(mask, penalty, 0.0)


def train(config: PpoConfig) -> Summary:
    """Train a model by PPO with a value head on its last hidden state.

    Args:
        config: Model, prompts, reward and settings.

    Returns:
        Where the run lies and the held-out reward before and after.

    Raises:
        ValueError: Something in the input is wrong. A reward function that fails later on does so
            after a checkpoint.
        FloatingPointError: The gradients are not finite, again after a checkpoint.
    """
    job = prepare(config, "ppo")
    log, model, tokenizer = job.log, job.model, job.tokenizer
    objective = Objective.preset(
        "ppo", clip_low=config.clip, clip_high=config.clip, entropy_coef=config.entropy_coef
    )
    head = ValueHead(model.get_input_embeddings().embedding_dim).to(model.device)
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *head.parameters()],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    parts: dict[str, checkpoint.Stateful] = {"optimizer": optimizer, "value_head": head}

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

                # Sample a completion for each prompt.
                count = config.prompts_per_step
                prompts = deal(job.train, count=count, step=step, seed=config.seed)
                with autocast(config, model):
                    rollout, completions = generate(
                        model,
                        tokenizer,
                        prompts,
                        max_new_tokens=config.max_new_tokens,
                        temperature=config.temperature,
                    )
                mask = rollout.mask
                records = [prompt.record for prompt in prompts]
                rewards = score(job.reward, records, completions).to(model.device)

                # Turn rewards into advantages. Reaching the length limit ends a sequence as well.
                old = rollout_logprobs(model, rollout, config)
                old_values = rollout_values(model, head, rollout, config)
                ref = old if reference is None else rollout_logprobs(reference, rollout, config)
                penalty = config.kl_coef * kl_divergence(old, ref, estimator="k1")
                advantages, returns = gae(
                    token_rewards(rewards, penalty, mask),
                    old_values,
                    mask,
                    gamma=config.gamma,
                    lam=config.lam,
                )
                advantages = whiten(advantages, mask)

                # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
                metrics = MetricMeans()
                value_losses = []
                for minibatch in minibatches(len(rewards), config):
                    denominator = normalizer(mask[minibatch], objective.aggregation)
                    for rows in minibatch.split(config.micro_batch):
                        batch = rollout.rows(rows)
                        outputs = policy_outputs(model, batch, config)
                        policy = policy_loss(
                            outputs,
                            batch,
                            config,
                            advantages[rows],
                            old_logprobs=old[rows],
                            objective=objective,
                            normalizer=denominator,
                        )
                        critic = value_loss(
                            head(outputs.states),
                            returns[rows],
                            batch.mask,
                            old_values=old_values[rows],
                            clip=config.value_clip,
                            normalizer=denominator,
                        )
                        (policy.loss + config.value_coef * critic.loss).backward()
                        metrics.add(policy.metrics)
                        value_losses.append(critic.loss.detach())
                    norm = apply(optimizer, config, step)

                step, rng = step + 1, checkpoint.rng_state()
                row = {
                    "step": step,
                    "reward": float(rewards.mean()),
                    **metrics.read(),
                    "kl": float(masked_mean(kl_divergence(old, ref), mask)),
                    "value_loss": float(torch.stack(value_losses).sum())
                    / (config.epochs * config.minibatches),
                    "explained_variance": explained_variance(old_values, returns, mask),
                    "length": float(mask.sum(1).float().mean()),
                    "grad_norm": norm,
                    "tokens_per_second": float(mask.sum()) / (time.perf_counter() - started),
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
    run(PpoConfig, train)
