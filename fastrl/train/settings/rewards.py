"""The settings of the rewards."""

from dataclasses import dataclass

from fastrl.train.settings.options import option


@dataclass
class RewardSettings:
    """What completions are rewarded for."""

    reward: str = option(
        "fastrl.train.rewards:exact_match",
        "module:function that takes (prompts, completions, records) and returns a number for each; "
        "or reward_model.",
    )
    reward_model: str | None = option(
        None,
        "The reward model of --reward reward_model: a sequence classification model of one label, "
        "as a directory or hub name, or the directory of a run of fastrl.train.reward.",
    )

    def check_rewards(self) -> None:
        """Raise a `ValueError` if the reward does not look like one."""
        if (self.reward == "reward_model") != (self.reward_model is not None):
            raise ValueError(
                f"reward_model must be given if and only if reward is reward_model, got "
                f"{self.reward_model!r} with reward {self.reward!r}"
            )
        if self.reward == "reward_model":
            return
        module, _, function = self.reward.partition(":")
        if not module or not function:
            raise ValueError(f"reward must look like module:function, got {self.reward!r}")
