"""Peak memory of a training step beside what `--plan` predicts for it.

    python bench/studies/train_memory.py [NAME ...]

Each number is from a separate process on the CPU, in which `fastrl grpo` or `fastrl ppo` trains a
model of random weights for two steps, on random completions. The peak of the second step is
measured from the end of its sampling: log-probabilities, forward, loss and backward of every
micro-batch, then clipping and AdamW, beyond weights and optimizer state. Gradients count. The
process returns freed blocks to the kernel at once (MALLOC_MMAP_THRESHOLD_), or the peak would
contain what glibc keeps for later. The prediction has the arguments of `--plan`: the settings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
WIDTH = 256
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2**16,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
GEMMA3 = {"vocab_size": 64000, "intermediate_size": 4 * WIDTH, "num_key_value_heads": 1}
GEMMA3 |= {"head_dim": 128, "num_hidden_layers": 6, "sliding_window": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the configuration's class, its sizes
    "q8": ("Qwen3", {"vocab_size": 8000, "num_hidden_layers": 8, "tie_word_embeddings": False}),
    "q151": ("Qwen3", {"vocab_size": 151936}),
    "qwen3": ("Qwen3", {}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 256, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3Text", GEMMA3),
    **{
        name.lower(): (name, {})
        for name in ("Phi3", "Olmo2", "Cohere", "Granite", "Glm4", "SmolLM3", "Starcoder2")
    },
}
NF4 = {"lora_rank": 16, "gradient_checkpointing": True, "weights": "nf4"}
HALF = {"weights": "bfloat16", "precision": "bfloat16"}
#: Words for several settings.
NAMED: dict[str, dict[str, Any]] = {
    "recomputed": {"gradient_checkpointing": True},
    "on": {"gradient_checkpointing": True, "mlp_tile": 512},
    "half": HALF,
    "stochastic": {**HALF, "rounding": "stochastic"},
    "8-bit": {"optimizer": "adamw_8bit"},
    "nf4": NF4,
    "lora": {"lora_rank": 16},
    "down": {"lora_rank": 32, "lora_targets": ["o_proj", "down_proj"]},
    "q-v": {"lora_rank": 8, "lora_targets": ["q_proj", "v_proj"]},
}
#: Name, model, loop, prompts x completions of each, tokens of a prompt + of a completion; settings,
#: `rows` being the tokens of a micro-batch, and `shortest` those of the shortest completion.
TABLE = """
# of a report of users, rebuilt
rows-of-1k           q8         grpo  2 x 8   64 + 448   on rows=1024
rows-of-16k          q8         grpo  4 x 8   64 + 448   on rows=16384
large-vocabulary-4k  q151       grpo  1 x 8   64 + 448   on rows=1024
large-vocabulary-6k  q151       grpo  1 x 12  64 + 448   on rows=1024
lora-o-down          q151       grpo  1 x 4   64 + 448   down
lora-rows-of-2k      q151       grpo  1 x 8   64 + 448   lora recomputed rows=2048
nf4                  q151       grpo  1 x 4   64 + 448   nf4
nf4-bfloat16         q151       grpo  1 x 4   64 + 448   nf4 mlp_tile=512 precision=bfloat16
8-bit                q151       grpo  1 x 4   64 + 192   8-bit recomputed
8-bit-freeze-head    q8         grpo  1 x 4   64 + 448   on 8-bit freeze_head
8-bit-stochastic     q8         grpo  1 x 4   64 + 448   stochastic 8-bit
long-prompts         llama      grpo  1 x 16  1000 + 200 recomputed
ragged               llama      grpo  1 x 8   64 + 1500  recomputed rows=2048 shortest=20
gemma3               gemma3     grpo  2 x 8   64 + 448   on rows=2048
kl                   q8         grpo  4 x 4   64 + 448   kl_coef=0.1 minibatches=2 rows=1024
ppo                  q8         ppo   8 x 1   64 + 448   on
ppo-lora-kl          q151       ppo   4 x 1   64 + 448   lora kl_coef=0.1
ppo-bfloat16         q8         ppo   8 x 1   64 + 448   half advantage=reward
tiles                q8         grpo  1 x 8   64 + 448   mlp_tile=512
logits-lora          q8         grpo  1 x 8   64 + 448   lora recomputed loss=logits
top-k                q8         grpo  1 x 4   64 + 448   top_k=30 entropy_coef=0.01
plain                q8         grpo  1 x 8   64 + 448
phi3                 phi3       grpo  1 x 8   64 + 96
olmo2                olmo2      grpo  1 x 8   64 + 96
cohere               cohere     grpo  1 x 8   64 + 96
granite              granite    grpo  1 x 8   64 + 96
glm4                 glm4       grpo  1 x 8   64 + 96
smollm3              smollm3    grpo  1 x 8   64 + 96
starcoder2           starcoder2 grpo  1 x 8   64 + 96
# written down before the rules that predict them
qwen2-rows           qwen2      grpo  2 x 4   100 + 300  rows=1500
llama-ppo-lora       llama      ppo   8 x 1   128 + 256  lora_rank=8 minibatches=2 rows=1024
mistral-stochastic   mistral    grpo  4 x 4   32 + 224   stochastic recomputed
gemma3-8-bit         gemma3     grpo  1 x 8   256 + 256  8-bit recomputed
q8-kl                q8         grpo  8 x 8   64 + 192   kl_coef=0.05 rows=4096
lora-q-v             q151       grpo  2 x 8   500 + 100  q-v recomputed rows=3000
phi3-ppo             phi3       ppo   4 x 4   50 + 350   advantage=group freeze_head
olmo2-logits         olmo2      grpo  1 x 4   100 + 200  loss=logits
autocast             qwen3      grpo  4 x 8   64 + 448   on precision=bfloat16
smollm3-ppo-nf4      smollm3    ppo   4 x 2   200 + 200  nf4
"""


class Case(NamedTuple):
    """What a process measures."""

    model: str
    loop: str
    shape: list[int]
    settings: dict[str, Any]
    shortest: int | None = None


def case_of(line: str) -> tuple[str, Case]:
    """Return a name and its case."""
    name, model, loop, prompts, _, group, prompt, _, completion, *words = line.split()
    settings: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        read = float if "." in value else int if value.isdecimal() else str
        settings |= NAMED.get(key) or {key: read(value) if value else True}
    if "rows" in settings:
        settings["tokens_per_micro_batch"] = settings.pop("rows")
    shortest = settings.pop("shortest", None)
    shape = [int(x) for x in (prompts, group, prompt, completion)]
    return name, Case(model, loop, shape, settings, shortest)


CONFIGURATIONS = dict(case_of(line) for line in TABLE.splitlines() if line and line[0] != "#")


def main() -> None:
    given = _options()
    if given.run:
        print(json.dumps(_measure(CONFIGURATIONS[given.configurations[0]], Path(given.run))))
        return
    print("| configuration | measured, MB | predicted, MB | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name in given.configurations:
        with tempfile.TemporaryDirectory() as folder:
            _prepare(CONFIGURATIONS[name], Path(folder))
            predicted = _predicted(CONFIGURATIONS[name], Path(folder)) / 1e6
            measured = "" if given.predict else _run(name, folder)
        ratio = f"{predicted / float(measured):.2f}" if measured.isdecimal() else ""
        print(f"| {name} | {measured} | {predicted:.1f} | {ratio} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "configurations", nargs="*", default=[*CONFIGURATIONS], metavar="NAME", help="default: all"
    )
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # measure in this process, in this folder
    given = parser.parse_args()
    if unknown := {*given.configurations} - {*CONFIGURATIONS}:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CONFIGURATIONS)}")
    return given


def _prepare(case: Case, folder: Path) -> None:
    """Save a model of random weights, its tokenizer and prompts."""
    import torch
    import transformers

    from fastrl.train.loading import character_tokenizer

    torch.manual_seed(0)
    kind, sizes = MODELS[case.model]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    for part in (transformers.AutoModelForCausalLM.from_config(config), character_tokenizer()):
        part.save_pretrained(folder / "model")
    for name, count in (("train", case.shape[0]), ("held_out", 1)):
        rows = ({"prompt": f"{i:0{case.shape[2]}}", "answer": ""} for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _config(case: Case, folder: Path) -> Any:
    from fastrl.train.config import GrpoConfig, PpoConfig

    prompts, group, longest_prompt, longest = case.shape
    shape = {"prompts_per_step": prompts, "group_size": group, "max_new_tokens": longest}
    shape |= {"max_prompt_tokens": longest_prompt, "minibatches": 1}
    run = {"sampler": "random_completions:sample", "reward": ["random_completions:reward"]}
    run |= {"steps": 2, "eval_every": 2, "device": "cpu", "out": str(folder / "run")}
    run |= {"model": str(folder / "model")}
    run |= {"prompts": [str(folder / f"{name}.jsonl") for name in ("train", "held_out")]}
    return {"grpo": GrpoConfig, "ppo": PpoConfig}[case.loop](**{**shape, **run, **case.settings})


def _predicted(case: Case, folder: Path) -> float:
    from fastrl.train.model_shape import Shape
    from fastrl.train.plan import plan

    config = _config(case, folder)
    found = plan(config, Shape(config), device="cpu")
    return found.learning - found.weights - found.optimizer


def _run(name: str, folder: str) -> str:
    """The MB of a configuration, measured in a process of its own; or why there is no number."""
    command = [sys.executable, __file__, name, "--run", folder]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "PYTHONPATH": path}
    child = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | env
    )
    if child.returncode:
        return "not run: " + (child.stderr.strip().splitlines() or ["no message"])[-1][:120]
    return f"{json.loads(child.stdout.splitlines()[-1]) / 1e6:.0f}"


def _measure(case: Case, folder: Path) -> float:
    import random_completions

    from fastrl.train import grpo, ppo

    config = _config(case, folder)
    random_completions.config = config
    random_completions.vocabulary = {**SIZES, **MODELS[case.model][1]}["vocab_size"]
    random_completions.shortest = case.shortest or config.max_new_tokens
    {"grpo": grpo, "ppo": ppo}[case.loop].train(config)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    second = next(row for row in rows if row["step"] == 2)
    peak = max(second["peak_gb_logprobs"], second["peak_gb_learn"])
    return peak * 1e9 - random_completions.resident[-2]  # the last one was of the evaluation


if __name__ == "__main__":
    main()
