"""The structs that the CUDA kernels take, for ctypes: field for field as in csrc.

They hold addresses: the tensors must stay alive. `tests/cuda/host/program.h` tells their sizes.
A struct names in `optional` which pointers may be null, or structs whose pointers may be.
"""

import ctypes
import functools

import torch

from fastrl import contract

POINTER, INT, INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
FLOAT, DOUBLE, BOOL = ctypes.c_float, ctypes.c_double, ctypes.c_bool


def address(x):
    return None if x is None else x.data_ptr()


def fields(kind, *names):
    return [(name, kind) for name in names]


class Struct(ctypes.Structure):
    """Takes tensors where it holds pointers; what is not given is 0."""

    optional = ()

    def __init__(self, **values):
        super().__init__(
            **{n: address(x) if isinstance(x, torch.Tensor) else x for n, x in values.items()}
        )

    @classmethod
    def pointers(cls):
        """Return the paths of all pointers, and whether each may be null."""
        found = {}
        for name, kind in cls._fields_:
            optional = name in cls.optional
            if kind is POINTER:
                found[name] = optional
            elif issubclass(kind, Struct):
                found |= {f"{name}.{path}": o or optional for path, o in kind.pointers().items()}
        return found

    def given(self):
        """Return which of the pointers are not null."""
        return {p: bool(functools.reduce(getattr, p.split("."), self)) for p in self.pointers()}


class Constant(Struct):
    _fields_ = [*fields(POINTER, "values"), *fields(BOOL, "by_sequence")]

    @classmethod
    def of(cls, tensor):
        return cls() if tensor is None else cls(values=tensor, by_sequence=tensor.dim() == 1)


class LossConstants(Struct):
    optional = ("policy_weights", "old_logprobs", "ref_logprobs")
    _fields_ = [
        *fields(Constant, "advantages", "weights"),
        *fields(Constant, "kl_weights", "entropy_weights", "policy_weights"),
        *fields(POINTER, "old_logprobs", "ref_logprobs"),
    ]

    @classmethod
    def of(cls, arguments):
        a = arguments
        return cls(
            advantages=Constant.of(a.advantages),
            weights=Constant.of(a.weights),
            kl_weights=Constant.of(a.weights if a.kl_weights is None else a.kl_weights),
            entropy_weights=Constant.of(
                a.weights if a.entropy_weights is None else a.entropy_weights
            ),
            policy_weights=Constant.of(a.policy_weights),
            old_logprobs=a.old_logprobs,
            ref_logprobs=a.ref_logprobs,
        )


class Coefficients(Struct):
    _fields_ = fields(FLOAT, *contract.Coefficients._fields)


class Objective(Struct):
    _fields_ = [
        *fields(INT, *contract.ObjectiveArguments._fields[:-1]),
        *fields(Coefficients, "coefficients"),
    ]

    @classmethod
    def of(cls, arguments):
        coefficients = contract.Coefficients._make(arguments.coefficients)
        if contract.SURROGATES[arguments.surrogate] == "gmpo":  # as the operator has it
            arguments = arguments._replace(level=contract.LEVELS.index("sequence"))
        scalars = Coefficients(**coefficients._asdict())
        return cls(**{**arguments._asdict(), "coefficients": scalars})


class Sequences(Struct):
    optional = ("cu_seqlens",)
    _fields_ = [*fields(POINTER, "cu_seqlens"), *fields(INT64, "tokens", "count", "row_length")]

    @classmethod
    def of(cls, tokens, cu_seqlens):
        rows, length = tokens.shape
        count = rows if cu_seqlens is None else cu_seqlens.numel() - 1
        return cls(cu_seqlens=cu_seqlens, tokens=tokens.numel(), count=count, row_length=length)


class Mask(Struct):
    _fields_ = [
        *fields(POINTER, "values"),
        *fields(INT, "element_bytes"),
        *fields(BOOL, "is_float"),
    ]

    @classmethod
    def of(cls, mask):
        if mask is None:
            return cls()
        is_float = mask.is_floating_point()
        return cls(values=mask, element_bytes=mask.element_size(), is_float=is_float)


class PolicyLossParams(Struct):
    optional = ("entropy", "entropy_slope", "partial_sums", "arrived")
    _fields_ = [
        *fields(POINTER, "logprobs", "entropy", "mask"),
        *fields(LossConstants, "constants"),
        *fields(Objective, "objective"),
        *fields(Sequences, "sequences"),
        *fields(POINTER, "loss", "slope", "entropy_slope", "metrics"),
        *fields(INT64, "per_block"),
        *fields(INT, "ranks"),
        *fields(POINTER, "partial_sums", "arrived"),
        *fields(BOOL, "aligned", "by_sequence"),
    ]


class DeviceNumber(Struct):
    _fields_ = [*fields(POINTER, "value"), *fields(INT, "type")]
    DTYPES = (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )

    @classmethod
    def of(cls, number):
        return cls() if number is None else cls(value=number, type=cls.DTYPES.index(number.dtype))


class SequenceWeightsParams(Struct):
    optional = ("token_ids", "normalizer_tensor", "active", "words", "before_word")
    _fields_ = [
        *fields(Mask, "mask"),
        *fields(POINTER, "token_ids"),
        *fields(INT64, "ignore_index"),
        *fields(Sequences, "sequences"),
        *fields(INT, "aggregation"),
        *fields(FLOAT, "normalizer"),
        *fields(DeviceNumber, "normalizer_tensor"),
        *fields(FLOAT, "length_norm"),
        *fields(BOOL, "count_empty"),
        *fields(INT64, "group_size"),
        *fields(POINTER, "weights", "active"),
        *fields(POINTER, "before_chunk", "words", "before_word", "arrived"),
    ]


class LogitsParams(Struct):
    optional = ("mask", "temperatures")
    _fields_ = [
        *fields(INT, "type"),
        *fields(POINTER, "logits"),
        *fields(INT64, "batch", "tokens", "vocabulary", "stride_b", "stride_t"),
        *fields(POINTER, "token_ids"),
        *fields(Mask, "mask"),
        *fields(INT64, "ignore_index"),
        *fields(POINTER, "temperatures"),
        *fields(DOUBLE, "temperature", "logit_scale", "logit_softcap"),
    ]
    DTYPES = (torch.float32, torch.bfloat16, torch.float16)

    @classmethod
    def of(cls, logits, rows):
        batch, tokens, vocabulary = logits.shape
        return cls(
            type=cls.DTYPES.index(logits.dtype),
            logits=logits,
            batch=batch,
            tokens=tokens,
            vocabulary=vocabulary,
            stride_b=logits.stride(0),
            stride_t=logits.stride(1),
            **{**rows._asdict(), "mask": Mask.of(rows.mask)},
        )


class GradientParams(Struct):
    _fields_ = [
        *fields(INT, "type"),
        *fields(POINTER, "grad_logits"),
        *fields(INT64, "stride_b", "stride_t"),
    ]

    @classmethod
    def of(cls, grad):
        type_ = LogitsParams.DTYPES.index(grad.dtype)
        return cls(type=type_, grad_logits=grad, stride_b=grad.stride(0), stride_t=grad.stride(1))


class TokenStatsParams(Struct):
    _fields_ = [
        ("in", LogitsParams),
        *fields(BOOL, "with_entropy", "with_sum_sq_probs"),
        *fields(POINTER, *contract.RowStats._fields),
    ]


class TokenStatsBackwardParams(Struct):
    optional = ("grad_logprobs", "grad_entropy", "grad_logsumexp")
    _fields_ = [
        ("in", LogitsParams),
        ("out", GradientParams),
        *fields(POINTER, "row_max", "log_sum", "entropy"),
        *fields(POINTER, "grad_logprobs", "grad_entropy", "grad_logsumexp"),
    ]


class LogitsPolicyLossParams(Struct):
    _fields_ = [
        ("in", LogitsParams),
        ("out", GradientParams),
        *fields(LossConstants, "constants"),
        *fields(Objective, "objective"),
        *fields(Sequences, "sequences"),
        *fields(POINTER, "logprobs", "entropy", "ticket"),
    ]


class GaeInputs(Struct):
    optional = ("bootstrap_values", "mask", "terminated", "truncated")
    _fields_ = [
        *fields(POINTER, "rewards", "values", "bootstrap_values"),
        *fields(POINTER, "mask", "terminated", "truncated"),
        *fields(INT, "bootstrap"),
    ]


class GaeParams(Struct):
    optional = ("maps", "ticket_and_flags")
    _fields_ = [
        ("in", GaeInputs),
        *fields(Sequences, "sequences"),
        *fields(POINTER, "advantages", "returns"),
        *fields(FLOAT, "gamma", "decay"),
        *fields(POINTER, "maps", "ticket_and_flags"),
        *fields(BOOL, "aligned"),
    ]


class GroupAdvantagesParams(Struct):
    optional = ("group_ids", "entries", "entry_of")
    _fields_ = [
        *fields(POINTER, "rewards", "group_ids"),
        *fields(INT64, "count", "group_size"),
        *fields(INT, "baseline", "scale", "singleton"),
        *fields(FLOAT, "correction", "eps"),
        *fields(POINTER, "advantages", "mean", "std", "informative"),
        *fields(POINTER, "entries", "entry_of"),
        *fields(INT64, "num_entries"),
    ]


class ScaleParams(Struct):
    _fields_ = [
        *fields(INT, "type"),
        *fields(POINTER, "gradient"),
        *fields(INT64, "segments", "length", "stride"),
        *fields(DeviceNumber, "factor"),
    ]
