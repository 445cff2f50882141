"""The settings of the rewards."""

from dataclasses import dataclass

from fastrl.train.settings.options import option


@dataclass
class RewardSettings:
    """What completions are rewarded for."""

    reward: str = option(
        "fastrl.train.rewards:exact_match",
        "module:function that takes (prompts, completions, records) and returns a number for each.",
        by_task={"long_addition": "fastrl.train.data.long_addition:right_sum"},
    )

    def check_rewards(self) -> None:
        """Raise a `ValueError` if the reward does not look like one."""
        module, _, function = self.reward.partition(":")
        if not module or not function:
            raise ValueError(f"reward must look like module:function, got {self.reward!r}")
