"""The settings: one dataclass per loop, whose fields are the options of the command line."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

from fastrl import Objective
from fastrl.train.chat import chat_arguments
from fastrl.train.setting_types import check_bounds, check_type

#: Settings that may change on --resume: the finished steps do not depend on them.
FREE = {
    *("out", "resume", "plan", "device", "track", "steps", "eval_every", "save_every"),
    *("save_minutes", "tokens_per_micro_batch", "tokens_per_generation", "gradient_checkpointing"),
    *("offload_checkpoints", "mlp_tile", "loss", "attention", "reward_timeout", "reward_failed"),
}


@dataclass(kw_only=True)
class RunConfig:
    """Settings of both loops.

    Raises:
        ValueError: A field has an invalid value; the message begins with its name.
    """

    loop: ClassVar[str]

    model: str | None = None
    """A causal LM in safetensors: a directory, a hub name, or a run, whose last checkpoint is used.
    By default, a small new model."""
    prompts: tuple[str, ...] = ("arithmetic",)
    """A task (arithmetic, long_addition), two files (.jsonl, .parquet), or a data set.
    The second file is held out. A data set of the hub or a directory may name a configuration."""
    splits: tuple[str, str] = ("train", "test")
    """The training and held-out splits of a data set, such as train[:95%] and train[95%:]."""
    columns: tuple[str, str] = ("prompt", "answer")
    """The columns of files and data sets that contain prompt and answer.
    A name such as reward_model.ground_truth reads a field of a struct."""
    chat_template: tuple[str, ...] | None = None
    """Put text prompts into the chat template as user messages; messages always go into it.
    NAME=VALUE are arguments of the template, as in enable_thinking=false.
    system='You are ...' is a system message for prompts that have none."""
    max_prompt_tokens: int = 512
    """Leave out longer prompts, which are never truncated."""

    sampler: str = "transformers"
    """transformers, vllm, or module:function for your own rollout (see docs/training.md)."""
    prompts_per_step: int = 64
    """Prompts per step."""
    group_size: int = 1
    """Completions per prompt."""
    max_new_tokens: int = 4
    """The largest number of tokens in a completion, including its end token."""
    temperature: float = 1.0
    """Divides the logits in sampling and in the loss."""
    top_p: float = 1.0
    """Sample from the most likely tokens, whose probabilities add up to this.
    Loss, log-probabilities and teacher are over the kept tokens.
    Evaluation is greedy and ignores this."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the largest probability."""
    stop: tuple[str, ...] = ()
    """Tokens or texts that end a completion, besides the ends of model and tokenizer."""
    truncated: Literal["count", "mask"] = "count"
    """mask: completions that reach max_new_tokens without an end have no loss."""
    tokens_per_generation: int = 65536
    """The most tokens in sequences that are generated together, which bounds the cache."""
    rollout_correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weights between sampler and trainer, truncated or masked above 2.
    auto: truncate if their log-probabilities can differ (bfloat16, another sampler)."""
    score_centering: int | None = None
    """Subtract the sampler's expected score, from this many of its most likely tokens.
    Needs the objective reinforce, or one epoch and minibatch."""

    reward: tuple[str, ...] = ("exact_match",)
    """Rewards, which are added up: exact_match, math_verify, overlong, model:PATH, module:function.
    model:PATH is a reward model. overlong=0.5 gives a weight, and =0 only logs the reward.
    none: grpo learns only from a teacher."""
    reward_timeout: float | None = None
    """Seconds that a module:function may take for a completion, in its own process.
    math_verify, which always has one, may take 5 by default; what takes longer gets 0."""
    reward_failed: float | None = None
    """Reward of a completion on which a function fails. By default, a failure ends the run."""

    steps: int = 100
    """Rounds of sampling and learning."""
    epochs: int = 1
    """Passes over the samples of a step."""
    minibatches: int = 4
    """Optimizer steps per pass."""
    learning_rate: float | None = None
    """Learning rate of AdamW after the warm-up, by default 1e-6, or 1e-5 for a LoRA adapter.
    The default of the small new model is 2e-4."""
    warmup_steps: int = 5
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate after the warm-up; linear and cosine fall to a tenth at the last step."""
    max_grad_norm: float = 1.0
    """Clip gradients to this norm."""
    clip_low: float | None = None
    """Lower clip range of the ratio; by default the objective's."""
    clip_high: float | None = None
    """Upper clip range of the ratio; by default the objective's."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    warm_start_steps: int | None = None
    """Supervised steps at the start, on the records' demonstrations or answers.
    By default, only the small new model gets them."""

    tokens_per_micro_batch: int = 16384
    """The most tokens per forward and backward; a longer sequence is its own micro-batch."""
    attention: Literal["by_sequence", "flash_attention_2", "flex_attention", "sdpa", "eager"] = (
        "by_sequence"
    )
    """by_sequence: sdpa on each sequence of a packed row.
    The others belong to transformers, and recognize packed rows by their positions."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer, and recompute the layer in the backward."""
    offload_checkpoints: bool = False
    """Move the inputs that gradient_checkpointing keeps to pinned host memory."""
    mlp_tile: int | None = None
    """Run and recompute MLPs in tiles of this many tokens, and recompute the norms."""
    loss: Literal["linear", "logits"] = "linear"
    """linear: from hidden states and the LM head, without storing the logits.
    logits: from the model's logits, for heads that linear does not support."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: forward and backward run under autocast."""
    weights: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Dtype of the weights. nf4: linear layers have 4 bits below an adapter (QLoRA).
    Other weights are then in the precision. nf4 needs bitsandbytes."""
    rounding: Literal["master", "stochastic"] = "master"
    """How bfloat16 weights keep small updates. master: in float32 copies.
    stochastic: by stochastic rounding, which needs torchao."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_offloaded"] = "adamw"
    """adamw_8bit: 8-bit moments, which need torchao.
    adamw_offloaded: moments and float32 copies of the weights in host memory."""
    lora_rank: int | None = None
    """Train a LoRA adapter of this rank, scaled by 2, instead of the weights; needs peft."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get an adapter; all-linear means all but the head."""
    freeze_head: bool = False
    """Do not train the embeddings and the LM head."""

    out: str | None = None
    """Directory of the run; by default runs/LOOP-N with the next free number."""
    resume: bool = False
    """Continue a run from its last checkpoint: the run in OUT, by default the last one in runs."""
    seed: int = 0
    """Random seed of the run and of the embedded tasks."""
    eval_every: int = 5
    """Steps between evaluations on the held-out prompts; every second evaluation shows samples."""
    save_every: int = 50
    """Steps between checkpoints; the last two checkpoints are kept."""
    save_minutes: float | None = 10.0
    """Also save a checkpoint when this many minutes have passed since the last one."""
    device: str = "auto"
    """auto, cpu, cuda, ...; auto uses a GPU if there is one."""
    track: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers of the metrics; each is set up by its own package and environment variables."""
    plan: float | None = None
    """Print the predicted peak memory, and options that fit this many GiB, instead of training."""

    def __post_init__(self) -> None:
        """Check types and bounds, then what depends on more than one field."""
        if isinstance(self.chat_template, bool):  # as runs of earlier versions have it
            self.chat_template = () if self.chat_template else None
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # from a file
                setattr(self, field.name, value := tuple(value))
            check_type(field.name, value, field.type)
            check_bounds(field.name, value)
        if self.seed >= 2**31:
            raise ValueError(f"seed must be below 2**31, got {self.seed}")
        if self.out is not None and not (self.out.strip() and self.out.isprintable()):
            raise ValueError(f"out must be a path of printable characters, got {self.out[:80]!r}")
        if not 1 <= len(self.prompts) <= 2:
            raise ValueError(
                f"prompts must be a task, two files, or a data set, got {self.prompts}"
            )
        if self.columns[0] == self.columns[1]:
            raise ValueError(f"columns must be two different columns, got {self.columns}")
        chat_arguments(self.chat_template or ())
        self._check_memory()

    def _check_memory(self) -> None:
        nf4, stochastic = self.weights == "nf4", self.rounding == "stochastic"
        if stochastic and (self.weights != "bfloat16" or self.lora_rank is not None):
            raise ValueError(
                'rounding must be "master" unless bfloat16 weights are trained: others need no '
                f"rounding; got weights={self.weights}, lora_rank={self.lora_rank}"
            )
        if stochastic and self.optimizer == "adamw_offloaded":
            raise ValueError(
                'rounding must be "master" with optimizer=adamw_offloaded: it keeps float32 copies'
            )
        if nf4 and (self.lora_rank is None or self.model is None or self.warm_start_steps):
            raise ValueError(
                "weights=nf4 must be used with lora_rank, with a model and without "
                "warm_start_steps, since weights of 4 bits cannot be trained"
            )
        if nf4 and self.sampler == "vllm":
            raise ValueError(
                "sampler must not be vllm with weights=nf4: vllm needs merged weights, and an "
                "adapter cannot be merged into 4 bits"
            )
        if self.offload_checkpoints and not self.gradient_checkpointing:
            raise ValueError("offload_checkpoints must be off without gradient_checkpointing")
        targets, everything = self.lora_targets, ("all-linear",)
        if targets != everything and (
            self.lora_rank is None or not targets or everything[0] in targets
        ):
            raise ValueError(
                "lora_targets must be all-linear, or with lora_rank names of layers, got "
                f"{targets}, lora_rank={self.lora_rank}"
            )

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after the warm-up: the setting, or the default for its model."""
        of_given = 1e-6 if self.lora_rank is None else 1e-5
        return self.learning_rate or (2e-4 if self.model is None else of_given)

    @property
    def keeps_tokens(self) -> bool:
        """Whether the sampler keeps only a part of the vocabulary."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    @property
    def dtype(self) -> str:
        """The dtype of the weights that are not quantized."""
        return self.precision if self.weights == "nf4" else self.weights

    def _objective(self, preset: Any, **changes: Any) -> Objective:
        """Return a preset with the clips, the entropy bonus and the centering of the settings."""
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        changes |= {name: clip for name, clip in clips.items() if clip is not None}
        objective = Objective.preset(preset, entropy_coef=self.entropy_coef, **changes)
        if self.score_centering is None:
            return objective
        try:
            objective = replace(objective, score_centering=True)
        except ValueError as error:
            raise ValueError(f"score_centering must be None with this objective: {error}") from None
        if objective.surrogate != "reinforce" and (self.epochs, self.minibatches) != (1, 1):
            raise ValueError(  # it would need an old policy
                "score_centering must be None with several epochs or minibatches of a clipped "
                f"objective, got epochs={self.epochs}, minibatches={self.minibatches}"
            )
        return objective

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, without `resume` and `plan`."""
        settings = {k: v for k, v in asdict(self).items() if k not in ("resume", "plan")}
        settings["learning_rate"] = self.peak_learning_rate
        return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


@dataclass(kw_only=True)
class GrpoConfig(RunConfig):
    """Group relative policy optimization and its variants."""

    loop: ClassVar[str] = "grpo"

    group_size: int = 8
    """Completions per prompt, which are compared with one another."""
    objective: str = "grpo"
    """A preset of fastrl.Objective: grpo, dapo, dr_grpo, gspo, cispo, ..."""
    advantage: Literal["group", "batch", "unscaled", "leave_one_out"] | None = None
    """group, batch: the reward minus the group's mean, over the deviation of group or batch.
    unscaled: no division. leave_one_out: the reward minus the mean of the others (RLOO).
    The default is group, and unscaled for dr_grpo."""
    sampling_rounds: int = 1
    """Rounds of sampling, in which groups of other prompts replace groups of equal rewards.
    The rewards are compared without overlong. Above 1 this is DAPO's dynamic sampling."""
    teacher: str | None = None
    """A causal LM with the same tokens, which the policy also approaches on its own samples.
    It is a directory, a hub name, or a run, whose last checkpoint is used."""
    teacher_coef: float | None = None
    """Weight of the divergence from the teacher, by default 1; with 0 it is only logged."""
    teacher_beta: float | None = None
    """The divergence: 1 (the default) is KL(policy, teacher), 0 is KL(teacher, policy).
    Values between them are the generalized Jensen-Shannon divergence."""

    def __post_init__(self) -> None:
        """Check what depends on more than one field."""
        super().__post_init__()
        self._check_teacher()
        if self.group_size < 2 and self.has_reward:
            raise ValueError(f"group_size must be at least 2, got {self.group_size}")
        if self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches must be at most prompts_per_step, {self.prompts_per_step}, since "
                f"each has whole groups; got {self.minibatches}"
            )
        self.policy_objective()

    def _check_teacher(self) -> None:
        if self.teacher is None and (self.teacher_coef, self.teacher_beta) != (None, None):
            raise ValueError("teacher must be given with teacher_coef or teacher_beta")
        if self.teacher is not None:
            self.teacher_coef = 1.0 if self.teacher_coef is None else self.teacher_coef
            self.teacher_beta = 1.0 if self.teacher_beta is None else self.teacher_beta
        if not self.has_reward and (len(self.reward) > 1 or not self.teacher_coef):
            raise ValueError(
                "reward must be none alone, with a teacher and teacher_coef above 0, or name "
                f"functions, got {self.reward}, teacher={self.teacher}"
            )
        rewarded = ("advantage", "sampling_rounds", "clip_low", "clip_high", "rollout_correction")
        for name in (*rewarded, "reward_timeout", "reward_failed", "score_centering"):
            if not self.has_reward and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name} must be left at its default with reward none")

    @property
    def has_reward(self) -> bool:
        """Whether the policy learns from rewards, not from a teacher alone."""
        return "none" not in self.reward

    def policy_objective(self) -> Objective:
        """Return the preset with the given fields."""
        preset: Any = self.objective
        changes: dict[str, Any] = {"teacher_coef": self.teacher_coef or 0.0}
        if Objective.preset(preset).aggregation == "seq-mean-token-sum-norm":
            changes["length_norm"] = float(self.max_new_tokens)  # the same for every batch
        return self._objective(preset, kl_coef=self.kl_coef, **changes)


@dataclass(kw_only=True)
class PpoConfig(RunConfig):
    """Proximal policy optimization."""

    loop: ClassVar[str] = "ppo"

    prompts_per_step: int = 512
    """Prompts per step."""
    kl_coef: float = 0.01
    """Weight of the KL penalty in the reward, relative to the initial model."""
    advantage: Literal["reward", "value", "gae", "group"] = "gae"
    """reward: the rewards that follow. value: these minus the value model.
    gae: generalized advantage estimates. group: compared within the prompt, without values."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Decay of the generalized advantage estimates."""
    value_model: Literal["shared", "separate"] = "shared"
    """shared: a head on the policy's last hidden states.
    separate: its own backbone, which starts as a copy of the policy's backbone."""
    kl_target: float | None = None
    """Adapt kl_coef so that the KL per token approaches this."""
    stop_kl: float | None = None
    """Skip the other updates of a step once a minibatch's KL per token exceeds this.
    It is the KL to the sampling policy."""

    def __post_init__(self) -> None:
        """Check what depends on more than one field."""
        super().__post_init__()
        completions = self.prompts_per_step * self.group_size
        if self.minibatches > completions:
            raise ValueError(
                f"minibatches must be at most the samples of a step, {completions}, got "
                f"{self.minibatches}"
            )
        if self.advantage == "group" and self.group_size == 1:
            raise ValueError("group_size must be at least 2 with advantage=group, got 1")
        if self.value_model == "separate" and (not self.has_values or self.lora_rank is not None):
            raise ValueError(
                "value_model must be shared with lora_rank, since a copy of the backbone takes the "
                f"memory that the adapter saves, and without values; got {self.advantage}"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef must be above 0 with kl_target, which multiplies it")
        self.policy_objective()

    @property
    def has_values(self) -> bool:
        """Whether a value model is trained."""
        return self.advantage in ("value", "gae")

    def policy_objective(self) -> Objective:
        """Return the clipped loss of PPO; its KL is in the rewards."""
        return self._objective("ppo")
