"""Time and peak memory of one actor update by verl's FSDP engine, with and without fastrl.

    python bench/verl_step.py --tied [--vocab 151936 --hidden 512 --layers 1 --rows 4 --length 512]

Needs verl 0.9.1 with its dependencies (`pip install verl==0.9.1`) and no GPU: verl is given a
platform of one CPU, and one gloo rank. The model is a Qwen2 with random weights in float32, wrapped
by FSDP2. `--tied` makes the LM head the embedding; without it verl's fused function stops at the
sharded head, and the table says so.

Each variant is a process of its own:

- verl, fused: `use_fused_kernels=True` with the backend `torch`, in chunks of 512 tokens;
- verl: `use_fused_kernels=False`, the logits of all tokens exist at once;
- fastrl: verl, fused, after `fastrl.integrations.verl.use_fastrl()`.

A process builds the engine, makes an update on a small batch, so that the optimizer has its state,
and resets the kernel's high-water mark of resident memory. Then it calls `engine.train_batch` on
one batch, `--updates` times: forward, `ppo_loss` with entropy, backward, clipping of the gradient
norm, AdamW. The learning rate is 0, so each update starts from the same weights. Seconds are those
of the fastest update. Memory is the mark minus what was resident before: gradients count, weights
and optimizer state do not.

Half of each sequence is the prompt. The last three columns are the largest absolute difference of
log-probabilities and entropies of the response, and the largest difference of a gradient, relative
to the largest element of that parameter's gradient. They are differences to the first variant that
ran.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import math
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from memory import _peak, _reset_peak

VARIANTS = ("verl, fused", "verl", "fastrl")
NUMBERS = {"vocab": 151936, "hidden": 512, "layers": 1, "rows": 4, "length": 512, "updates": 1}
ENTROPY_COEFFICIENT = 0.01
RESULTS = ("log_probs", "entropy")


def main() -> None:
    options = _options()
    try:
        import verl  # noqa: F401
    except ImportError as error:
        sys.exit(f"This benchmark needs verl 0.9.1 and the packages that verl imports: {error}.")
    if options.variant:
        _measure(options)
        return
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("verl", "torch"))
    print(f"{', '.join(versions)}, {torch.get_num_threads()} threads, float32")
    print(f"{options.rows} sequences of {options.length} tokens, V = {options.vocab}, ", end="")
    print(f"H = {options.hidden}, {options.layers} layers, tied head: {options.tied}\n")
    print("| variant | peak MB | seconds | log-probabilities | entropies | gradients |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        _save_model(options)
        reference = None
        for name in options.variants:
            found = _in_a_process(options, name)
            if isinstance(found, str):
                print(f"| {name} | not run: {found} | - | - | - | - |", flush=True)
                continue
            columns = ["-"] * 3
            if reference:
                columns = [f"{one:.1e}" for one in _differences(reference, found)]
            reference = reference or found
            numbers = f"{found['peak'] / 1e6:.0f} | {found['seconds']:.1f}"
            print(f"| {name} | {numbers} | {' | '.join(columns)} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tied", action="store_true", help="the LM head is the embedding")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, here")
    parser.add_argument("--folder", type=Path, help="of the model and the results, with --variant")
    return parser.parse_args()


def _save_model(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.length,
        tie_word_embeddings=options.tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(options.folder / "model")


def _in_a_process(options: argparse.Namespace, variant: str) -> dict | str:
    """Measure a variant in a new process; what it found, or the last line of its error."""
    command = [sys.executable, __file__, "--variant", variant, "--folder", str(options.folder)]
    for name in NUMBERS:
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--tied"] * options.tied
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode < 0:
        return f"ended by signal {-child.returncode}"
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return last.removeprefix("[rank0]: ")[:120]
    return torch.load(options.folder / f"{variant}.pt", mmap=True)


def _differences(reference: dict, result: dict) -> list[float]:
    values = [(reference[name] - result[name]).abs().max().item() for name in RESULTS]
    gradients, others = reference["gradients"], result["gradients"]
    if gradients.keys() != others.keys():
        raise ValueError("the variants have gradients of different parameters")
    relative = [
        ((gradients[name] - others[name]).abs().max() / gradients[name].abs().max()).item()
        for name in gradients
    ]
    return [*values, max(relative)]


def _measure(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    _use_cpu()
    where = f"file://{options.folder}/ranks-{VARIANTS.index(options.variant)}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    if options.variant == "fastrl":
        from fastrl.integrations.verl import use_fastrl

        replaced = use_fastrl()
    engine = _engine(options)
    outputs: dict[str, torch.Tensor] = {}
    loss = _loss(outputs)
    warm_up, batch = _batch(options, 2, 8), _batch(options, options.rows, options.length)
    with engine.train_mode():
        engine.train_batch(warm_up.clone(), loss)
        if options.variant == "fastrl" and not any("FusedLinear" in one for one in replaced.names):
            raise RuntimeError("verl's fused function was not replaced")
        engine.optimizer_zero_grad()
        outputs.clear()
        before, seconds = _reset_peak(), []
        for _ in range(options.updates):
            given = batch.clone()
            start = time.perf_counter()
            engine.train_batch(given, loss)
            seconds.append(time.perf_counter() - start)
        found = {"peak": _peak() - before, "seconds": min(seconds), **outputs}
        found["gradients"] = {
            name: parameter.grad.full_tensor()
            for name, parameter in engine.module.named_parameters()
            if parameter.grad is not None
        }
    torch.save(found, options.folder / f"{options.variant}.pt")
    dist.destroy_process_group()


def _use_cpu() -> None:
    """Make the CPU verl's platform; verl 0.9.1 has none for it."""
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import set_platform

    class Device(types.ModuleType):
        """`torch.cpu`, and a function that returns 0 for each name that only other devices have."""

        mem_get_info = staticmethod(lambda *_, **__: (1, 1))

        def __getattr__(self, name: str):
            return getattr(torch.cpu, name, lambda *_, **__: 0)

    body = dict.fromkeys(PlatformBase.__abstractmethods__, lambda self, *_, **__: None)
    body |= {
        "device_name": "cpu",
        "vendor_name": "cpu",
        "device_module": property(lambda self: Device("cpu")),
        "is_available": lambda self: True,
        "current_device": lambda self: torch.device("cpu"),
        "device_count": lambda self: 1,
        "communication_backend_name": lambda self: "gloo",
        "nvtx_range": lambda self, *_, **__: contextlib.nullcontext(),
    }
    set_platform(type("Cpu", (PlatformBase,), body)())


def _engine(options: argparse.Namespace):
    """Return verl's engine for an actor, initialized, with the saved model."""
    import verl.models.transformers.monkey_patch as model_patches
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    # verl imports a class of TRL here if TRL is installed; recent versions of TRL do not have it
    model_patches.is_trl_available = lambda: False
    model = HFModelConfig(
        path=str(options.folder / "model"),
        load_tokenizer=False,
        use_remove_padding=False,  # needs flash-attention
        use_fused_kernels=options.variant != "verl",
        fused_kernel_options={"impl_backend": "torch"},
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False,
    )
    dtypes = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    sharding = FSDPEngineConfig(
        strategy="fsdp2",
        forward_only=False,
        fsdp_size=-1,
        use_torch_compile=False,
        model_dtype="fp32",
        mixed_precision=dtypes,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=options.rows,
    )
    optimizer = FSDPOptimizerConfig(lr=0.0, total_training_steps=100)
    engine = FSDPEngineWithLMHead(model, sharding, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def _loss(outputs: dict[str, torch.Tensor]):
    """Return verl's PPO loss; it leaves the log-probabilities and entropies in `outputs`."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        entropy_coeff=ENTROPY_COEFFICIENT,
        use_dynamic_bsz=False,
    )

    @functools.wraps(ppo_loss)
    def loss(model_output, data, dp_group=None):
        for name in RESULTS:
            outputs[name] = no_padding_2_padding(model_output[name].detach(), data).clone()
        return ppo_loss(config, model_output, data, dp_group)

    return loss


def _batch(options: argparse.Namespace, rows: int, length: int):
    """Return random sequences, half prompt, as verl's trainer gives them to its engines."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(options.vocab, (rows, length), generator=generator)
    ones, prompt = torch.ones_like(ids), length // 2
    tensors = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(1) - 1,
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": ones[:, prompt:],
    }
    batch = left_right_2_no_padding(TensorDict(tensors, batch_size=rows))
    noise = torch.randn(2, rows, length - prompt, generator=generator)
    batch["advantages"] = noise[0]
    batch["old_log_probs"] = 0.1 * noise[1] - math.log(options.vocab)
    tensordict_utils.assign_non_tensor(
        batch,
        use_remove_padding=False,
        use_fused_kernels=options.variant != "verl",
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=rows,
        calculate_entropy=True,
        global_batch_size=rows,
        pad_token_id=0,
    )
    return batch


if __name__ == "__main__":
    main()
