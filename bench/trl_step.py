"""Steps of TRL's GRPOTrainer on random completions, for longest_sequence.py.

TRL's own `train()` runs, with its defaults (gradient checkpointing, bfloat16 autocast) and
`num_iterations=2`, so that it scores the completions before it learns from them twice. Only the
sampling is replaced: `rollout_func` returns random tokens at once. A micro-batch is one sequence.

The parts are `logprobs` (scoring without a gradient), `learn` (loss and backward, of both
iterations), `update` (clipping and the optimizer, twice) and `rollout`: what else TRL does with
completions, such as padding, decoding, rewards and metrics.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
PROMPT = 64  # tokens
SHORT = 256  # tokens of the first step, which compiles the kernels and makes the optimizer's state
GROUP = 2  # completions of a prompt, TRL's least
WORDS = range(4, 50)  # of the tests' tokenizer, without its special tokens


def trl_step(
    model: Any, tokens: int, device: str, *, fused: bool, lora_rank: int
) -> dict[str, float]:
    """Return seconds, peak memory and tokens per second of each part of a step, as `Phases` does.

    Args:
        model: with its weights on the device.
        tokens: of each sequence, its prompt included.
        device: `cpu` or `cuda`.
        fused: under `use_fastrl`, else TRL's own loss.
        lora_rank: of adapters, which are all that is trained; 0 trains the weights.
    """
    from fastrl.integrations.trl import use_fastrl
    from fastrl.train.phases import Phases

    phase = Phases(torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(model, folder, tokens, device, lora_rank)
        with use_fastrl(trainer) if fused else contextlib.nullcontext() as handle:
            _measure(trainer, phase)
            trainer.train()
    row = phase.read() | ({"fused": handle.fused} if fused else {})
    passes = {"logprobs": GROUP, "learn": GROUP * trainer.num_iterations}
    speeds = {
        f"tokens_per_second_{name}": passes[name] * tokens / row[f"seconds_{name}"]
        for name in passes
    }
    return row | speeds


def _trainer(model: Any, folder: str, tokens: int, device: str, lora_rank: int) -> Any:
    from tests.integrations.trl.runs import make_trainer

    lengths = iter([SHORT, tokens])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        length = next(lengths) - PROMPT
        words = torch.tensor(WORDS)

        def sample(size: int) -> list[int]:
            return words[torch.randint(len(words), (size,))].tolist()

        return {
            "prompt_ids": [sample(PROMPT) for _ in prompts],
            "completion_ids": [sample(length) for _ in prompts],
            "logprobs": None,
        }

    peft_config = None
    if lora_rank:
        import peft

        peft_config = peft.LoraConfig(r=lora_rank, target_modules="all-linear")
    trainer = make_trainer(
        model,
        output_dir=folder,
        peft_config=peft_config,
        rollout_func=rollout,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=GROUP,
        num_generations=GROUP,
        num_iterations=2,
        max_completion_length=tokens,
        max_steps=4,  # two rollouts, each learned from twice
        optim="adamw_torch_fused",
        learning_rate=1e-6,
        gradient_checkpointing=True,
        use_cpu=device == "cpu",
        bf16=True,
    )
    # completions with the same reward would have no gradient
    trainer.reward_funcs = [lambda completions, **_: list(map(float, range(len(completions))))]
    return trainer


def _measure(trainer: Any, phase: Any) -> None:
    """Enter a phase in each part of a step, and forget the first rollout and what it took."""
    from transformers import TrainerCallback

    def in_phase(name: str, owner: Any, method: str, *, scoring: bool = False) -> None:
        own = getattr(owner, method)

        def measured(*arguments: Any, **options: Any) -> Any:
            if scoring and torch.is_grad_enabled():  # TRL's loss calls it, too
                return own(*arguments, **options)
            with phase(name):
                return own(*arguments, **options)

        setattr(owner, method, measured)

    in_phase("learn", trainer, "training_step")
    in_phase("rollout", trainer, "_generate_and_score_completions")
    in_phase("logprobs", trainer, "_get_per_token_logps_and_entropies", scoring=True)
    in_phase("update", trainer.accelerator, "clip_grad_norm_")

    class Steps(TrainerCallback):
        def __init__(self) -> None:
            self.entered = contextlib.ExitStack()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.entered.enter_context(phase("update"))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.entered.close()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == trainer.num_iterations:
                phase.read()

    trainer.add_callback(Steps())
