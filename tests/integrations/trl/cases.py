"""The options with which each trainer of TRL is compared with fastrl and without."""


def rollout(prompts, trainer):
    """Completions as an engine would return them, whose log-probabilities are not the policy's."""
    completions = [[4 + (7 * i + 5 * j) % 50 for j in range(3 + i)] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-3.5 for _ in ids] for ids in completions],
    }


ACCUMULATED = {"gradient_accumulation_steps": 2}
TWICE = {"num_iterations": 2, "epsilon": 0.05}
IN_4 = {"gradient_accumulation_steps": 4}
KL = {"beta": 0.04}
CISPO = {"loss_type": "cispo", **TWICE, "epsilon_high": 1.02}
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", **TWICE}
OTHER = {"loss_type": "dapo", **KL, **TWICE}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 3.5, "entropy_coef_delta": 0.02}
OF_ENGINE = {"rollout_func": rollout, "off_policy_mask_threshold": 0.2, "epsilon": 0.05, **KL}
MASKED = {"off_policy_mask_threshold": 0.01}
#: Every loss on new and old completions, with KL and without, in one and several micro-batches.
LOSSES = {
    "grpo": {**KL, **IN_4},
    "grpo, twice": {"loss_type": "grpo", **TWICE},
    "bnpo": {"loss_type": "bnpo", **IN_4, **TWICE},
    "bnpo and KL": {"loss_type": "bnpo", **KL, **TWICE},
    "dr_grpo": {"loss_type": "dr_grpo", **KL, **ACCUMULATED, **TWICE},
    "dapo": {"loss_type": "dapo"},
    "dapo, twice": {"loss_type": "dapo", **IN_4, **TWICE},
    "cispo": {**CISPO, **IN_4},
    "cispo and KL": {**CISPO, **KL},
    "gspo": GSPO,
    "gspo and KL": {**GSPO, **KL, **ACCUMULATED},
}
#: Those that may clip nothing.
UNCLIPPED = {
    "sapo": {"loss_type": "sapo", **KL, **ACCUMULATED, **TWICE},
    "luspo": {**OTHER, "loss_type": "luspo"},
    "delta": {**OTHER, "delta": 1.1},
    "a temperature": {**OTHER, "temperature": 0.7},
    "truncation": {**OTHER, "mask_truncated_completions": True, "max_completion_length": 9},
    "a low cispo cap": {**OTHER, "loss_type": "cispo", "epsilon_high": 0.9},
    "plain KL": {**OTHER, "use_bias_correction_kl": False},
    "off-policy mask": {**OTHER, **MASKED},
    "GSPO, off-policy mask": {**OTHER, **MASKED, "importance_sampling_level": "sequence"},
    "top entropy": {**OTHER, "top_entropy_quantile": 0.4},
    "entropy bonus": {**OTHER, "entropy_coef": 0.02, **ACCUMULATED},
    "adaptive bonus": {**OTHER, **ADAPTIVE, **ACCUMULATED, "max_steps": 10},
    # the mask measures the distance from the engine; TRL sends old log-probabilities the second
    # time alone
    "an engine": OF_ENGINE,
    "an engine, twice": {**OF_ENGINE, "num_iterations": 2},
}
#: Those that TRL computes, from log-probabilities.
UNFUSED = {
    "vespo": {**OTHER, "loss_type": "vespo"},
    "a negative beta": {**OTHER, "beta": -0.01},
    "top entropy and a bonus": {**OTHER, "top_entropy_quantile": 0.4, "entropy_coef": 0.02},
}
IN_PARTS = {"per_device_train_batch_size": 2, **ACCUMULATED}
CHECKPOINTING = {"gradient_checkpointing": True}
ADAPTED = {"peft_config": {"r": 2}, "learning_rate": 0.1}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
COPY = {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
SCORES = {"fused": False}
OF_HEAD = {**LORA, "target_modules": ["q_proj", "lm_head"]}
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}
PREFIX = {**PROMPT, "peft_type": "PREFIX_TUNING"}
PROMPTS = {"learning_rate": 0.05, "beta": 0.0, "num_iterations": 2, "epsilon": 0.05}
CLIPPED = {"num_iterations": 2, "epsilon": 0.1}
FULL = {"distillation_mode": "full_logits", "distillation_alpha": 0.5}
OWN = {"lmbda": 1.0, **ACCUMULATED}
OF_DATA = {"beta": 0.0, "lmbda": 0.0, "temperature": 0.7}
TOKENS = {"distillation_objective": "iw_opd"}
SAMPLED = {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}
TOP = {"distillation_mode": "topk_logits", "distillation_topk": 5}
LIVE = {"teacher_model_kind": "live"}
BASE = {"teacher_model_kind": "base"}
OF_SEQUENCES = {"importance_sampling_level": "sequence"}
RATIOS = {"num_iterations": 2, "gradient_accumulation_steps": 1}
#: Options of each trainer; `use` are those of `use_fastrl`.
CASES = {
    "GRPO": {
        **LOSSES,
        **UNCLIPPED,
        **UNFUSED,
        "LoRA": {**KL, "peft_config": LORA},
        "LoRA, log-probabilities": {**KL, "peft_config": LORA, "use": SCORES},
        "a copy of the head": {**KL, "peft_config": COPY},
        "a copy of the head, log-probabilities": {**KL, "peft_config": COPY, "use": SCORES},
        "prompt": {**PROMPTS, "peft_config": PROMPT},
        "prompt and KL": {**PROMPTS, "peft_config": PROMPT, **KL},
        "prefix": {**PROMPTS, "peft_config": PREFIX},
        "prefix and KL": {**PROMPTS, "peft_config": PREFIX, **KL},
    },
    "RLOO": {
        "no KL": {**CLIPPED, "beta": 0.0},
        "KL": {**CLIPPED, "beta": 0.04},
    },
    "SFT": {
        "in parts": IN_PARTS,
        "dft": {"loss_type": "dft"},
        "packed": {"packing": True, "max_length": 8, "packing_strategy": "wrapped"},
        "unpadded": {"completion_only_loss": False, "padding_free": True, "max_length": None},
        "smoothed": {"label_smoothing_factor": 0.1},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
        "prompt": {**ADAPTED, "peft_config": PROMPT},
    },
    "DPO": {
        "": {},
        "weights": {"use_weighting": True, "ld_alpha": 0.5, **IN_PARTS},
        "several losses": {"loss_type": ["sigmoid", "sft", "ipo"]},
        "precomputed": {"precompute_ref_log_probs": True},
    },
    "KTO": {
        "": {},
        "unpaired": {"loss_type": "apo_zero_unpaired", **IN_PARTS},
        "precomputed": {"precompute_ref_log_probs": True},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
        "prompt": {**ADAPTED, "peft_config": PROMPT},
    },
    "CPO": {
        "in parts": IN_PARTS,
        "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0},
        "ipo": {"loss_type": "ipo"},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
    },
    "ORPO": {"in parts": IN_PARTS, "LoRA": {**ADAPTED, **CHECKPOINTING}},
    "TPO": {
        "in parts": IN_PARTS,
        "no references": {"loss_type": "tpo-l", "tpo_alpha": 0.0},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
    },
    "A2PO": {"": {}},
    "OnlineDPO": {
        "": {},
        "truncated": {"max_length": 8},
        "no prompts": {"max_length": 5},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
    },
    "Distillation": {
        "forward": {"beta": 0.0},
        "JS": {"beta": 0.3, "temperature": 0.7},
        "reverse, accumulated": {"beta": 1.0, **ACCUMULATED},
        "bf16, whose autocast TRL loses": {"beta": 1.0, "bf16": True},
        "checkpointing": {"beta": 0.5, **CHECKPOINTING},
        "LoRA": {"beta": 0.5, "peft_config": LORA},
    },
    "GKD": {
        "forward, its own": {"beta": 0.0, "lmbda": 1.0},
        "JS of the data": {"beta": 0.5, "lmbda": 0.0, **ACCUMULATED},
        "reverse": {"beta": 1.0, "temperature": 0.5},
        "the teacher's": {"lmbda": 0.0, "seq_kd": True},
        "LoRA": {"peft_config": LORA, **CHECKPOINTING},
    },
    "GOLD": {
        "forward": OF_DATA,
        "its own": {"beta": 0.3, **OWN},
        "reverse": {"beta": 1.0, "temperature": 1.5},
    },
    "IWOPD": {
        "tokens": {**TOKENS, "iw_opd_gamma": 0.7},
        "tokens, accumulated": {**TOKENS, **ACCUMULATED, "temperature": 0.7},
        "forward": OF_DATA,
        "its own": {"beta": 0.3, **OWN},
        "reverse": {"beta": 1.0},
    },
    "SDFT": {
        "sampled": SAMPLED,
        "full": {"distillation_alpha": 0.3, "temperature": 0.7},
        "forward, ratios": {**RATIOS, "distillation_alpha": 0.0},
        "top": {**TOP, **ACCUMULATED},
        "top and a tail": {**TOP, "distillation_add_tail": True},
        "live": LIVE,
        "live, top": {**TOP, **LIVE},
        "base, LoRA": {**BASE, "peft_config": LORA},
        "base, LoRA on the head": {**BASE, "peft_config": OF_HEAD},
        "average, LoRA on the head": {**TOP, "teacher_model_kind": "ema", "peft_config": OF_HEAD},
        "average": {"teacher_model_kind": "ema", "teacher_update_rate": 0.5},
        "tokens skipped": {"num_loss_tokens_to_skip": 2},
    },
    "SDPO": {
        "sampled, ratios": RATIOS,
        "full and a policy loss": {**RATIOS, **FULL, "distillation_weight": 0.4},
        "sequences": {**OF_SEQUENCES, **RATIOS, "distillation_weight": 0.0},
        "top": {**TOP, "distillation_alpha": 1.0},
        "live, LoRA": {**LIVE, "peft_config": LORA},
    },
}
