"""The distributions with which a student is compared, of a teacher or a reference policy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.checks import flag, floating, integer, number, on_device
from fastrl.contract import RowArguments
from fastrl.ops._arguments import NO_SOURCE, NO_TEACHER, Source, TeacherArguments, each_tensor
from fastrl.ops._head.head import as_head
from fastrl.ops._head.tensor_cores import gemm_dtype
from fastrl.ops._row_checks import as_rows
from fastrl.ops._vocabulary_parts.agreement import Agreement
from fastrl.ops._vocabulary_parts.parts import group_of, local_part


class Teacher(NamedTuple):
    """A teacher's distribution p at each token, with which a student's distribution q is compared.

    With m = (1 - beta) q + beta p, `beta` selects the divergence, in nats:

    | beta | divergence | |
    | --- | --- | --- |
    | 0 | KL(p, q) = sum p log(p/q) | forward: infinite where the student alone excludes a token |
    | 1 | KL(q, p) = sum q log(q/p) | reverse: infinite where the teacher alone excludes a token |
    | else | beta KL(p, m) + (1 - beta) KL(q, m) | generalized Jensen-Shannon divergence |

    This is the divergence of TRL's `GKDTrainer` (Agarwal et al. 2023, arXiv 2306.13649). Only the
    student gets a gradient. Teacher and student must have the same vocabulary: if the teacher's
    head has more rows, pass `weight[:V]`. As beta approaches 0 or 1, the Jensen-Shannon divergence
    goes to 0, like beta KL(p, q) or (1 - beta) KL(q, p), so the value jumps at beta 0 and 1.

    A logit of -inf excludes a token, and so does a finite logit with which log(q/p) reaches 2^50
    bits, such as `torch.finfo(torch.float32).min`. A token that both exclude adds nothing. An
    infinite forward KL has the gradient q - p at all tokens that the student does not exclude by
    -inf; an infinite reverse KL has no finite gradient, and its row gets none. Exclude padded
    columns of the teacher from the student, too.

    With `KeptTokens`, p and q are both normalized over the kept tokens of a row. A teacher of
    `from_top_k` is then refused: its probabilities of the other kept tokens are unknown.

    Construct a teacher with `from_hidden`, `from_logits` or `from_top_k`. Its fields are checked by
    the functions that take it; their TypeError or ValueError names the field.

    Attributes:
        hidden: the teacher's last hidden states, `[B, T, H]` or `[N, H]`; H may differ from the
            student's.
        weight: the teacher's LM head, `[V, H]`.
        bias: the bias of the head, `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale), added to the head as scale * B A, or None.
        logits: the teacher's logits, `[B, T, V]` or `[N, V]`.
        token_ids: K tokens per row, integers `[B, T, K]` or `[N, K]`, no id twice in a row.
        logprobs: the teacher's log-probabilities of these tokens in nats, in the shape of
            `token_ids`.
        has_tail: whether all other tokens together count as one more event.
        beta: selects the divergence, in [0, 1].
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.

    Examples:
        >>> import torch, fastrl
        >>> teacher = fastrl.Teacher.from_logits(torch.tensor([[2.0, 0.0]]), beta=0.0)
        >>> fastrl.token_divergence(torch.zeros(1, 2), teacher)
        tensor([0.3278])
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lora: tuple[Tensor, Tensor, float] | None = None
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    logprobs: Tensor | None = None
    has_tail: bool = True
    beta: float = 1.0
    temperature: float | Tensor = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @classmethod
    def from_hidden(
        cls,
        hidden: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        lora: tuple[Tensor, Tensor, float] | None = None,
        beta: float = 1.0,
        temperature: float | Tensor = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> Teacher:
        """Return a teacher with the logits hidden @ weight^T + bias, computed a chunk at a time.

        Args:
            hidden: the teacher's last hidden states, `[B, T, H]` or `[N, H]`; H may differ from the
                student's.
            weight: the teacher's LM head, `[V, H]`.
            bias: the bias of the head, `[V]`, or None.
            lora: (A `[r, H]`, B `[V, r]`, scale), added to the head as scale * B A, or None.
            beta: selects the divergence, in [0, 1].
            temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`,
                `[N]`.
            logit_scale: multiplies the logits; above 0 (Cohere, Granite).
            logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or
                None.

        Returns:
            The teacher.

        Examples:
            >>> import torch, fastrl
            >>> hidden, weight = torch.ones(1, 2), torch.eye(2)
            >>> teacher = fastrl.Teacher.from_hidden(hidden, weight)
            >>> fastrl.linear_divergence(hidden, weight, teacher)
            tensor([0.])
        """
        return cls(
            hidden=hidden,
            weight=weight,
            bias=bias,
            lora=lora,
            beta=beta,
            temperature=temperature,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
        )

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        *,
        beta: float = 1.0,
        temperature: float | Tensor = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> Teacher:
        """Return a teacher with these logits.

        Args:
            logits: the teacher's logits, `[B, T, V]` or `[N, V]`.
            beta: selects the divergence, in [0, 1].
            temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`,
                `[N]`.
            logit_scale: multiplies the logits; above 0 (Cohere, Granite).
            logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or
                None.

        Returns:
            The teacher.

        Examples:
            >>> import torch, fastrl
            >>> logits = torch.randn(2, 3, 5)
            >>> fastrl.token_divergence(logits, fastrl.Teacher.from_logits(logits)).sum()
            tensor(0.)
        """
        return cls(
            logits=logits,
            beta=beta,
            temperature=temperature,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
        )

    @classmethod
    def from_top_k(
        cls, token_ids: Tensor, logprobs: Tensor, *, has_tail: bool = True, beta: float = 1.0
    ) -> Teacher:
        """Return a teacher that is known only by its log-probabilities of K tokens in each row.

        Inference servers return such log-probabilities. With a tail, all other tokens together
        count as one more event, and divergence and `teacher_entropy` are computed over the K + 1
        events; without a tail, both distributions are normalized over the K tokens. The tail's
        probability is 1 minus the probability of the K tokens, but at least the rounding error of 1
        in the dtype of the log-probabilities.

        Args:
            token_ids: K tokens per row, integers `[B, T, K]` or `[N, K]`, no id twice in a row.
            logprobs: the teacher's log-probabilities of these tokens in nats, in the shape of
                `token_ids`.
            has_tail: whether all other tokens together count as one more event.
            beta: selects the divergence, in [0, 1].

        Returns:
            The teacher.

        Examples:
            >>> import torch, fastrl
            >>> ids, logprobs = torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.25]]).log()
            >>> teacher = fastrl.Teacher.from_top_k(ids, logprobs)
            >>> fastrl.token_divergence(torch.zeros(1, 4), teacher)  # of (1/4, 1/4, 1/2)
            tensor([0.1733])
        """
        return cls(token_ids=token_ids, logprobs=logprobs, has_tail=has_tail, beta=beta)

    def _shared(self) -> tuple[object, ...]:
        """Return the properties that must be equal on all ranks that split a vocabulary."""
        given = (self.hidden, self.weight, self.logits, self.bias, *(self.lora or ())[:2])
        kinds = [None if x is None else (str(x.dtype), x.dim()) for x in given]
        width = None if self.hidden is None else self.hidden.shape[-1]
        lora = None if self.lora is None else (self.lora[0].shape[0], self.lora[2])
        return (*kinds, width, lora, *self[self._fields.index("token_ids") :])


#: The fields of each kind of teacher, beside bias and LoRA of a head.
_KINDS = (["hidden", "weight"], ["logits"], ["token_ids", "logprobs"])


def teacher_arguments(
    teacher: object,
    rows: RowArguments,
    inputs: Tensor,
    vocabulary: int,
    agreement: Agreement | None,
    kept: object = None,
) -> TeacherArguments:
    """Check a teacher for rows `[B, T]` of these logits or hidden states; None is no teacher.

    `vocabulary` is the size of this rank's part.
    """
    if teacher is None:
        return NO_TEACHER
    if not isinstance(teacher, Teacher):
        raise TypeError(f"teacher must be a Teacher or None, got {type(teacher).__name__}")
    came = [name for name in Teacher._fields[:7] if getattr(teacher, name) is not None]
    optional = ("bias", "lora") if teacher.weight is not None else ()
    if [name for name in came if name not in optional] not in _KINDS:
        raise ValueError(
            "teacher must have either hidden and weight (and bias, lora), or logits, or token_ids "
            "and logprobs, got "
            f"{', '.join(came) or 'none'}"
        )
    beta = number("teacher.beta", teacher.beta, low=0.0, high=1.0)
    known = flag("teacher.has_tail", teacher.has_tail)
    result = NO_TEACHER._replace(beta=beta, has_tail=known)
    packed = inputs.shape[0] == 1 and rows.token_ids.shape[0] == 1
    if teacher.logprobs is not None:
        if kept is not None:
            raise ValueError(
                "kept must be None with a teacher of some tokens: its probabilities of the other "
                "kept tokens, over which both distributions are normalized, are unknown"
            )
        return _of_top_k(teacher, result, rows)
    name = "hidden" if teacher.logits is None else "logits"
    given = teacher.hidden if teacher.logits is None else teacher.logits
    if teacher.logits is not None and agreement is not None:
        group_of("teacher.logits", given, agreement.group, dim=-1)
        given = local_part(given)
    given = floating(f"teacher.{name}", given)
    on_device(f"teacher.{name}", given, inputs, "the student")
    if teacher.logits is not None and given.shape[-1:] != (vocabulary,):
        raise ValueError(
            f"teacher.logits must have a vocabulary of {vocabulary} like the student, got "
            f"{tuple(given.shape)}"
        )
    ids = rows.token_ids[0] if given.dim() == 2 and packed else rows.token_ids
    try:
        padded, scaled = as_rows(
            given,
            ids,
            None if rows.mask is None else rows.mask.reshape(ids.shape),
            teacher.temperature,
            teacher.logit_scale,
            teacher.logit_softcap,
            rows.ignore_index,
            name=name,
            vocabulary=vocabulary,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"teacher.{error}") from None
    real = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    result = result._replace(scaling=each_tensor(lambda x: x.to(real), scaled.scaling()))
    if teacher.logits is not None:
        return result._replace(source=NO_SOURCE._replace(logits=padded.detach()))
    group = None if agreement is None else agreement.group
    try:
        head = as_head(given.detach(), teacher.weight, teacher.bias, teacher.lora, group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"teacher.{error}") from None
    if head.vocabulary != vocabulary:
        way = "pass the first rows of a longer head" if group is None else "split both heads alike"
        raise ValueError(
            f"teacher.weight must have {vocabulary} rows like the student's head, got "
            f"{head.vocabulary}: {way}"
        )
    hidden = padded.reshape(-1, padded.shape[-1])
    source = Source(None, hidden, *head.parameters(), head.lora_scale, None)
    constants = [None if x is None else x.detach() for x in source.trainable()]
    return result._replace(source=source.with_trainable(constants))


def with_operand_dtype(teacher: TeacherArguments, backend: str) -> TeacherArguments:
    """Return the teacher with the dtype in which this backend multiplies its head."""
    source = teacher.source
    if source.hidden is None or source.weight is None:
        return teacher
    dtype = gemm_dtype(source.hidden, source.weight, backend)
    return teacher._replace(source=source._replace(operand_dtype=dtype))


def refuse_shared_memory(logits: Tensor, teacher: TeacherArguments) -> None:
    """Raise if the gradient of a row would overwrite teacher logits of another row."""
    given = teacher.source.logits
    if given is None or torch.compiler.is_compiling():
        return
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:  # the gradient overwrites a copy
        return
    if given.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
        return
    pair = (logits, given)
    same = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in pair]
    ends = []
    for x in pair:
        spans = ((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        ends.append(x.data_ptr() + (sum(spans) + 1) * x.element_size())
    apart = ends[0] <= given.data_ptr() or ends[1] <= logits.data_ptr()
    if same[0] != same[1] and logits.numel() and not apart:
        raise ValueError(
            "teacher.logits must not share memory with other rows of the logits, which their "
            "gradient overwrites: clone them, or leave the gradient its own memory"
        )


def _of_top_k(teacher: Teacher, result: TeacherArguments, rows: RowArguments) -> TeacherArguments:
    for name, usual in (("logit_softcap", None), ("temperature", 1), ("logit_scale", 1)):
        value = getattr(teacher, name)
        if value is not None and not isinstance(value, Tensor):
            number(f"teacher.{name}", value)
        if isinstance(value, Tensor) or value != usual:
            raise ValueError(f"teacher.{name} has no effect on log-probabilities")
    ids = integer("teacher.token_ids", teacher.token_ids)
    logprobs = floating("teacher.logprobs", teacher.logprobs)
    for name, x in (("token_ids", ids), ("logprobs", logprobs)):
        on_device(f"teacher.{name}", x, rows.token_ids, "the student")
    shape = rows.token_ids.shape
    leading = (shape, shape[1:]) if shape[0] == 1 else (shape,)
    if ids.shape[:-1] not in leading or ids.shape[-1] == 0 or logprobs.shape != ids.shape:
        raise ValueError(
            f"teacher.token_ids and logprobs must have one shape, {tuple(leading[-1])} plus a last "
            f"dimension of at least 1, got {tuple(ids.shape)} and {tuple(logprobs.shape)}"
        )
    flat = ids.reshape(-1, ids.shape[-1]).to(torch.int64).contiguous()
    of_tokens = logprobs.detach().reshape(flat.shape).contiguous()
    return result._replace(token_ids=flat, logprobs=of_tokens)
