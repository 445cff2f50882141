"""A GRPO step of a `transformers` model, measured part by part, with and without fastrl.

Both variants make the same step but for its log-probabilities and its loss. Without fastrl these
are written as trainers write them, from the logits of all tokens in float32. `fastrl.bench.step`
starts a process for each variant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl import group_advantages, linear_policy_loss, linear_token_logprobs
from fastrl.bench.child import say
from fastrl.bench.error import clipped, logprobs_of
from fastrl.bench.memory import Peak
from fastrl.integrations.transformers import LmHead, backbone, lm_head
from fastrl.integrations.transformers.transform import Transform

PARTS = ("generation", "scoring", "forward", "loss", "backward", "optimizer")
VARIANTS = WITHOUT, WITH = "without", "with fastrl"
WARM_UP, MEMORY, TIMED = 0, 1, 2  # the first step, the step whose memory is measured, those timed
#: Models with random weights, of Qwen3's kind, that need no network.
SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
SHAPES = {
    "tiny": (1000, 32, 64, 2, 2, 16),
    "small": (151936, 512, 1536, 12, 8, 64),
    "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 128),
}


class Settings(NamedTuple):
    """The options of `fastrl bench step`."""

    model: str
    random: bool
    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    micro_batch: int  # sequences
    dtype: str
    device: str
    recompute: bool
    steps: int  # that are timed


def grpo_step(
    model: Any, optimizer: Any, variant: str, settings: Settings, part: Callable[[str], Any]
) -> None:
    """Make a step of GRPO; ``part(name)`` returns a context for each of `PARTS`."""
    size, head, fused = settings.prompt_tokens, lm_head(model), variant == WITH
    shape = (settings.prompts, size)
    prompts = torch.randint(len(head.weight), shape, device=model.device)

    def hidden_states(ids: Tensor) -> Tensor:  # [B, T, H], where they predict the completion
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[:, size - 1 : -1]  # type: ignore[no-any-return]

    model.eval()
    with part("generation"):
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts))
    rewards = torch.randn(len(ids), device=model.device)
    advantages = group_advantages(rewards, group_size=settings.group_size).advantages
    batches = ids.split(settings.micro_batch)

    with part("scoring"), torch.no_grad():
        old = [logprobs(hidden_states(rows), head, rows[:, size:], fused) for rows in batches]

    model.train(settings.recompute)  # transformers recomputes only then; dropout is off otherwise
    of_batches = advantages.split(settings.micro_batch)
    for rows, before, gains in zip(batches, old, of_batches, strict=True):
        with part("forward"):
            hidden = hidden_states(rows)
        with part("loss"):
            loss = policy_loss(hidden, head, rows[:, size:], before, gains, len(ids), fused)
            del hidden
        with part("backward"):
            loss.backward()

    with part("optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def logprobs(hidden: Tensor, head: LmHead, token_ids: Tensor, fused: bool) -> Tensor:
    """Return the log-probabilities `[B, T]` of tokens."""
    if fused:
        return linear_token_logprobs(hidden, **head.arguments(), token_ids=token_ids)
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    if (transform := Transform(head.logit_scale, head.logit_softcap)) != (1.0, None):
        logits = transform(logits)
    return logprobs_of(logits, token_ids)


def policy_loss(
    hidden: Tensor, head: LmHead, ids: Tensor, old: Tensor, gains: Tensor, total: int, fused: bool
) -> Tensor:
    """Return GRPO's loss of a micro-batch: its share in the mean over all sequences of a step.

    ``old`` are log-probabilities `[B, T]`, ``gains`` advantages `[B]`.
    """
    if fused:
        return linear_policy_loss(
            hidden,
            token_ids=ids,
            advantages=gains,
            mask=torch.ones_like(ids, dtype=torch.bool),
            old_logprobs=old,
            normalizer=total,
            **head.arguments(),
        ).loss
    tokens = {"old_logprobs": old, "advantages": gains[:, None]}
    return clipped(logprobs(hidden, head, ids, fused), tokens).mean(-1).sum() / total


def model_config(name: str) -> Any:
    """Return the configuration of a model of `SHAPES`, of the Hugging Face Hub, or of a folder."""
    import transformers

    if name not in SHAPES:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    sizes: dict[str, Any] = dict(zip(SIZES.split(), SHAPES[name], strict=True))
    keys = {"num_key_value_heads": sizes["num_attention_heads"] // 2, "tie_word_embeddings": True}
    return transformers.Qwen3Config(**sizes, **keys, max_position_embeddings=40960)


def load(settings: Settings) -> Any:
    """Return the model on its device, set up for sampling and, if asked for, recomputation."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config, dtype = model_config(settings.model), getattr(torch, settings.dtype)
    if settings.random or settings.model in SHAPES:
        with torch.device(settings.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(settings.model, config=config, dtype=dtype)
        model = model.to(settings.device)
    model.generation_config = GenerationConfig(  # no end token: completions have the same length
        do_sample=True,
        top_k=0,
        num_return_sequences=settings.group_size,
        max_new_tokens=settings.completion_tokens,
        pad_token_id=0,
    )
    if settings.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None)  # of transformers 5
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


class Measurement:
    """Seconds and, if asked for, peak memory of the parts of a step, which may be entered often.

    Memory is in bytes beyond the start of the step, which weights and optimizer state precede.
    Measuring it takes time, so it is not done in a step that is timed.
    """

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self._device, self._memory = device, memory
        self._start: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what happens inside as the part ``name``."""
        say(part=name)
        with Peak(self._device) if self._memory else nullcontext() as peak:
            begin = time.perf_counter()
            yield
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            taken = time.perf_counter() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + taken
        if peak is not None and peak.bytes is not None and peak.before is not None:
            self._start = peak.before if self._start is None else self._start
            beyond = peak.before + peak.bytes - self._start
            self.peaks[name] = max(beyond, self.peaks.get(name, 0))


def main(variant: str, settings: Settings) -> None:
    """Measure a variant, and say as each part begins and what each step took."""
    torch.manual_seed(0)
    device, model = torch.device(settings.device), load(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda" or None)
    for step in range(TIMED + settings.steps):
        part, begin = Measurement(device, memory=step == MEMORY), time.perf_counter()
        grpo_step(model, optimizer, variant, settings, part)
        total = time.perf_counter() - begin
        state = [x for one in optimizer.state.values() for x in one.values()]
        held = sum(x.nbytes for x in (*model.parameters(), *state))
        say(step=step, total=total, seconds=part.seconds, peaks=part.peaks, held=held)
