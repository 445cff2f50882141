"""Learning of TRL's `GRPOTrainer`: alone, with fastrl on padded batches, and on packed rows.

    python bench/studies/trl_packed.py MODEL    # a folder of a causal LM with its tokenizer

The model first samples the completions of all steps, of lengths drawn from 16 to 256 tokens, which
are then replayed, so that all learn from the same batches. Each variant runs in a process of its
own. Seconds are those of `training_step`, loss and backward; generation, rewards and optimizer are
apart. Memory is the peak of this call beyond weights and optimizer; it includes the gradients. Both
are medians of the steps after the first. The last column is the largest difference between numbers
that TRL logs, relative to those above 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from fastrl.bench.memory import Peak, keep_freed
from fastrl.integrations.trl import use_fastrl

VARIANTS: dict[str, dict[str, Any] | None] = {
    "TRL alone": None,
    "use_fastrl(trainer, packed=False)": {"packed": False},
    "use_fastrl(trainer, packed=True)": {"packed": True},
    "use_fastrl(trainer, packed=True, packed_tokens=1024)": {"packed": True, "packed_tokens": 1024},
}
GROUP = 8


def main() -> None:
    """Sample, run each variant, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(learn(args.model, json.loads(args.data.read_text()), args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rollouts.json"
        data.write_text(json.dumps(sample(args.model, args.steps * args.prompts)))
        found = {}
        for name in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", name, "--data", data]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name] = json.loads(output.splitlines()[-1])
            print(line(name, found[name], found["TRL alone"]), file=sys.stderr)
    print("| | seconds per step | tokens computed | peak memory, MiB | largest difference |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in found.items():
        print(line(name, row, found["TRL alone"]))


def line(name: str, row: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return a line of the table; ratios are to TRL alone."""
    seconds, tokens, peak = (row[key] / theirs[key] for key in ("seconds", "tokens", "peak"))
    return (
        f"| `{name}` | {row['seconds']:.1f} ({seconds:.2f}) | {row['tokens']:.0f} ({tokens:.2f}) | "
        f"{row['peak'] / 2**20:.0f} ({peak:.2f}) | {difference(row['logs'], theirs['logs']):.1e} |"
    )


def sample(model: Path, count: int) -> list[dict[str, Any]]:
    """Return prompts of 300 to 600 tokens with `GROUP` completions of 16 to 256 tokens each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draw = random.Random(0)
    torch.manual_seed(0)
    words = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    found = []
    for index in range(count):
        length = draw.randint(300, 600)
        text = tokenizer(f"{index}. Summarize: {words[index * 97 :]}").input_ids[: length - 8]
        prompt = text + tokenizer("\nSummary:").input_ids
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        sampled = lm.generate(
            **inputs, do_sample=True, max_new_tokens=256, min_new_tokens=256,
            num_return_sequences=GROUP, top_k=0,
        )  # fmt: skip
        completions = [row[: draw.randint(16, 256)] for row in sampled[:, len(prompt) :].tolist()]
        found.append({"prompt": prompt, "completions": completions})
    return found


def learn(model: Path, rollouts: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of a variant's steps, and what TRL has logged."""
    import datasets
    import trl

    seconds, peaks, tokens = [], [], []

    def replayed(prompts: list[str], _: Any) -> dict[str, Any]:
        rows = [(int(text), i % GROUP) for i, text in enumerate(prompts)]
        completions = [rollouts[at]["completions"][i] for at, i in rows]
        return {
            "prompt_ids": [rollouts[at]["prompt"] for at, _ in rows],
            "completion_ids": completions,
            "logprobs": None,
        }

    class Measured(trl.GRPOTrainer):
        def training_step(self, model: Any, inputs: Any, count: Any = None) -> Any:
            """Time a step that has its batch, and read its peak of memory."""
            batch = self._prepare_inputs(inputs)
            prepare, self._prepare_inputs = self._prepare_inputs, lambda _: batch
            started = time.perf_counter()
            tokens.append(0)
            with Peak(self.accelerator.device) as peak:
                loss = super().training_step(model, inputs, count)
            seconds.append(time.perf_counter() - started)
            peaks.append(peak.bytes)
            self._prepare_inputs = prepare
            return loss

    size = GROUP * args.prompts
    trainer = Measured(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completion_ids, **_: [len(set(i)) / len(i) for i in completion_ids],
        args=trl.GRPOConfig(
            output_dir=args.data.parent, per_device_train_batch_size=size, num_generations=GROUP,
            steps_per_generation=1, max_completion_length=256, max_steps=args.steps, seed=0,
            learning_rate=1e-5, lr_scheduler_type="constant", logging_steps=1, report_to="none",
            save_strategy="no", use_cpu=not torch.cuda.is_available(), bf16=False,
            shuffle_dataset=False, disable_tqdm=True, gradient_checkpointing=False, beta=0.0,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [*map(str, range(len(rollouts)))]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        rollout_func=replayed,
    )  # fmt: skip
    embeddings = trainer.model.get_input_embeddings()
    own = embeddings.forward

    def counted(ids: torch.Tensor) -> torch.Tensor:
        if tokens:  # before the first step, fastrl runs a trial
            tokens[-1] += ids.numel()
        return own(ids)

    embeddings.forward = counted  # a hook would end the packing
    keep_freed(False)
    options = VARIANTS[args.variant]
    if options is not None:
        use_fastrl(trainer, **options)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    peak = statistics.median(peaks[1:] or peaks)
    return {
        "seconds": statistics.median(seconds[1:] or seconds),
        "peak": peak,
        "tokens": statistics.mean(tokens),
        "logs": logs,
    }


def difference(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Return the largest difference between logged numbers, relative to those above 1."""
    timed = ("time", "step_time", "runtime", "epoch")
    return max(
        abs(a[name] - b[name]) / max(1.0, abs(b[name]))
        for a, b in zip(ours, theirs, strict=True)
        for name in b
        if not any(word in name for word in timed)
    )


if __name__ == "__main__":
    main()
