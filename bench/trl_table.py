"""Time and peak memory of the loss of TRL's trainers, with and without fastrl.

    python bench/trl_table.py [--sequences 8 --tokens 128 --hidden 512 --vocab 32768 151936]
    python bench/trl_table.py --setup experts fsdp2 gspo rloo --vocab 32768 --dtype float32

`--dtype` sets the dtype of the weights; `autocast` means float32 weights and bfloat16 autocast. The
setups are GRPO (`dapo`), GSPO, RLOO, a mixture of 8 experts with its auxiliary loss, and FSDP2 on 2
gloo ranks. There each rank has a whole batch, and the figures are those of the first rank.

Each cell is a separate process: a trainer with a model of one layer warms up on a small batch,
resets the kernel's high-water mark of resident memory, and runs `compute_loss` and its backward on
one off-policy batch, KL included; the fastest call is kept. Memory is what the calls take beyond
model and batch, gradients included. "backbone" is the model's forward and backward without a head,
which all rows include. Needs TRL, and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from memory import _peak, _reset_peak

from fastrl.integrations.transformers import inside_forward
from fastrl.integrations.trl import use_fastrl

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.integrations.trl.ranks import choose_cpu, environments, options_of
from tests.integrations.trl.runs import make_trainer, save_model

FORMS = ("backbone", "TRL", "use_fastrl, fused=False", "use_fastrl")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
#: setup -> type of the model, what changes in it, the trainer, its options, ranks
SETUPS = {
    "grpo": ("LlamaConfig", {}, "GRPO", {}, 1),
    "gspo": ("LlamaConfig", {}, "GRPO", {"importance_sampling_level": "sequence"}, 1),
    "rloo": ("LlamaConfig", {}, "RLOO", {}, 1),
    "experts": ("Qwen3MoeConfig", EXPERTS, "GRPO", {}, 1),
    "fsdp2": ("LlamaConfig", {}, "GRPO", options_of("fsdp2"), 2),
}


def main() -> None:
    options = _options()
    if options.form:
        print(json.dumps(_measure(options)))
        return
    print(f"TRL {importlib.metadata.version('trl')}, beta 0.04,")
    print(f"{options.sequences} x {options.tokens} tokens, hidden {options.hidden}, ", end="")
    print(f"{torch.get_num_threads()} threads\n")
    print("| setup | vocabulary | dtype | form | seconds | beyond backbone | peak MB | loss |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for cell in itertools.product(options.setup, options.vocab, options.dtype):
        floor, name = 0.0, " | ".join(map(str, cell))
        for form in FORMS:
            found = _in_a_process(options, *cell, form)
            if isinstance(found, str):
                print(f"| {name} | {form} | not run: {found} | - | - | - |")
                continue
            floor = found["seconds"] if form == "backbone" else floor
            numbers = f"{found['seconds']:.3f} | {found['seconds'] - floor:.3f}"
            memory = f"{found['beyond'] / 1e6:.0f} | {found['loss']:.5f}"
            print(f"| {name} | {form} | {numbers} | {memory} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"sequences": 8, "tokens": 128, "hidden": 512, "calls": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 151936])
    dtypes = ["float32", "bfloat16", "autocast"]
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--setup", nargs="+", choices=SETUPS, default=["grpo"])
    parser.add_argument("--form", choices=FORMS, help="measure this one, here")
    return parser.parse_args()


def _in_a_process(
    options: argparse.Namespace, setup: str, vocab: int, dtype: str, form: str
) -> dict | str:
    """Measure a cell in a process of its own, or one for each rank; what the first one found."""
    command = [sys.executable, __file__, "--form", form, "--setup", setup]
    command += ["--vocab", str(vocab), "--dtype", dtype]
    for name in ("sequences", "tokens", "hidden", "calls"):
        command += [f"--{name}", str(getattr(options, name))]
    ranks = SETUPS[setup][4]
    places = environments(ranks) if ranks > 1 else [{}]
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen(command, env={**os.environ, **own}, stdout=pipe, stderr=pipe, text=True)
        for own in places
    ]
    outputs = [child.communicate() for child in children]
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            return (errors.strip().splitlines() or ["no message"])[-1][:120]
    return json.loads(outputs[0][0].splitlines()[-1])


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
    kind, changes, trainer_kind, chosen, ranks = SETUPS[options.setup[0]]
    if ranks > 1:
        choose_cpu("fsdp2")
    width, dtype = options.hidden, options.dtype[0]
    sizes = {"vocab_size": options.vocab[0], "hidden_size": width, "intermediate_size": 2 * width}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": width // 4}
    experts = {"moe_intermediate_size": width // 2}
    torch.manual_seed(0)
    path = save_model(
        folder / "model", kind, **sizes, **heads, **experts, **changes, initializer_range=0.05
    )
    trainer = make_trainer(
        path,
        trainer_kind,
        output_dir=folder,
        beta=0.04,
        bf16=dtype == "autocast",
        model_init_kwargs={"dtype": "float32" if dtype == "autocast" else dtype},
        **chosen,
    )
    trainer.current_gradient_accumulation_steps = 1
    if ranks > 1:
        trainer.create_optimizer()
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(
            trainer.model, trainer.optimizer
        )
    trainer.model.train()
    return trainer


def _call(form: str, trainer) -> Callable[[dict], float]:
    if form.startswith("use_fastrl"):
        use_fastrl(trainer, fused=None if form == "use_fastrl" else False)

    def backbone(batch: dict) -> float:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        with trainer.accelerator.autocast():
            states = inside_forward(
                trainer.model, lambda hidden, _: hidden, input_ids=ids, attention_mask=ids.ne(-1)
            )
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
        "old_logps": old.sum(1),
        "num_items_in_batch": torch.tensor(sequences * tokens),
    }


if __name__ == "__main__":
    main()
