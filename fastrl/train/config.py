"""The settings of a run: one dataclass per loop, each field validated before any work.

Each field has its help text, and the command line is generated from the dataclass.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

from fastrl.objective import Objective
from fastrl.objective.presets import Preset
from fastrl.train.settings.data import DataSettings
from fastrl.train.settings.learning import LearningSettings
from fastrl.train.settings.memory import MemorySettings
from fastrl.train.settings.model import ModelSettings
from fastrl.train.settings.options import check_options, fill_defaults, option
from fastrl.train.settings.pairs import PairSettings
from fastrl.train.settings.ranks import RankSettings
from fastrl.train.settings.rewards import RewardSettings, reward_names
from fastrl.train.settings.run import RunSettings
from fastrl.train.settings.sampling import SamplingSettings
from fastrl.train.settings.tracking import TrackingSettings
from fastrl.train.settings.warm_start import WarmStartSettings


@dataclass
class LoopConfig(
    TrackingSettings, RankSettings, MemorySettings, LearningSettings, ModelSettings, RunSettings
):
    """The settings that all loops share.

    Raises:
        ValueError: A field has an invalid value; the message begins with its name.
    """

    loop: ClassVar[str]

    def __post_init__(self) -> None:
        """Check every field against its type, its choices and its bounds."""
        fill_defaults(self)
        check_options(self)
        self.check_run()
        self.check_learning()
        self.check_tracking()
        self.check_weights()


@dataclass
class RunConfig(SamplingSettings, WarmStartSettings, RewardSettings, DataSettings, LoopConfig):
    """The settings of the loops in which a policy learns from rewards."""

    def __post_init__(self) -> None:
        """Check conditions on more than one field."""
        if isinstance(self.reward, (str, list, tuple)):
            self.reward = reward_names(self.reward)
        super().__post_init__()
        self.check_data()
        self.check_rewards()


@dataclass
class GrpoConfig(RunConfig):
    """Group relative policy optimization and its variants: `fastrl.train.grpo`."""

    loop: ClassVar[str] = "grpo"

    prompts_per_step: int = option(64, "Prompts per step.", least=1, by_task={"long_addition": 32})
    group_size: int = option(8, "Completions per prompt, compared with one another.", least=2)
    objective: str = option(
        "grpo", "A preset of fastrl.Objective: grpo, dapo, dr_grpo, gspo, cispo, ..."
    )
    clip_low: float | None = option(None, "Lower clip range; by default the preset's.", least=0)
    clip_high: float | None = option(None, "Upper clip range; by default the preset's.", least=0)
    kl_coef: float = option(0.0, "Weight of the KL to the initial model.", least=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", least=0)
    baseline: Literal["mean", "leave_one_out", "none"] = option(
        "mean", "Subtracted from each reward."
    )
    scale: Literal["group", "batch", "none"] | None = option(
        None, "The standard deviation to divide by: none for dr_grpo, else by default the group's."
    )
    share_prompts: bool = option(
        False, "Compute the prompt of a group once in each micro-batch.", result=False
    )
    dynamic_sampling: bool = option(
        False,
        "Replace groups whose rewards are all equal by groups of further prompts (DAPO), in at "
        "most max_sampling_rounds rounds.",
    )
    max_sampling_rounds: int = option(
        10, "Rounds of sampling per step with dynamic_sampling.", least=1
    )

    def __post_init__(self) -> None:
        """Check conditions on more than one field."""
        super().__post_init__()
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches must be at most prompts_per_step, {self.prompts_per_step}, since "
                f"each has whole groups; got {self.minibatches}"
            )
        if self.scale is None:
            self.scale = "none" if self.objective == "dr_grpo" else "group"
        self.policy_objective()

    def policy_objective(self) -> Objective:
        """The loss: the preset with the given fields."""
        changes: dict[str, Any] = {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef}
        changes |= {
            name: value
            for name in ("clip_low", "clip_high")
            if (value := getattr(self, name)) is not None
        }
        objective = Objective.preset(cast("Preset", self.objective), **changes)
        if objective.aggregation == "seq-mean-token-sum-norm":  # the same length for every batch
            objective = replace(objective, length_norm=float(self.max_new_tokens))
        return objective


@dataclass
class PpoConfig(RunConfig):
    """Proximal policy optimization: `fastrl.train.ppo`."""

    loop: ClassVar[str] = "ppo"

    prompts_per_step: int = option(
        512, "Prompts per step.", least=1, by_task={"long_addition": 256}
    )
    group_size: int = option(
        1, "Completions per prompt; for advantage=group, which compares them, at least 2.", least=1
    )
    advantage: Literal["reward", "value", "gae", "group"] = option(
        "gae",
        "reward: what follows; value: that minus the value model; gae: generalized advantage "
        "estimates; group: compared with the completions of the prompt, without a value model.",
    )
    gamma: float = option(1.0, "Discount per token.", above=0)
    lam: float = option(0.95, "Decay of the generalized advantage estimates.", least=0)
    clip: float = option(0.2, "Clip range of the policy's ratio.", above=0)
    value_model: Literal["shared", "separate"] = option(
        "shared",
        "shared: a head on the policy's last hidden states; separate: a backbone of its own, which "
        "begins as a copy of the policy's.",
    )
    value_loss: Literal["mse", "huber"] = option("mse", "Loss of the values.")
    value_clip: float | None = option(0.2, "Clip range of the values; null for none.", above=0)
    value_coef: float = option(0.5, "Weight of the value loss.", least=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", least=0)
    kl_coef: float = option(
        0.01, "Weight of the KL penalty, to the initial model, in the reward.", least=0
    )
    kl_target: float | None = option(
        None, "Adapt kl_coef so that the KL per token approaches this.", above=0
    )
    kl_horizon: int = option(
        10000,
        "Completions over which a KL of 1.2 kl_target or more raises kl_coef by 20 %.",
        least=1,
    )
    stop_kl: float | None = option(
        None,
        "Leave out the rest of a step's updates once the KL per token of a minibatch to the "
        "sampling policy exceeds this.",
        above=0,
    )

    def __post_init__(self) -> None:
        """Check conditions on more than one field."""
        super().__post_init__()
        completions = self.prompts_per_step * self.group_size
        if self.minibatches > completions:
            raise ValueError(
                f"minibatches must be at most the samples of a step, {completions}, got "
                f"{self.minibatches}"
            )
        for name in ("gamma", "lam"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
        if self.advantage == "group" and self.group_size == 1:
            raise ValueError("group_size must be at least 2 with advantage=group, got 1")
        if self.value_model == "separate":
            if not self.has_values:
                raise ValueError(
                    f"value_model must be shared with advantage={self.advantage}, which has none"
                )
            if self.lora_rank is not None:
                raise ValueError(
                    "value_model must be shared with lora_rank: a copy of the backbone takes the "
                    "memory that the adapter saves"
                )
        if self.kl_target is not None:
            if self.kl_coef == 0:
                raise ValueError("kl_coef must be above 0 with kl_target, which multiplies it")
            if self.kl_horizon < completions:
                raise ValueError(
                    f"kl_horizon must be at least the completions of a step, {completions}, got "
                    f"{self.kl_horizon}"
                )

    @property
    def has_values(self) -> bool:
        """Whether a value model is trained."""
        return self.advantage in ("value", "gae")


@dataclass
class RewardModelConfig(WarmStartSettings, PairSettings, LoopConfig):
    """A reward model on preference pairs: `fastrl.train.reward`."""

    loop: ClassVar[str] = "reward"

    steps: int = option(600, "Steps of learning from pairs.", least=1, result=False)
    minibatches: int = option(1, "Optimizer steps per pass over the pairs of a step.", least=1)
    learning_rate: float = option(
        1e-3,
        "Learning rate of AdamW, after the warm-up; 1e-5 is usual for a pretrained model.",
        above=0,
    )
    warmup_steps: int = option(20, "Steps over which the learning rate rises from 0.", least=0)
    schedule: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = option("linear", "The learning rate after the warm-up, by a schedule of transformers.")
    eval_every: int = option(
        50, "Steps between evaluations on the held-out pairs.", least=1, result=False
    )
    save_every: int = option(200, "Steps between checkpoints.", least=1, result=False)
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = option(
        "sdpa", "Implementation of transformers.", result=False
    )
    model: str | None = option(
        None,
        "A sequence classification model of one label, or a causal LM, which gets a new head; a "
        "directory or hub name; by default, a small new model.",
    )

    def __post_init__(self) -> None:
        """Check conditions on more than one field."""
        super().__post_init__()
        self.check_pairs()
        if self.warm_start_steps and self.model is not None:
            raise ValueError(
                f"warm_start_steps must be 0 or null with a model, got {self.warm_start_steps}: "
                "only a new one learns the chosen completions first"
            )
        if self.minibatches > self.pairs_per_step:
            raise ValueError(
                f"minibatches must be at most pairs_per_step, {self.pairs_per_step}, got "
                f"{self.minibatches}"
            )
        for name, default in (("loss", "linear"), ("freeze_head", False), ("lora_rank", None)):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be {json.dumps(default)} for a reward model, got "
                    f"{json.dumps(getattr(self, name))}"
                )
