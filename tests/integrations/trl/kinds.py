"""A table of TRL's trainers, and comparisons of each with fastrl and without.

Every comparison passes `use`, keyword arguments of `use_fastrl`, on to it.
"""

import contextlib
import inspect
import random
from typing import Any, NamedTuple

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.runs import (
    OPTIONS,
    SPECIAL,
    check_equal,
    make_model,
    make_tokenizer,
    prompts,
    reward_even,
    run,
    words,
)


class Kind(NamedTuple):
    """How one of TRL's trainers is made, and what fastrl does with it.

    Attributes:
        options: Of its configuration or of its constructor, besides `OPTIONS`.
        columns: The columns of its data.
        folder: Its module in `trl.experimental`, or empty for `trl` itself.
        other: The argument that takes a second model. It is wider than the first, so that their
            log-probabilities differ from the first step.
        fused: Whether fastrl computes the loss.
        metric: What it logs that must not vanish, or the comparison would be of nothing.
    """

    options: dict[str, Any]
    columns: dict[str, Any] = {"prompt": prompts()}  # noqa: RUF012
    folder: str = ""
    other: str = ""
    fused: bool = False
    metric: str = "grad_norm"


def reward_first(completions, **_):
    """1 for completions of an even length, else 0."""
    return [float(len(text.split()) % 2 == 0) for text in completions]


def completed(**columns):
    """Prompts with completions; the number of a column selects its first word."""
    return {"prompt": prompts()} | {
        name: [" " + words(first + i, 2 + (first + i) % 5) for i in range(12)]
        for name, first in columns.items()
    }


def tokens(text):
    return [len(SPECIAL) + int(word[1:]) for word in text.split()]


PAIRS = [(words(i, 2 + i % 3), words(3 * i, 3 + i % 4)) for i in range(16)]
CHATS = {
    "messages": [
        [{"role": "user", "content": x}, {"role": "assistant", "content": y}] for x, y in PAIRS
    ]
}
#: GOLD tokenizes with a byte-level tokenizer alone.
TOKENIZED = {
    "input_ids": [tokens(f"{x} {y}") for x, y in PAIRS],
    "completion_mask": [[0] * len(tokens(x)) + [1] * len(tokens(y)) for x, y in PAIRS],
    "original_prompt_text": [x for x, _ in PAIRS],
    "original_completion_text": [y for _, y in PAIRS],
}
HINTS = {"prompt": prompts(), "privileged_context": ["w3 w9 w4"] * len(prompts())}
LENGTH = {"max_length": 32}
SAMPLED = {"max_completion_length": 7}
GROUPS = {**SAMPLED, "num_generations": 4}
REWARDED = {**GROUPS, "reward_funcs": reward_even}
CHOSEN = completed(chosen=3, rejected=11)
DISTILLED = "self_distillation/distillation_loss"

KINDS = {
    "GRPO": Kind(REWARDED, fused=True),
    "RLOO": Kind({**REWARDED, "learning_rate": 0.02}, fused=True),
    "SFT": Kind(LENGTH, completed(completion=3)),
    "DPO": Kind(LENGTH, CHOSEN, other="ref_model"),
    "KTO": Kind(
        LENGTH,
        {**completed(completion=3), "label": [i % 3 > 0 for i in range(12)]},
        other="ref_model",
    ),
    "CPO": Kind(LENGTH, CHOSEN, "cpo"),
    "ORPO": Kind(LENGTH, CHOSEN, "orpo"),
    "TPO": Kind(LENGTH, completed(chosen=3, rejected=11, reference=5), "tpo"),
    "A2PO": Kind(
        {**SAMPLED, "max_prompt_length": 32, "num_value_samples": 2, "reward_funcs": reward_first},
        folder="a2po",
    ),
    "OnlineDPO": Kind(
        {**LENGTH, "max_new_tokens": 7, "reward_funcs": reward_first}, folder="online_dpo"
    ),
    "Distillation": Kind(SAMPLED, other="teacher_model", fused=True, metric="entropy"),
    "GKD": Kind({**LENGTH, "max_new_tokens": 6}, CHATS, "gkd", "teacher_model", True),
    "GOLD": Kind({**LENGTH, "max_completion_length": 6}, TOKENIZED, "gold", "teacher_model", True),
    "IWOPD": Kind(
        {
            **LENGTH,
            "max_completion_length": 6,
            "distillation_objective": "jsd",
            "loss_top_k": 0,
        },
        CHATS,
        "iw_opd",
        "teacher_model",
        True,
    ),
    "SDFT": Kind({**GROUPS, "distillation_mode": "full_logits"}, HINTS, "sdft", metric=DISTILLED),
    "SDPO": Kind(  # only groups with a success have a teacher
        {**REWARDED, "success_reward_threshold": 0.5}, HINTS, "sdpo", metric=DISTILLED
    ),
}


def make_trainer(model, kind="GRPO", **options):
    """A trainer of a row of `KINDS`.

    Args:
        model: A directory as `save_model` makes it, or a model.
        kind: A key of `KINDS`.
        **options: Of the trainer's constructor or its configuration; a dict as `peft_config` holds
            the options of a LoRA, or of the adapter that `peft_type` names.
    """
    row, datasets = KINDS[kind], needed("datasets")
    module = needed(f"trl.experimental.{row.folder}" if row.folder else "trl")
    build = getattr(module, f"{kind}Trainer")
    options = {**OPTIONS, "output_dir": "out", **row.options, **options}
    if isinstance(options.get("peft_config"), dict):
        lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
        options["peft_config"] = needed("peft").get_peft_config(lora | options["peft_config"])
    if row.other == "teacher_model" or (row.other and options.get("peft_config") is None):
        options.setdefault(row.other, wider(model))
    arguments = inspect.signature(build).parameters
    given = {name: options.pop(name) for name in arguments if name in options}
    if row.folder in ("gkd", "gold", "iw_opd"):
        model = needed("transformers").AutoModelForCausalLM.from_pretrained(model)
    return build(
        model=model,
        args=getattr(module, f"{kind}Config")(**options),
        **{
            "train_dataset": datasets.Dataset.from_dict(row.columns),
            "processing_class": make_tokenizer(),
            **given,
        },
    )


def wider(model):
    other = make_model(hidden_size=32)
    other.config._name_or_path = model  # where TRL finds its tokenizer
    return other


def used(**use):
    """What `run` takes to train with fastrl."""
    from fastrl.integrations.trl import use_fastrl

    return lambda trainer: use_fastrl(trainer, **use)


def both(model, kind="GRPO", prepared=None, *, use=None, **options):
    """Train without fastrl and with it, each after ``prepared(trainer)``.

    Compare the loss of each micro-batch, all that TRL logs (metrics and norms of gradients) except
    the clock, and the final weights.

    Args:
        model: As for `make_trainer`.
        kind: As for `make_trainer`.
        prepared: A function of the trainer, or None.
        use: Keyword arguments of `use_fastrl`.
        **options: As for `make_trainer`.

    Returns:
        The handle, and the log of each step with fastrl.
    """
    found = []
    for context in (contextlib.nullcontext, used(**(use or {}))):
        torch.manual_seed(0)
        trainer = make_trainer(model, kind, **options)
        if prepared is not None:
            prepared(trainer)
        random.seed(0)  # by which GKD chooses between data and samples
        before = weights(trainer)
        found.append((*run(trainer, context), weights(trainer)))
    (theirs, their_losses, _, their_weights), (ours, our_losses, handle, our_weights) = found
    check_equal(ours, theirs)
    assert our_losses == pytest.approx(their_losses, abs=1e-4)
    # a step rounds each weight once, and the gradients are equal to rounding
    rounding = len(ours) * torch.finfo(torch.float32).eps * distance(before, {})
    moved = distance(before, their_weights)
    assert distance(our_weights, their_weights) <= 1e-3 * moved + rounding
    assert len(ours) == trainer.args.max_steps
    assert max(step["grad_norm"] for step in ours) > 1e-3
    return handle, ours


def weights(trainer):
    """Copies of the policy's weights."""
    return {name: p.detach().float().clone() for name, p in trainer.model.named_parameters()}


def distance(a, b):
    """The norm of the difference; a missing weight of ``b`` is 0."""
    return sum((x - b.get(name, 0.0)).square().sum().item() for name, x in a.items()) ** 0.5


#: TRL rounds the logits to bfloat16 under autocast and fastrl does not: 2^-9 of logits of about 4,
#: hence about 1e-2 in a log-probability, as much relative in a gradient, and a token more or less
#: that is clipped.
BFLOAT16 = {"loss": 2e-2, "kl": 2e-2, "entropy": 1e-2, "aux_loss": 1e-2}


def check_autocast(model, kind="GRPO", **options):
    """Compare a step under bfloat16 autocast: it is equal to rounding, and is under autocast."""
    found = []
    for bf16, context in ((True, contextlib.nullcontext), (True, used()), (False, used())):
        random.seed(0)
        trainer = make_trainer(model, kind, bf16=bf16, max_steps=1, **options)
        found.append(run(trainer, context)[0][0])
    theirs, ours, exact = found
    for name in BFLOAT16.keys() & theirs.keys():
        assert ours[name] == pytest.approx(theirs[name], abs=BFLOAT16[name]), name
    assert 0 < ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    assert ours["grad_norm"] != pytest.approx(exact["grad_norm"], rel=1e-6)


def first_of(trainer):
    """The first batch of a trainer's data."""
    return next(iter(trainer.get_train_dataloader()))


@torch.no_grad()
def scores(trainer, ids, mask, count=3):
    """The log-probabilities that a trainer computes of the last tokens of its policy."""
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, count)[0]


def loss_of(trainer, batch, count=None):
    """The loss of a batch, the metrics that TRL keeps of it, and gradients of 3 times the loss."""
    metrics = getattr(trainer, "_metrics", {}).get("train", {})
    metrics.clear()
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.zero_grad()
    trainer.model.train()
    options = {} if count is None else {"num_items_in_batch": count}
    loss = trainer.compute_loss(trainer.model, dict(batch), **options)
    (3 * loss).backward()
    named = trainer.model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return loss.detach(), dict(metrics), gradients


def compare(trainer, batch, count=None, *, tolerance=1e-5, use=None):
    """Compare what `loss_of` returns without fastrl and with it, and return the latter."""
    from fastrl.integrations.trl.saturation import METRIC

    theirs = loss_of(trainer, batch, count)
    with used(**(use or {}))(trainer):
        ours = loss_of(trainer, batch, count)
    assert ours[0].item() == pytest.approx(theirs[0].item(), abs=tolerance)
    assert ours[1].pop(METRIC, [0]) == [0]
    assert ours[1].keys() == theirs[1].keys()
    for name, values in theirs[1].items():
        assert ours[1][name] == pytest.approx(values, abs=tolerance, nan_ok=True), name
    torch.testing.assert_close(ours[2], theirs[2], rtol=min(10 * tolerance, 1e-3), atol=tolerance)
    return ours
