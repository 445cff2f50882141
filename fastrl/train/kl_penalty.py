"""The coefficient of the KL penalty, fixed or adapted to a target."""

from typing import Any

from fastrl.train.config import PpoConfig


class KlPenalty:
    """The coefficient, which with ``kl_target`` follows the measured KL.

    After N completions with the mean KL per token d it is multiplied by
    1 + clip(d / kl_target - 1, -0.2, 0.2) N / kl_horizon
    (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2, in the form of TRL and
    verl).

    Attributes:
        coefficient: The present one.
    """

    def __init__(self, config: PpoConfig) -> None:
        self.coefficient = config.kl_coef
        self._target, self._horizon = config.kl_target, config.kl_horizon

    def update(self, kl: float, completions: int) -> None:
        """Adapt the coefficient to the mean KL of a step."""
        if self._target is not None:
            error = min(max(kl / self._target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * completions / self._horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.coefficient = float(state_dict["coefficient"])
