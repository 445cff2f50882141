"""Which objectives the loops train with score centering."""

from dataclasses import replace

from fastrl import Objective


def centered(objective: Objective, top_k: int | None, updates: tuple[int, int]) -> Objective:
    """Return the objective with score centering, if ``top_k`` tokens are given for it.

    Raises:
        ValueError: The term has no agreed form for this objective, or with ``updates``, epochs and
            minibatches, it would need an old policy.
    """
    if top_k is None:
        return objective
    try:
        objective = replace(objective, score_centering=True)
    except ValueError as error:
        raise ValueError(f"score_centering must be None with this objective: {error}") from None
    if objective.surrogate != "reinforce" and updates != (1, 1):
        raise ValueError(
            "score_centering must be None with several epochs or minibatches of a clipped "
            f"objective, got epochs={updates[0]}, minibatches={updates[1]}"
        )
    return objective
