"""GRPO for causal language models: ``fastrl grpo``.

A step samples a group of completions for each prompt, rewards them, and raises the probability of
completions that did better than their group, with `fastrl.linear_policy_loss` on the hidden states.
With ``--teacher`` the policy also approaches another model, on the tokens that it samples itself.
By default a small new model learns to add and subtract; ``--help`` lists the options.

A step uses the modules `sampling`, `rewards`, `packing`, `policy` (which calls the fused loss, with
the KL to `run.reference` weighted by ``Objective.kl_coef``), `optimizers` and `run`, in this order.
`second_models` has the teacher of a distillation, whose divergence is part of the same loss. `plan`
predicts the peak memory.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

from fastrl import group_advantages
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig
from fastrl.train.groups import SampledGroups, compared, informative
from fastrl.train.metrics import MetricMeans, lengths, reward_std, sampler_kl
from fastrl.train.optimizers import make_optimizer
from fastrl.train.packing import minibatches, normalizer
from fastrl.train.policy import batches, completion_logprobs, policy_loss, policy_outputs
from fastrl.train.run import TrainingRun
from fastrl.train.run_log import Summary
from fastrl.train.sampling import rollout_correction

#: Arguments of `fastrl.group_advantages`, by ``--advantage``.
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": {"baseline": "mean", "scale": "group"},
    "batch": {"baseline": "mean", "scale": "batch"},
    "unscaled": {"baseline": "mean", "scale": "none"},
    "leave_one_out": {"baseline": "leave_one_out", "scale": "none"},
}


def train(config: GrpoConfig) -> Summary:
    """Train a model with GRPO, or with the variant that ``config.objective`` names.

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
        >>> from fastrl.train.grpo import GrpoConfig, train
        >>> summary = train(GrpoConfig(steps=200, out="runs/first"))  # doctest: +SKIP
    """
    run = TrainingRun(config)
    model, teacher, size = run.model, run.teacher, config.group_size
    correction = rollout_correction(config) if config.has_reward else None
    objective = replace(config.policy_objective(), rollout_correction=correction)
    advantage = config.advantage or ("unscaled" if config.objective == "dr_grpo" else "group")
    optimizer = make_optimizer(model.parameters(), config)

    with run.saved({"optimizer": optimizer}):
        for step in run.steps():
            # Sample a group of completions for each prompt, and reward them.
            sampled = SampledGroups(config)
            while sampled.missing:
                sampled.add(*run.sample(sampled.prompts(run.train, step)))
            rollout, scored = sampled.batch()
            rewards = scored.total.to(model.device)

            # Compare the rewards within each group. A completion without a reward is left out. One
            # without advantage has no gradient, unless another term asks for one, and does not
            # enter the model.
            groups = None  # if the policy learns from the teacher alone
            if config.has_reward:
                taught = compared(scored, config).to(model.device)
                groups = group_advantages(
                    rewards, mask=taught, group_size=size, **ADVANTAGES[advantage]
                )
            counted = rollout.counted(config.truncated) & scored.known.to(model.device)[:, None]
            counts = has_loss = counted.any(1)
            others = config.kl_coef or config.entropy_coef or config.teacher_coef
            if groups is not None and not others:
                has_loss = counts & (groups.advantages != 0)
            counts, has_loss = counts.cpu(), has_loss.cpu()
            learned = has_loss.nonzero()[:, 0]
            if not counts.any():
                run.say_nothing_counts()

            # On policy the ratio is 1 by definition and needs no old log-probabilities. Score
            # centering has none either: its weights are of the policy that is differentiated.
            unneeded = config.score_centering is not None or config.epochs * config.minibatches == 1
            with run.phase("logprobs"):
                old = None if unneeded else completion_logprobs(model, rollout, learned, config)
                ref = None
                if run.reference is not None:
                    ref = run.reference.logprobs(rollout, learned)

            # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
            metrics, norms = MetricMeans(), list[float]()
            with run.phase("learn"):
                for minibatch in minibatches(len(rewards), config, group_size=size):
                    if not counts[minibatch].any():
                        continue
                    # It counts completions that are left out, too: of their loss only the gradient
                    # is 0, not their share in the mean.
                    denominator = normalizer(counted[minibatch], objective.aggregation)
                    rows = minibatch[has_loss[minibatch]]
                    for batch in batches(rollout, rows, counted, config):
                        before = None if old is None else batch.take(old)
                        of_sampler = batch.take(rollout.logprobs)
                        of_teacher = None if teacher is None else teacher(batch)
                        policy = policy_loss(
                            policy_outputs(model, batch, config),  # a name would keep them longer
                            batch,
                            config,
                            None if groups is None else groups.advantages[batch.rows],
                            old_logprobs=before,
                            ref_logprobs=None if ref is None else batch.take(ref),
                            rollout_logprobs=None if correction is None else of_sampler,
                            rollout_top_k=batch.top_logprobs(rollout),
                            teacher=of_teacher,
                            objective=objective,
                            normalizer=denominator,
                        )
                        policy.loss.backward()
                        sampled_for = policy.logprobs if before is None else before
                        metrics.add(policy.metrics, sampler_kl(sampled_for, of_sampler), batch)
                    norms.append(run.apply(optimizer))

            spread = {}
            if groups is not None:
                share = float(informative(scored, size).float().mean())
                spread = {**reward_std(scored), "informative": share}
            run.finish_step(
                {
                    **run.rewards.means(scored, failures=sampled.failures),
                    **spread,
                    "sampling_rounds": sampled.rounds,
                    **metrics.read(),
                    **lengths(rollout, run.sampler.engine.computed()),
                    "left_out": 1 - len(learned) / len(rewards),
                    "grad_norm": fmean(norms or [0.0]),
                }
            )
    return run.summary()


if __name__ == "__main__":
    main(GrpoConfig, train)
