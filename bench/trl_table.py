"""Time and peak memory of the loss of TRL's GRPOTrainer, with and without fastrl.

    python bench/trl_table.py [--sequences 8 --tokens 128 --hidden 512 --vocab 32768 151936]

Each cell is a separate process: a trainer with a model of one layer warms up on a small batch,
resets the kernel's high-water mark of resident memory, and runs `compute_loss` and its backward on
one off-policy batch, KL included; the fastest call is kept. Memory is what the calls take beyond
model and batch, gradients included. "backbone" is the model's forward and backward without a head,
which all rows include. Needs TRL, and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from memory import _peak, _reset_peak

from fastrl.integrations.transformers import last_hidden_states
from fastrl.integrations.trl import use_fastrl

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.trl_runs import make_trainer, save_model

FORMS = ("backbone", "TRL", "use_fastrl, fused=False", "use_fastrl")


def main() -> None:
    options = _options()
    if options.form:
        print(json.dumps(_measure(options)))
        return
    print(f"TRL {importlib.metadata.version('trl')}, loss_type {options.loss_type}, beta 0.04,")
    print(f"{options.sequences} x {options.tokens} tokens, hidden {options.hidden}, ", end="")
    print(f"{torch.get_num_threads()} threads\n")
    print("| vocabulary | dtype | form | seconds | beyond backbone | peak MB | loss |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for vocab in options.vocab:
        for dtype in options.dtype:
            floor = 0.0
            for form in FORMS:
                found = _in_a_process(options, vocab, dtype, form)
                if isinstance(found, str):
                    print(f"| {vocab} | {dtype} | {form} | not run: {found} | - | - | - |")
                    continue
                floor = found["seconds"] if form == "backbone" else floor
                numbers = f"{found['seconds']:.3f} | {found['seconds'] - floor:.3f}"
                memory = f"{found['beyond'] / 1e6:.0f} | {found['loss']:.5f}"
                print(f"| {vocab} | {dtype} | {form} | {numbers} | {memory} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"sequences": 8, "tokens": 128, "hidden": 512, "calls": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--loss_type", default="dapo")
    parser.add_argument("--form", choices=FORMS, help="measure this one, here")
    return parser.parse_args()


def _in_a_process(options: argparse.Namespace, vocab: int, dtype: str, form: str) -> dict | str:
    command = [sys.executable, __file__, "--form", form, "--vocab", str(vocab), "--dtype", dtype]
    for name in ("sequences", "tokens", "hidden", "calls", "loss_type"):
        command += [f"--{name}", str(getattr(options, name))]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        return (child.stderr.strip().splitlines() or ["no message"])[-1][:120]
    return json.loads(child.stdout.splitlines()[-1])


def _measure(options: argparse.Namespace) -> dict[str, float]:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(options, Path(folder))
        run = _call(options.form, trainer)
        run(_batch(options, 2, 8))
        batch = _batch(options, options.sequences, options.tokens)
        trainer.model.zero_grad(set_to_none=True)
        before, seconds, loss = _reset_peak(), [], 0.0
        for _ in range(options.calls):
            start = time.perf_counter()
            loss = run(batch)
            seconds.append(time.perf_counter() - start)
            trainer.model.zero_grad(set_to_none=True)
        return {"seconds": min(seconds), "beyond": _peak() - before, "loss": loss}


def _trainer(options: argparse.Namespace, folder: Path):
    width = options.hidden
    sizes = {"vocab_size": options.vocab[0], "hidden_size": width, "intermediate_size": 2 * width}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": width // 4}
    path = save_model(folder / "model", **sizes, **heads, initializer_range=0.05)
    trainer = make_trainer(
        path,
        output_dir=folder,
        beta=0.04,
        loss_type=options.loss_type,
        model_init_kwargs={"dtype": options.dtype[0]},
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _call(form: str, trainer) -> Callable[[dict], float]:
    if form.startswith("use_fastrl"):
        use_fastrl(trainer, fused=form == "use_fastrl")

    def backbone(batch: dict) -> float:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        states = last_hidden_states(trainer.model, input_ids=ids, attention_mask=ids.ne(-1))
        states.backward(torch.ones_like(states))
        return float("nan")

    def whole(batch: dict) -> float:
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        return loss.item()

    return backbone if form == "backbone" else whole


def _batch(options: argparse.Namespace, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, options.vocab[0], (sequences, 8 + tokens), generator=generator)
    old = -torch.tensor(float(options.vocab[0])).log() + torch.randn(
        sequences, tokens, generator=generator
    )
    mask = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, :8],
        "prompt_mask": mask[:, :8],
        "completion_ids": ids[:, 8:],
        "completion_mask": mask[:, 8:],
        "advantages": torch.randn(sequences, generator=generator),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.1,
        "num_items_in_batch": torch.tensor(sequences * tokens),
    }


if __name__ == "__main__":
    main()
