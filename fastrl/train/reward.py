"""A reward model from preference pairs: ``python -m fastrl.train.reward``.

A step scores the chosen and the rejected completion of each pair, and raises the probability that
the chosen one is preferred, in the model of Bradley and Terry. The model is a sequence
classification model of `transformers` with one label. GRPO and PPO learn from it with
``--reward reward_model --reward_model DIRECTORY``. By default a small new model learns to tell
right from wrong answers to arithmetic prompts; ``--help`` lists the options.
"""

from fastrl.train.command_line import main
from fastrl.train.config import RewardModelConfig
from fastrl.train.data.pairs import pair_batches
from fastrl.train.data.prompts import deal
from fastrl.train.gradients import autocast, minibatches
from fastrl.train.model.recomputation import offloaded
from fastrl.train.optimizers import make_optimizer
from fastrl.train.preference import PairMetrics, bradley_terry, distance_from_center, pair_scores
from fastrl.train.run.reward_model_start import prepare_reward_model
from fastrl.train.run.run_log import Summary
from fastrl.train.run.training_run import training_run


def train(config: RewardModelConfig) -> Summary:
    """Train a reward model on preference pairs.

    Args:
        config: Model, pairs and settings.

    Returns:
        Where the run is stored, and the share of held-out pairs that are ranked right before and
        after.

    Raises:
        ValueError: An input is invalid.
        FloatingPointError: The gradients or weights of a step are not finite.
        OSError: The disk is full.

    The message of an error in a step tells where ``--resume`` continues.
    """
    job = prepare_reward_model(config)
    model = job.model
    optimizer = make_optimizer(model.parameters(), config)

    with training_run(job, config, {"optimizer": optimizer}) as run:
        for step in run.steps():
            pairs = deal(job.train, count=config.pairs_per_step, step=step, seed=config.seed)

            # Learn: an optimizer step per minibatch, gradients summed over its micro-batches.
            metrics = PairMetrics()
            with run.phase("learn"):
                for minibatch in minibatches(len(pairs), config):
                    some = [pairs[i] for i in minibatch.tolist()]
                    for batch in pair_batches(some, config.tokens_per_micro_batch):
                        with autocast(config, model.device), offloaded(config):
                            scores = pair_scores(model, batch)
                        losses = bradley_terry(scores)
                        losses = losses + config.center_coef * distance_from_center(scores)
                        (losses.sum() / len(minibatch)).backward()
                        metrics.add(scores, losses, batch)
                    norm = run.apply(optimizer)

            run.finish_step({**metrics.read(), "grad_norm": norm})
    return run.summary()


if __name__ == "__main__":
    main(RewardModelConfig, train)
