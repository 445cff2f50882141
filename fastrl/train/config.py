"""The settings of a run: one dataclass per loop, each field validated before any work.

Each field has its help text, and the command line is generated from the dataclass.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from fastrl.objective import Objective
from fastrl.objective.presets import Preset
from fastrl.train.memory_settings import MemorySettings
from fastrl.train.options import check_options, option
from fastrl.train.sampling_settings import SamplingSettings


@dataclass
class RunConfig(MemorySettings, SamplingSettings):
    """The settings that both loops share.

    Raises:
        ValueError: A field has an invalid value; the message begins with its name.
    """

    loop: ClassVar[str]

    name: str | None = option(
        None, "Name of the run; without one, the loop's name and a number.", result=False
    )
    out_dir: str = option("runs", "Directory of runs: files go to OUT_DIR/NAME.", result=False)
    resume: bool = option(
        False,
        "Continue the run NAME (without one, the latest) from its last checkpoint.",
        result=False,
    )
    seed: int = option(0, "Random seed, also of the arithmetic prompts.", least=0)

    model: str | None = option(
        None, "A causal LM, as a directory or hub name; by default, a small new model."
    )
    train_file: str | None = option(
        None, 'JSONL of {"prompt": ...} and what the reward needs; by default, arithmetic.'
    )
    held_out_file: str | None = option(None, "JSONL of prompts that are only evaluated.")
    reward: str = option(
        "fastrl.train.rewards:exact_match",
        "module:function that takes (prompts, completions, records) and returns a number for each.",
    )
    chat_template: bool = option(
        False, "Wrap each prompt as a user message with the chat template."
    )
    max_prompt_tokens: int = option(512, "A longer prompt is an error, never truncated.", least=1)

    steps: int = option(100, "Rounds of sampling and learning.", least=1, result=False)
    epochs: int = option(1, "Passes over the samples of a step.", least=1)
    minibatches: int = option(4, "Optimizer steps per pass.", least=1)
    learning_rate: float = option(2e-4, "Learning rate of AdamW, after the warm-up.", above=0)
    warmup_steps: int = option(5, "Steps over which the learning rate rises from 0.", least=0)
    weight_decay: float = option(0.0, "Weight decay of AdamW.", least=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.", above=0)

    warm_start_steps: int | None = option(
        None,
        "Supervised steps on training prompts first; by default only for a new model.",
        least=0,
    )
    warm_start_batch: int = option(128, "Prompts per supervised step.", least=1)
    warm_start_learning_rate: float = option(
        3e-3, "Learning rate of the supervised steps.", above=0
    )

    eval_every: int = option(
        5, "Steps between evaluations on the held-out prompts.", least=1, result=False
    )
    save_every: int = option(50, "Steps between checkpoints.", least=1, result=False)
    keep_checkpoints: int = option(
        2, "How many of the latest checkpoints are kept.", least=1, result=False
    )
    device: str = option(
        "auto", "auto, cpu, cuda, ...: auto uses a GPU if there is one.", result=False
    )

    def __post_init__(self) -> None:
        """Check every field against its type, its choices and its bounds."""
        check_options(self)
        self.check_weights()
        if self.name is not None and (
            self.name in ("", ".", "..") or Path(self.name).name != self.name
        ):
            raise ValueError(f"name must be a plain directory name, got {self.name!r}")
        if self.seed >= 2**31:
            raise ValueError(f"seed must be below 2**31, got {self.seed}")
        module, _, function = self.reward.partition(":")
        if not module or not function:
            raise ValueError(f"reward must look like module:function, got {self.reward!r}")
        if (self.train_file is None) != (self.held_out_file is None):
            raise ValueError("held_out_file must be given if and only if train_file is")


@dataclass
class GrpoConfig(RunConfig):
    """Group relative policy optimization and its variants: `fastrl.train.grpo`."""

    loop: ClassVar[str] = "grpo"

    prompts_per_step: int = option(64, "Prompts per step.", least=1)
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
    """Proximal policy optimization with a value head: `fastrl.train.ppo`."""

    loop: ClassVar[str] = "ppo"

    prompts_per_step: int = option(512, "Prompts per step, one completion each.", least=1)
    clip: float = option(0.2, "Clip range of the policy's ratio.", above=0)
    value_clip: float | None = option(0.2, "Clip range of the values; null for none.", above=0)
    value_coef: float = option(0.5, "Weight of the value loss.", least=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", least=0)
    kl_coef: float = option(0.01, "Weight of the KL penalty, to the initial model.", least=0)
    gamma: float = option(1.0, "Discount per token.", above=0)
    lam: float = option(0.95, "Decay of the advantage estimate.", least=0)

    def __post_init__(self) -> None:
        """Check conditions on more than one field."""
        super().__post_init__()
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches must be at most the samples of a step, got {self.minibatches}"
            )
        for name in ("gamma", "lam"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
