"""Peak memory of a training step beside what `--plan` predicts for it.

    python bench/train_memory.py [NAME ...]

Each number is from a separate process on the CPU, in float32 unless a configuration says otherwise:
a model of random weights makes a step on a short batch, so that the optimizer has its state, and
then a step on the measured batch, whose peak beyond weights and optimizer state is measured:
forward, loss and backward of every micro-batch, then clipping and AdamW. Gradients count. The
process returns freed blocks to the kernel at once (MALLOC_MMAP_THRESHOLD_), or the peak would
contain what glibc keeps for later. `python -m fastrl.train.grpo --plan` predicts from the settings
alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastrl.bench.memory import Peak

ROOT = Path(__file__).parent.parent
WIDTH = 256
PROMPT = 64  # tokens
GROUP = 8  # completions of a prompt, if there are as many
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the configuration's class, its sizes
    "b": ("Qwen3", {"num_hidden_layers": 8, "vocab_size": 8000}),
    "qwen3": ("Qwen3", {}),
    "untied": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 256, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3Text",
        {
            "vocab_size": 64000,
            "intermediate_size": 4 * WIDTH,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "num_hidden_layers": 6,
            "sliding_window": 256,
        },
    ),
}
EIGHT = 8 * [512]
LORA = {"lora_rank": 8}
HALF = {"weights": "bfloat16", "precision": "bfloat16"}
CHECKPOINTS = {"gradient_checkpointing": True}
#: model, loop, lengths, settings
CONFIGURATIONS: dict[str, tuple[str, str, list[int], dict[str, Any]]] = {
    "lora": ("qwen3", "grpo", EIGHT, LORA),
    "lora-q-v": ("qwen3", "grpo", EIGHT, {**LORA, "lora_targets": ["q_proj", "v_proj"]}),
    "8-bit": ("qwen3", "grpo", [512, 512], {"optimizer": "adamw_8bit"}),
    "lora-bfloat16": ("qwen3", "grpo", EIGHT, {**LORA, **HALF, **CHECKPOINTS}),
    "few-rows": ("qwen3", "grpo", [256], LORA),
    "small-vocabulary": ("b", "grpo", [512, 512], CHECKPOINTS),
    "checkpointing": ("qwen3", "grpo", EIGHT, CHECKPOINTS),
    "tiles": ("qwen3", "grpo", EIGHT, {**CHECKPOINTS, "mlp_tile": 512}),
    "master": ("qwen3", "grpo", EIGHT, HALF),
    "stochastic": ("qwen3", "grpo", [512, 512], {**HALF, "rounding": "stochastic"}),
    "autocast": ("qwen3", "grpo", EIGHT, {"precision": "bfloat16"}),
    "logits": ("qwen3", "grpo", [512, 512], {"loss": "logits"}),
    "kl": ("qwen3", "grpo", EIGHT, {"kl_coef": 0.1, "tokens_per_micro_batch": 1024}),
    "freeze-head": ("qwen3", "grpo", EIGHT, {"freeze_head": True}),
    "ppo": ("qwen3", "ppo", EIGHT, {}),
    "ppo-logits": ("llama", "ppo", [512, 512], {"loss": "logits"}),
    "llama": ("llama", "grpo", EIGHT, {}),
    "gemma3": ("gemma3", "grpo", [1024, 1024], {}),
    "untied": ("untied", "grpo", EIGHT, {"tokens_per_micro_batch": 2048}),
    "llama-lora-q-v": (
        "llama",
        "grpo",
        EIGHT,
        {**LORA, **HALF, **CHECKPOINTS, "lora_targets": ["q_proj", "v_proj"]},
    ),
    "llama-autocast": ("llama", "grpo", EIGHT, {"precision": "bfloat16", **CHECKPOINTS}),
    "ragged": ("llama", "grpo", [900, 700, 640, 512, 400, 300, 200, 100], {}),
    "qwen2": ("qwen2", "ppo", EIGHT, {"freeze_head": True}),
    "mistral": ("mistral", "grpo", [2048, 2048], {"tokens_per_micro_batch": 2048}),
    "gemma3-lora": ("gemma3", "grpo", [2048], {**LORA, **HALF, **CHECKPOINTS, "mlp_tile": 512}),
}


class Case(NamedTuple):
    """What a process measures."""

    model: str
    loop: str  # grpo or ppo
    lengths: list[int]  # tokens of each sequence, its prompt included
    settings: dict[str, Any]


def main() -> None:
    given = _options()
    if given.case:
        print(json.dumps(_measure(Case(*json.loads(given.case)))))
        return
    print("| configuration | measured, MB | predicted, MB | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name in given.configurations:
        case = Case(*CONFIGURATIONS[name])
        measured, predicted = _run(case), _predicted(case) / 1e6
        ratio = "" if measured.startswith("not") else f"{predicted / float(measured):.2f}"
        print(f"| {name} | {measured} | {predicted:.1f} | {ratio} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "configurations", nargs="*", default=[*CONFIGURATIONS], metavar="NAME", help="default: all"
    )
    parser.add_argument("--case", help="measure this one, here: JSON")
    given = parser.parse_args()
    if unknown := {*given.configurations} - {*CONFIGURATIONS}:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CONFIGURATIONS)}")
    return given


def _predicted(case: Case) -> float:
    from fastrl.train.model_shape import Shape
    from fastrl.train.plan import plan

    with tempfile.TemporaryDirectory() as folder:
        _model_config(case).save_pretrained(folder)
        config = _config(case, model=folder)
        found = plan(
            config,
            Shape(config),
            tokens=max(case.lengths),
            total=sum(case.lengths) - PROMPT * (len(case.lengths) - -(-len(case.lengths) // GROUP)),
            completion=max(case.lengths) - PROMPT,
            device="cpu",
        )
    return found.learning - found.weights - found.optimizer


def _config(case: Case, **changes: Any) -> Any:
    from fastrl.train.config import GrpoConfig, PpoConfig

    if case.loop == "grpo":
        return GrpoConfig(**case.settings, **changes)
    changes |= {"kl_coef": 0.0}  # no reference
    return PpoConfig(**case.settings, **changes)


def _run(case: Case) -> str:
    """The MB of a case, measured in a process of its own; or why there is no number."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    env = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | env
    )
    if child.returncode:
        return "not run: " + (child.stderr.strip().splitlines() or ["no message"])[-1][:120]
    return f"{json.loads(child.stdout.splitlines()[-1]) / 1e6:.0f}"


def _measure(case: Case) -> int:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    step = _step(case)
    step([256, 200])
    with Peak(torch.device("cpu")) as peak:
        step(case.lengths)
    if peak.bytes is None:
        raise RuntimeError("the peak of resident memory can be reset on Linux alone")
    return peak.bytes


def _model_config(case: Case) -> Any:
    import transformers

    return getattr(transformers, f"{MODELS[case.model][0]}Config")(**_sizes(case))


def _sizes(case: Case) -> dict[str, Any]:
    return {
        "vocab_size": 32000,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2**16,
        "tie_word_embeddings": True,
        **MODELS[case.model][1],
    }


def _step(case: Case) -> Any:
    """A function that makes a step of the loop on random sequences of the given lengths."""
    import transformers

    from fastrl import Objective, value_loss
    from fastrl.train import adapters
    from fastrl.train.optimizers import apply, make_optimizer
    from fastrl.train.packing import normalizer
    from fastrl.train.policy import batches, completion_logprobs, policy_loss, policy_outputs
    from fastrl.train.recomputation import save_memory
    from fastrl.train.value_model import ValueModel

    config = _config(case)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        _model_config(case), dtype=getattr(torch, config.weights)
    )
    if config.freeze_head:
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.requires_grad_(False)
    if config.lora_rank:
        model = adapters.attach(model, config, "random weights")
    objective = config.policy_objective() if case.loop == "grpo" else Objective.preset("ppo")
    critic = ValueModel(model, config) if case.loop == "ppo" else None
    parameters = [*model.parameters(), *(critic.parameters() if critic else ())]
    save_memory(model, config)
    reference = copy.deepcopy(model).requires_grad_(False) if config.kl_coef > 0 else None
    optimizer = make_optimizer(parameters, config)

    def step(lengths: list[int]) -> None:
        rollout = _rollout(lengths, model.config.vocab_size)
        mask, values = rollout.mask, torch.randn(rollout.mask.shape)
        advantages = torch.randn(mask.shape if case.loop == "ppo" else len(mask))
        denominator = normalizer(mask, objective.aggregation)
        rows, ref = torch.arange(len(mask)), None
        if reference is not None:
            ref = completion_logprobs(reference, rollout, rows, config)
        for batch in batches(rollout, rows, mask, config):
            outputs = policy_outputs(model, batch, config)
            loss = policy_loss(
                outputs,
                batch,
                config,
                batch.take(advantages) if critic else advantages[batch.rows],
                old_logprobs=batch.take(rollout.logprobs),
                ref_logprobs=None if ref is None else batch.take(ref),
                objective=objective,
                normalizer=denominator,
            ).loss
            if critic:
                loss = (
                    loss
                    + value_loss(
                        critic(outputs, batch, config),
                        batch.take(values),
                        torch.ones_like(batch.token_ids, dtype=torch.bool),
                        old_values=batch.take(values),
                        clip=0.2,
                        normalizer=denominator,
                    ).loss
                )
            if critic is None:  # grpo.py does not hold on to the outputs, ppo.py does
                del outputs
            loss.backward()
        apply(optimizer, config, 0)

    return step


def _rollout(lengths: list[int], vocabulary: int) -> Any:
    """Random completions, each with its length; GROUP of them continue one prompt."""
    from fastrl.train.rollout import Rollout

    sampled = torch.tensor(lengths)[:, None] - PROMPT
    shape = (len(lengths), int(sampled.max()))
    mask = torch.arange(shape[1]) < sampled
    groups = -(-len(lengths) // GROUP)
    return Rollout(
        prompts=torch.randint(vocabulary, (groups, PROMPT)).tolist(),
        prompt_of=torch.arange(len(lengths)) // GROUP,
        token_ids=torch.randint(vocabulary, shape),
        mask=mask,
        logprobs=torch.full(shape, -float(torch.tensor(vocabulary).log())).where(mask, 0.0),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


if __name__ == "__main__":
    main()
