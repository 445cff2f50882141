"""Which objectives the loops train with score centering."""

from dataclasses import replace

from fastrl import Objective


def centered(objective: Objective, *, epochs: int, minibatches: int) -> Objective:
    """Return the objective with score centering.

    Args:
        objective: The objective of the settings.
        epochs: Passes over the samples of a step.
        minibatches: Optimizer steps per pass.

    Raises:
        ValueError: The term has no agreed form for this objective, or it would need an old policy.
    """
    try:
        objective = replace(objective, score_centering=True)
    except ValueError as error:
        raise ValueError(f"score_centering must be None with this objective: {error}") from None
    if objective.surrogate != "reinforce" and (epochs, minibatches) != (1, 1):
        raise ValueError(
            "score_centering must be None with several epochs or minibatches of a clipped "
            f"objective, got epochs={epochs}, minibatches={minibatches}"
        )
    return objective
