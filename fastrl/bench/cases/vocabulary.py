"""Operators on a vocabulary, from logits or from hidden states and the LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.backend import Backend
from fastrl.bench import error, libraries
from fastrl.bench.case import BACKWARD, BOTH, FORWARD, Case, Inputs, Provider, Size
from fastrl.bench.error import Work
from fastrl.bench.inputs import (
    AUTOCAST,
    FROZEN,
    MASKED,
    PACKED,
    SLICED,
    WITH_TEACHER,
    vocabulary_inputs,
)  # fmt: skip
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Ours, Participants, Peer

KEPT = r"[1-9]\d* kept"
BETAS = {"": 1.0, "reverse KL": 1.0, "forward KL": 0.0, "Jensen-Shannon": 0.5}
OBJECTIVE = fastrl.Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean")
TEACHING = fastrl.Objective(clip_low=0.2, clip_high=0.2, teacher_coef=1.0, aggregation="token-mean")


class Operator(NamedTuple):
    """A public function as a case calls it; the forward of one without a loss has no graph."""

    ours: Ours
    work: Work
    peers: tuple[Peer, ...] = ()
    #: Other calls of fastrl that do the same.
    forms: Callable[[Participants], list[Provider]] = lambda who: []

    def case(self, size: Size, step: str, who: Participants) -> Case:
        """Return the case of a size and a pass."""
        hidden_size, vocabulary = MODELS[size.model]
        linear = size.op.startswith("linear")
        trained = linear and size.variant != FROZEN
        leaves = ("hidden", *(["weight"] if trained else [])) if linear else ("logits",)
        # Liger takes one advantage per row of tokens
        peers = [one for one in self.peers if one != libraries.LIGER or size.variant != PACKED]
        providers = [*who.fastrl(self.ours), *self.forms(who), *who.others(peers)]
        providers += _eager(self.work, size, who, linear=linear)
        if size.variant == AUTOCAST:
            providers = [one._replace(forward=_autocast(one.forward, who)) for one in providers]
        found = error.Error(self.work, step, trained=trained)
        case = Case(
            size=size,
            step=step,
            shape={"rows": size.rows, "hidden": hidden_size, "vocabulary": vocabulary},
            inputs=lambda seed: vocabulary_inputs(size, who.device, seed),
            providers=providers,
            error=found,
            output_error=found.of_output if step == BOTH else None,
            leaves=() if step == FORWARD and not self.work.mean else leaves,
        )
        of = _with_gemms if linear else _with_copy
        return of(case, self.work, who, "teacher_logits" in self.work.names)


def _eager(work: Work, size: Size, who: Participants, *, linear: bool) -> list[Provider]:
    if not linear:
        return [*who.torch(work.eager, ("logits", *work.names), size.dtype)]
    others = tuple(name for name in work.names if name != "teacher_logits")
    teacher = ("teacher_hidden", "teacher_weight") if len(others) < len(work.names) else ()

    def eager(hidden: Tensor, weight: Tensor, *tokens: Tensor, upcast: bool) -> Any:
        if teacher:
            *own, states, head = tokens
            tokens = (*own, states @ head.T)
        return work.eager(hidden @ weight.T, *tokens, upcast=upcast)

    return [*who.torch(eager, ("hidden", "weight", *others, *teacher), size.dtype)]


def _with_copy(case: Case, work: Work, who: Participants, teacher: bool) -> Case:
    """Return a case from logits with its traffic, and a copy as its floor."""
    size, step = case.size, case.step
    copied = ("logits", "teacher_logits") if teacher else ("logits",)
    share = 0.5 if size.variant == MASKED else 1.0
    # Masked rows are not read, but their gradient is written. A loss can leave its gradient at the
    # first reading; with statistics it depends on what follows.
    reads, writes = {FORWARD: (1, 0), BACKWARD: (1, 1), BOTH: (1 if work.mean else 2, 1)}[step]
    shape = {name: value for name, value in case.shape.items() if name != "hidden"}
    moved = (reads * len(copied) * share + writes) * size.rows * shape["vocabulary"]
    return case._replace(
        shape=shape,
        providers=[*case.providers, copy_floor(step, *copied)],
        bytes_moved=int(moved * size.dtype.itemsize),
    )


def _with_gemms(case: Case, work: Work, who: Participants, teacher: bool) -> Case:
    """Return a case from hidden states with the arithmetic of its GEMMs, which are its floor."""
    size, step, trained = case.size, case.step, case.size.variant != FROZEN
    gemms = {FORWARD: 1, BACKWARD: 1 + trained, BOTH: 2 + trained}[step]
    gemms += teacher and step != BACKWARD
    rows = size.rows // 2 if size.variant == MASKED else size.rows
    if work is error.LOSS_OF_KEPT:  # a row needs only the rows of the head that it kept
        kept = int(size.variant.split()[0])
        return case._replace(flops=2 * gemms * rows * case.shape["hidden"] * kept)
    # CPUs without AMX multiply 16 bits more slowly than float32
    dtype = torch.float32 if who.device.type == "cpu" else size.dtype
    return case._replace(
        providers=[*case.providers, _bare_gemms(trained, dtype, size.dtype)],
        flops=2 * gemms * rows * case.shape["hidden"] * case.shape["vocabulary"],
    )


def copy_floor(step: str, *names: str) -> Provider:
    """Return a provider that copies inputs, the same in any pass."""
    copy = Copy(*names)
    if step == BACKWARD:
        return Provider("copy", "floor", lambda inputs: None, lambda _, inputs: copy(inputs))
    return Provider("copy", "floor", copy, lambda answer, _: answer)


class Copy:
    """Copies to memory that it keeps."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.held: dict[str, Tensor] = {}

    def __call__(self, inputs: Inputs) -> None:
        """Copy."""
        for name in self.names:
            source = inputs[name].detach()
            if name not in self.held:
                self.held[name] = torch.empty_like(source)
            self.held[name].copy_(source)


def _bare_gemms(trained: bool, dtype: torch.dtype, given: torch.dtype) -> Provider:
    """The GEMMs of as many rows as are active, in a dtype that they are converted to beforehand."""
    name = "bare GEMMs" if dtype == given else f"bare GEMMs in {str(dtype).removeprefix('torch.')}"

    def prepare(inputs: Inputs) -> Inputs:
        names = [name for name in inputs if name.endswith(("hidden", "weight"))]
        found = inputs | {name: inputs[name].to(dtype) for name in names}
        return found | {"rows": found["hidden"].flatten(0, 1)[: inputs["active"]]}

    def forward(inputs: Inputs) -> Tensor:
        if "teacher_hidden" in inputs:
            inputs["teacher_hidden"].flatten(0, 1) @ inputs["teacher_weight"].T
        weight: Tensor = inputs["weight"].detach()
        rows: Tensor = inputs["rows"]
        return rows @ weight.T

    def backward(logits: Tensor, inputs: Inputs) -> list[Tensor]:
        gradients = [logits @ inputs["weight"].detach()]
        return gradients + ([logits.T @ inputs["rows"]] if trained else [])

    return Provider(name, "floor", forward, backward, prepare)


def _autocast(forward: Callable[[Inputs], Any], who: Participants) -> Callable[[Inputs], Any]:
    def under_autocast(inputs: Inputs) -> Any:
        with torch.autocast(who.device.type, torch.bfloat16):
            return forward(inputs)

    return under_autocast


def _logits_loss(x: Inputs, backend: Backend, logits: Tensor | None = None, **options: Any) -> Any:
    logits = x["logits"] if logits is None else logits
    tokens = [x[name] for name in ("token_ids", "mask", "old_logprobs")]
    if "cu_seqlens" in x:
        logits, *tokens = (one.flatten(0, 1) for one in (logits, *tokens))
        options["cu_seqlens"] = x["cu_seqlens"]
    ids, mask, old = tokens
    return fastrl.logits_policy_loss(
        logits, ids, x["sequence_advantages"], mask, old_logprobs=old, objective=OBJECTIVE,
        backend=backend, **options,
    ).loss  # fmt: skip


def _in_place(who: Participants) -> list[Provider]:
    """Return the loss of each kernel that writes the gradient over the logits."""

    def ours(x: Inputs, backend: Backend) -> Any:
        return _logits_loss(x, backend, _of_model(x), inplace=True)

    def over_logits(loss: Tensor, x: Inputs) -> tuple[Tensor, ...]:
        torch.autograd.backward(loss)
        return (x["logits"].detach(),)

    def copied(x: Inputs) -> Inputs:
        logits = x["logits"]  # a clone of a slice would not be one
        size, strides = logits.untyped_storage().nbytes() // logits.itemsize, logits.stride()
        copy = logits.new_empty(size).as_strided(logits.shape, strides)
        return x | {"logits": copy.copy_(logits)}

    kernels = who._replace(backends=tuple(one for one in who.backends if one != "reference"))
    return [
        one._replace(kind="fastrl in place", backward=over_logits, prepare=one.prepare or copied)
        for one in kernels.fastrl(ours, " in place")
    ]


class _FromModel(torch.autograd.Function):
    """Logits that are not a leaf, like the output of a model."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, anchor: Tensor) -> Tensor:
        return logits.data  # the same memory, but not a view that autograd would guard

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _of_model(inputs: Inputs) -> Tensor:
    logits = inputs["logits"].detach()
    anchor = torch.zeros((), device=logits.device, requires_grad=True)
    found: Tensor = _FromModel.apply(logits, anchor)  # type: ignore[no-untyped-call]
    return found


def _linear_loss(x: Inputs, backend: Backend, **options: Any) -> Any:
    names = ("hidden", "weight", "token_ids", "sequence_advantages", "mask")
    options = {"old_logprobs": x["old_logprobs"], "objective": OBJECTIVE, **options}
    return fastrl.linear_policy_loss(*(x[name] for name in names), backend=backend, **options).loss


def _teacher(x: Inputs, beta: float) -> fastrl.Teacher:
    return fastrl.Teacher.from_hidden(x["teacher_hidden"], x["teacher_weight"], beta=beta)


def _token_divergence(beta: float) -> Operator:
    """Return the mean divergence from a teacher's logits."""

    def ours(x: Inputs, backend: Backend) -> Tensor:
        teacher = fastrl.Teacher.from_logits(x["teacher_logits"], beta=beta)
        return fastrl.token_divergence(x["logits"], teacher, backend=backend).mean()

    return Operator(ours, error.divergence(beta))


def _linear_divergence(beta: float) -> Operator:
    """Return the mean divergence from hidden states and heads, and the same as a policy loss."""

    def ours(x: Inputs, backend: Backend) -> Tensor:
        teacher = _teacher(x, beta)
        return fastrl.linear_divergence(x["hidden"], x["weight"], teacher, backend=backend).mean()

    def one_pass(x: Inputs, backend: Backend) -> Any:
        return fastrl.linear_policy_loss(
            x["hidden"], x["weight"], x["token_ids"], None, x["mask"], teacher=_teacher(x, beta),
            objective=TEACHING, backend=backend,
        ).loss  # fmt: skip

    return Operator(
        ours, error.divergence(beta), libraries.divergence(beta),
        lambda who: who.fastrl(one_pass, " linear_policy_loss"),
    )  # fmt: skip


def _call(function: Callable[..., Any], *names: str) -> Ours:
    return lambda x, backend: function(*(x[name] for name in names), backend=backend)


_LOGITS, _LINEAR = ("logits", "token_ids"), ("hidden", "weight", "token_ids")
_LINEAR_LOSS = Operator(_linear_loss, error.LOSS, libraries.LINEAR_LOSS)
#: By function and by regular expressions of its variants.
OPERATORS: dict[str, dict[str, Operator]] = {
    "token_logprobs": dict.fromkeys(("", SLICED), Operator(
        _call(fastrl.token_logprobs, *_LOGITS), error.LOGPROBS, libraries.LOGITS,
    )),
    "token_stats": dict.fromkeys(("", SLICED), Operator(
        lambda x, backend: _call(fastrl.token_stats, *_LOGITS)(x, backend)[:2],
        error.STATS, libraries.STATS,
    )),
    "logits_policy_loss": dict.fromkeys(("", MASKED, PACKED, SLICED), Operator(
        _logits_loss, error.LOSS, (*libraries.LOGITS_LOSS, libraries.LIGER), _in_place,
    )),
    "linear_token_logprobs": {"": Operator(
        _call(fastrl.linear_token_logprobs, *_LINEAR), error.LOGPROBS, libraries.LINEAR,
    )},
    "linear_policy_loss": {
        **dict.fromkeys(("", MASKED, AUTOCAST, FROZEN), _LINEAR_LOSS),
        WITH_TEACHER: Operator(
            lambda x, backend: _linear_loss(
                x, backend, teacher=_teacher(x, 1.0), objective=TEACHING
            ),
            error.LOSS_WITH_TEACHER,
        ),
        KEPT: Operator(
            lambda x, backend: _linear_loss(x, backend, kept=x["kept"]), error.LOSS_OF_KEPT
        ),
    },
    "token_divergence": {name: _token_divergence(beta) for name, beta in BETAS.items()},
    "linear_divergence": {name: _linear_divergence(beta) for name, beta in BETAS.items()},
}  # fmt: skip
