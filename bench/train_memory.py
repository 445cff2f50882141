"""Peak memory of one training step, beyond the weights and the optimizer's state.

    python bench/train_memory.py [--model a b] [--tokens 4096 16384 32768] [--loop grpo ppo trl]
        [--settings off checkpointing tiles on]
    python bench/train_memory.py --configurations [NAME ...]

Each number is from a separate process on the CPU, in float32: a model of random weights makes a
step on a short batch, so that the optimizer has its state, resets the kernel's high-water mark of
resident memory, and makes a step on the measured batch: forward, loss and backward of every
micro-batch, then clipping and AdamW. Gradients count. The process returns freed blocks to the
kernel at once (MALLOC_MMAP_THRESHOLD_), or the mark would contain what glibc keeps for later.
In brackets: what `python -m fastrl.train.grpo --plan` predicts, from the settings alone.
`--configurations` compares both for other settings and models, one line each; by default all.

The row "trl" is `GRPOTrainer.compute_loss` with its backward, with TRL's default settings (among
them gradient checkpointing) in float32.
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
from memory import _peak, _reset_peak

ROOT = Path(__file__).parent.parent
WIDTH = 256
PROMPT = 64  # tokens
GROUP = 8  # completions of a prompt, if there are as many
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the configuration's class, its sizes
    "a": ("Qwen3", {"num_hidden_layers": 4, "vocab_size": 151936}),
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
WHOLE = {"tokens_per_micro_batch": 2**30}
SAVING = {"gradient_checkpointing": True, "mlp_tile": 1024}
SETTINGS: dict[str, dict[str, Any]] = {
    "off": WHOLE,  # everything off, one micro-batch
    "checkpointing": {**WHOLE, "gradient_checkpointing": True},
    "tiles": {**WHOLE, **SAVING},
    "on": {**SAVING, "tokens_per_micro_batch": 4096},
}
RAGGED = [1024] + 15 * [128]  # 2,944 tokens; padded they were 16,384
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
    loop: str  # grpo, ppo or trl
    lengths: list[int]  # tokens of each sequence, its prompt included
    settings: dict[str, Any]


def main() -> None:
    given = _options()
    if given.case:
        print(json.dumps(_measure(Case(*json.loads(given.case)))))
        return
    if given.configurations is not None:
        print(
            "| configuration | measured, MB | predicted, MB | ratio |\n| --- | ---: | ---: | ---: |"
        )
        for name in given.configurations or CONFIGURATIONS:
            case = Case(*CONFIGURATIONS[name])
            measured, predicted = _run(case), _predicted(case) / 1e6
            ratio = "" if measured.startswith("not") else f"{predicted / float(measured):.2f}"
            print(f"| {name} | {measured} | {predicted:.1f} | {ratio} |", flush=True)
        return
    print(
        "MB (1e6 bytes) beyond weights and optimizer. off: one micro-batch, nothing recomputed; "
        "checkpointing: with gradient_checkpointing; tiles: and mlp_tile 1024; on: and "
        f"tokens_per_micro_batch 4096. torch {torch.__version__}\n"
    )
    for model in given.model:
        _, sizes = MODELS[model]
        layers, vocabulary = sizes["num_hidden_layers"], sizes["vocab_size"]
        print(f"{layers} layers, H = {WIDTH}, V = {vocabulary:,}:\n")
        print("| loop | sequences | settings |", *(f"{n:,} tokens |" for n in given.tokens))
        print("| --- | --- | --- |", *("---: |" for _ in given.tokens))
        for loop in given.loop:
            for sequences, settings in _rows(loop, given.settings):
                print(f"| {loop} | {sequences} | {settings}", end=" ", flush=True)
                for n in given.tokens:
                    case = Case(model, loop, _lengths(sequences, n), SETTINGS.get(settings, {}))
                    cell = _cell(case) if loop != "trl" or n == min(given.tokens) else ""
                    print(f"| {cell}", end=" ", flush=True)
                print("|")
        for loop in given.loop:
            if loop != "trl" and "off" in given.settings:
                ragged = _run(Case(model, loop, RAGGED, WHOLE))
                full = _run(Case(model, loop, [sum(RAGGED) // 2] * 2, WHOLE))
                print(
                    f"\n{loop}, {sum(RAGGED):,} tokens, off: {ragged} MB in a sequence "
                    f"of 1,024 and 15 of 128, {full} MB in two sequences."
                )
        print()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768])
    loops = ["grpo", "ppo", "trl"]
    parser.add_argument("--loop", nargs="+", choices=loops, default=loops)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--configurations", nargs="*", choices=CONFIGURATIONS, metavar="NAME")
    parser.add_argument("--case", help="measure this one, here: JSON")
    return parser.parse_args()


def _rows(loop: str, settings: list[str]) -> list[tuple[str, str]]:
    """The sequences and settings of the rows of a loop."""
    if loop == "trl":
        return [("of 1,024", "its defaults")]
    return [(sequences, name) for sequences in ("of 1,024", "one") for name in settings]


def _lengths(sequences: str, tokens: int) -> list[int]:
    return [tokens] if sequences == "one" else [1024] * (tokens // 1024)


def _cell(case: Case) -> str:
    """Measured, and what `fastrl.train.plan` predicts."""
    measured = _run(case)
    return measured if case.loop == "trl" else f"{measured} ({_predicted(case) / 1e6:,.0f})"


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
    step = _trl_step(case) if case.loop == "trl" else _step(case)
    step([256, 200])
    before = _reset_peak()
    step(case.lengths)
    return _peak() - before


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


def _trl_step(case: Case) -> Any:
    """A function that calls TRL's loss and its backward; TRL's optimizer has no part in it."""
    sys.path.insert(0, str(ROOT))
    from tests.integrations.trl.runs import make_trainer, save_model

    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", "Qwen3Config", **_sizes(case))
        trainer = make_trainer(
            path,
            output_dir=folder,
            gradient_checkpointing=True,
            model_init_kwargs={"dtype": "float32"},
        )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    # as `trainer.train()` does; transformers 5 has renamed the method
    checkpointed = getattr(model, "activation_checkpointing_enable", None)
    (checkpointed or model.gradient_checkpointing_enable)()

    def step(lengths: list[int]) -> None:
        ids = torch.randint(4, trainer.model.config.vocab_size, (len(lengths), max(lengths)))
        shape = (len(lengths), max(lengths) - PROMPT)
        batch = {
            "prompt_ids": ids[:, :PROMPT],
            "prompt_mask": torch.ones(len(lengths), PROMPT, dtype=torch.long),
            "completion_ids": ids[:, PROMPT:],
            "completion_mask": torch.ones(shape, dtype=torch.long),
            "advantages": torch.randn(len(lengths)),
            "old_per_token_logps": torch.full(shape, -9.0),
            "num_items_in_batch": torch.tensor(shape[0] * shape[1]),
        }
        trainer.compute_loss(model, batch).backward()
        model.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
