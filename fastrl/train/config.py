"""The settings of a run: one dataclass per loop, each field validated before any work.

Each field has its help text, and the command line is generated from the dataclass.
"""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args, get_origin

from fastrl.objective import Objective
from fastrl.objective.presets import Preset


def _option(default: Any, help: str, above: float | None = None, least: float | None = None) -> Any:  # noqa: A002
    """A field with its default, its help text and the bounds of its value."""
    return field(default=default, metadata={"help": help, "above": above, "least": least})


@dataclass
class RunConfig:
    """The settings that both loops share.

    Raises:
        ValueError: A field has an invalid value; the message begins with its name.
    """

    loop: ClassVar[str]

    name: str | None = _option(None, "Name of the run; without one, the loop's name and a number.")
    out_dir: str = _option("runs", "Directory of runs: files go to OUT_DIR/NAME.")
    resume: bool = _option(
        False, "Continue the run NAME (without one, the latest) from its last checkpoint."
    )
    seed: int = _option(0, "Random seed, also of the arithmetic prompts.", least=0)

    model: str | None = _option(
        None, "A causal LM, as a directory or hub name; by default, a small new model."
    )
    train_file: str | None = _option(
        None, 'JSONL of {"prompt": ...} and what the reward needs; by default, arithmetic.'
    )
    held_out_file: str | None = _option(None, "JSONL of prompts that are only evaluated.")
    reward: str = _option(
        "fastrl.train.rewards:exact_match",
        "module:function that takes (prompts, completions, records) and returns a number for each.",
    )
    chat_template: bool = _option(
        False, "Wrap each prompt as a user message with the chat template."
    )
    max_prompt_tokens: int = _option(512, "A longer prompt is an error, never truncated.", least=1)
    max_new_tokens: int = _option(4, "Longest completion, including its end token.", least=1)
    temperature: float = _option(1.0, "Temperature of the sampling and of the loss.", above=0)

    steps: int = _option(100, "Rounds of sampling and learning.", least=1)
    epochs: int = _option(1, "Passes over the samples of a step.", least=1)
    minibatches: int = _option(4, "Optimizer steps per pass.", least=1)
    micro_batch: int = _option(
        256, "Sequences per forward and backward; changes memory, not results.", least=1
    )
    learning_rate: float = _option(2e-4, "Learning rate of AdamW, after the warm-up.", above=0)
    warmup_steps: int = _option(5, "Steps over which the learning rate rises from 0.", least=0)
    weight_decay: float = _option(0.0, "Weight decay of AdamW.", least=0)
    max_grad_norm: float = _option(1.0, "Gradients are clipped to this norm.", above=0)

    warm_start_steps: int | None = _option(
        None,
        "Supervised steps on training prompts first; by default only for a new model.",
        least=0,
    )
    warm_start_batch: int = _option(128, "Prompts per supervised step.", least=1)
    warm_start_learning_rate: float = _option(
        3e-3, "Learning rate of the supervised steps.", above=0
    )

    eval_every: int = _option(5, "Steps between evaluations on the held-out prompts.", least=1)
    save_every: int = _option(50, "Steps between checkpoints.", least=1)
    keep_checkpoints: int = _option(2, "How many of the latest checkpoints are kept.", least=1)
    device: str = _option("auto", "auto, cpu, cuda, ...: auto uses a GPU if there is one.")
    loss: Literal["linear", "logits"] = _option(
        "linear",
        "linear: from hidden states and the LM head, never materializing the logits; logits: from "
        "the model's logits, for heads that linear does not support.",
    )
    precision: Literal["float32", "bfloat16"] = _option(
        "float32", "bfloat16: forward and backward under autocast; weights remain float32."
    )

    def __post_init__(self) -> None:
        """Check every field against its type, its choices and its bounds."""
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.type, f.metadata["above"], f.metadata["least"])
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

    prompts_per_step: int = _option(64, "Prompts per step.", least=1)
    group_size: int = _option(8, "Completions per prompt, compared with one another.", least=2)
    objective: str = _option(
        "grpo", "A preset of fastrl.Objective: grpo, dapo, dr_grpo, gspo, cispo, ..."
    )
    clip_low: float | None = _option(None, "Lower clip range; by default the preset's.", least=0)
    clip_high: float | None = _option(None, "Upper clip range; by default the preset's.", least=0)
    kl_coef: float = _option(0.0, "Weight of the KL to the initial model.", least=0)
    entropy_coef: float = _option(0.0, "Weight of the entropy bonus.", least=0)
    baseline: Literal["mean", "leave_one_out", "none"] = _option(
        "mean", "Subtracted from each reward."
    )
    scale: Literal["group", "batch", "none"] = _option(
        "group", "The standard deviation to divide by."
    )

    def __post_init__(self) -> None:
        """Check conditions on more than one field."""
        super().__post_init__()
        if self.minibatches > self.prompts_per_step * self.group_size:
            raise ValueError(
                f"minibatches must be at most the samples of a step, got {self.minibatches}"
            )
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

    prompts_per_step: int = _option(512, "Prompts per step, one completion each.", least=1)
    clip: float = _option(0.2, "Clip range of the policy's ratio.", above=0)
    value_clip: float | None = _option(0.2, "Clip range of the values; null for none.", above=0)
    value_coef: float = _option(0.5, "Weight of the value loss.", least=0)
    entropy_coef: float = _option(0.0, "Weight of the entropy bonus.", least=0)
    kl_coef: float = _option(0.01, "Weight of the KL penalty, to the initial model.", least=0)
    gamma: float = _option(1.0, "Discount per token.", above=0)
    lam: float = _option(0.95, "Decay of the advantage estimate.", least=0)

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


def _check(name: str, value: Any, kind: Any, above: float | None, least: float | None) -> None:
    """Raise a `ValueError` unless ``value`` has its type and is within bounds."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return
    allowed = get_args(kind) or (kind,)
    numeric = isinstance(value, int) and not isinstance(value, bool) and float in allowed
    if not numeric and type(value) not in allowed:
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if value is not None and above is not None and not value > above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    if value is not None and least is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
