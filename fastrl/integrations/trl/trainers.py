"""The trainers of TRL that `use_fastrl` takes, and the adapter of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastrl.integrations.support import Support
from fastrl.integrations.trl import centering, distillation, gkd, iw_opd, rules, self_distillation
from fastrl.integrations.trl.handle import Choices, Handle, check_positive
from fastrl.integrations.trl.logits_trainers import SUPPORT as _OF_LOGITS
from fastrl.integrations.trl.logits_trainers import LogitsHandle
from fastrl.integrations.trl.other_trainers import way_on
from fastrl.integrations.trl.policy_trainers import PolicyHandle
from fastrl.integrations.trl.token_trainers import SUPPORT as _OF_TOKENS
from fastrl.integrations.trl.token_trainers import TokenHandle
from fastrl.integrations.trl.tpo import SUPPORT as _OF_TPO
from fastrl.integrations.trl.tpo import TpoHandle


class Row(NamedTuple):
    """One of TRL's trainers.

    Attributes:
        name: the name of the class.
        module: the module that defines it.
        adapter: a function that checks a trainer, given this class, and returns its handle.
        methods: methods that a subclass must not override, because the adapter replaces them or
            relies on their code.
        replays: whether `replay_kept_tokens=True` is allowed.
    """

    name: str
    module: str
    adapter: Callable[[Any, type, Choices], Handle]
    methods: tuple[str, ...] = ()
    replays: bool = False


def _of_logits(name: str, folder: str, method: str) -> Row:
    module = f"trl.experimental.{folder}.{folder}_trainer"
    return Row(name, module, LogitsHandle, methods=(method,))


TRAINERS: tuple[Row, ...] = (
    Row("GRPOTrainer", "trl.trainer.grpo_trainer", PolicyHandle, replays=True),
    Row("RLOOTrainer", "trl.trainer.rloo_trainer", PolicyHandle, replays=True),
    Row("SFTTrainer", "trl.trainer.sft_trainer", TokenHandle),
    Row("DPOTrainer", "trl.trainer.dpo_trainer", TokenHandle),
    Row("KTOTrainer", "trl.trainer.kto_trainer", TokenHandle),
    Row("AsyncGRPOTrainer", "trl.experimental.async_grpo.async_grpo_trainer", TokenHandle),
    Row(
        "TPOTrainer",
        "trl.experimental.tpo.tpo_trainer",
        TpoHandle,
        methods=("_compute_loss", "compute_loss"),
    ),
    _of_logits("CPOTrainer", "cpo", "concatenated_forward"),
    _of_logits("ORPOTrainer", "orpo", "concatenated_forward"),
    _of_logits("A2POTrainer", "a2po", "_get_sequence_logps"),
    _of_logits("OnlineDPOTrainer", "online_dpo", "_forward"),
    Row(
        "DistillationTrainer",
        "trl.trainer.distillation_trainer",
        distillation.DistillationHandle,
        methods=("_compute_loss", "compute_loss"),
    ),
    Row(
        "GKDTrainer",
        "trl.experimental.gkd.gkd_trainer",
        gkd.GkdHandle,
        methods=("compute_loss",),
    ),
    Row(
        "GOLDTrainer",
        "trl.experimental.gold.gold_trainer",
        gkd.GkdHandle,
        methods=("compute_loss",),
    ),
    Row(
        "SDFTTrainer",
        "trl.experimental.sdft.sdft_trainer",
        self_distillation.SelfDistillationHandle,
        methods=self_distillation.METHODS,
    ),
    Row(
        "SDPOTrainer",
        "trl.experimental.sdpo.sdpo_trainer",
        self_distillation.SelfDistillationHandle,
        methods=self_distillation.METHODS,
    ),
    Row(
        "IWOPDTrainer",
        "trl.experimental.iw_opd.iw_opd_trainer",
        iw_opd.IwOpdHandle,
        methods=iw_opd.METHODS,
    ),
)


#: The rows of docs/support.md, of all trainers.
SUPPORT: tuple[Support, ...] = (
    *rules.SUPPORT,
    *centering.SUPPORT,
    *_OF_TOKENS,
    *_OF_LOGITS,
    *_OF_TPO,
    *distillation.SUPPORT,
    *gkd.SUPPORT,
    *self_distillation.SUPPORT,
    *iw_opd.SUPPORT,
)

NAMES: tuple[str, ...] = tuple(row.name for row in TRAINERS)


def handle_of(trainer: Any, choices: Choices) -> Handle:
    """Let a trainer use fastrl, and return its handle.

    Raises:
        TypeError: the trainer is not an instance of a class in `TRAINERS`.
        ValueError: the trainer or one of its options is not supported.
    """
    row, base = _row_of(trainer)
    _refuse_other_methods(trainer, row, base)
    if choices.replay_kept_tokens and not row.replays:
        raise ValueError(
            f"replay_kept_tokens must be False for a {row.name}, whose loss is not of the tokens "
            "that a sampler kept"
        )
    if choices.score_centering is not None:
        check_positive("score_centering", choices.score_centering)
        if row.adapter is not PolicyHandle or rules.is_rloo(trainer):
            raise ValueError(
                f"score_centering must be None for a {row.name}, got {choices.score_centering}: it "
                "changes the loss of a GRPOTrainer"
            )
    handle = row.adapter(trainer, base, choices)
    try:
        handle.announce()
    except BaseException:  # a warning that is an error
        handle.undo()
        raise
    return handle


def _row_of(trainer: Any) -> tuple[Row, type]:
    """Return the row of the most derived class that has a row."""
    rows = {(row.module, row.name): row for row in TRAINERS}
    for base in type(trainer).__mro__:
        row = rows.get((base.__module__, base.__name__))
        if row is not None:
            return row, base
    is_class = isinstance(trainer, type)
    described = f"the class {trainer.__name__}" if is_class else type(trainer).__name__
    raise TypeError(
        f"trainer must be an instance of {', '.join(NAMES[:-1])} or {NAMES[-1]}, got {described}: "
        f"{way_on(trainer)}"
    )


def _refuse_other_methods(trainer: Any, row: Row, base: type) -> None:
    """Refuse a trainer whose loss is not the loss of the row's class, as in a subclass."""
    for method in row.methods:
        if not hasattr(base, method):
            raise ValueError(f"this version of TRL has no {row.name}.{method} to replace")
        if method in trainer.__dict__:
            raise ValueError(f"trainer.{method} is already replaced; undo that first")
        if getattr(type(trainer), method) is not getattr(base, method):
            raise ValueError(
                f"{type(trainer).__name__} overrides {row.name}.{method}, which use_fastrl "
                f"replaces: {way_on(trainer)}"
            )
