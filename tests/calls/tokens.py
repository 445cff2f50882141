"""The tokens of a case, and tensors of their numbers: dtype, layout, masked values."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Case

#: Values where the mask is 0, which must not change any result.
MASKED_VALUES = {"nan": np.nan, "1e30": 1e30, "inf": np.inf}
#: A NaN whose payload carries into the sign if it is rounded to 16 bits like a number.
NAN_PAYLOADS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF),
}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens in a row: which sequence each belongs to, and which are valid."""

    shape: tuple[int, ...]  # [B, T], or packed [N]; of means [], [B, 2, T]
    sequence: np.ndarray  # [N]
    count: int  # sequences
    bounds: np.ndarray | None  # cu_seqlens
    mask: np.ndarray | None  # [N]; None: the call gets none
    valid: np.ndarray  # [N]

    @property
    def packed(self) -> bool:
        return len(self.shape) == 1

    @property
    def total(self) -> int:
        return len(self.sequence)

    def placed(self, x: Any, inside: np.ndarray) -> Any:
        """Return what the tokens `inside` have, laid out as the tokens are, among zeros."""

        def spread(values: np.ndarray) -> np.ndarray:
            full = np.zeros((self.total, *values.shape[1:]), values.dtype)
            full[inside] = values
            return full.reshape((*self.shape, *values.shape[1:]))

        return x.map(spread)


def tokens_of(case: Case) -> Tokens:
    """Return the tokens of a case."""
    random = case.random("tokens")
    bounds, rows, width = None, case.sequences, case.tokens
    if case.layout == "cut":
        lengths = random.integers(0, width + 1, rows)
        bounds = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
        shape, sequence = (int(lengths.sum()),), np.repeat(np.arange(rows), lengths)
    else:
        shape = {"padded": (rows, width), "0-d": (), "3-d": (rows, 2, width)}.get(
            case.layout, (rows * width,)
        )
        rows = 1 if len(shape) < 2 else rows
        sequence = np.repeat(np.arange(rows), int(np.prod(shape)) // max(rows, 1))
    mask = _mask(case, random, sequence, rows)
    valid = np.ones(len(sequence), bool) if mask is None else mask
    return Tokens(shape, sequence, rows, bounds, mask, valid)


def _mask(
    case: Case, random: np.random.Generator, sequence: np.ndarray, count: int
) -> np.ndarray | None:
    total = len(sequence)
    if case.mask == "absent":
        return None
    if case.mask in ("all", "none"):
        return np.full(total, case.mask == "all")
    if case.mask == "one":
        mask = np.zeros(total, bool)
        mask[random.integers(0, max(total, 1), 1 if total else 0)] = True
        return mask
    place = np.arange(total) - np.searchsorted(sequence, sequence)
    if case.mask == "ragged":  # sequences end early, some before they begin
        lengths = np.bincount(sequence, minlength=count)
        return place < random.integers(0, lengths + 1)[sequence]
    if case.mask == "gaps":  # and a sequence in the middle without any
        return (random.random(total) < 0.6) & (sequence != count // 2)
    if case.mask == "holes":
        return random.random(total) < 0.6
    if case.mask == "without-first":  # an empty sequence, and a prompt in front of the others
        return (sequence > 0) & (place >= random.integers(0, 3, count)[sequence])
    raise ValueError(f"no mask {case.mask}")


def flat_tensor(case: Case, values: np.ndarray, dtype: str) -> Tensor:
    """Return a tensor of these numbers, with the NaN that the case asks for."""
    result = torch.tensor(np.ascontiguousarray(values)).to(getattr(torch, dtype))
    if case.has("nan-payload") and result.is_floating_point():
        integers, payload = NAN_PAYLOADS[result.dtype]
        bits = result.view(integers)
        bits[result.isnan()] = payload
    return result


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another memory layout, with NaN in the gaps."""
    if x.numel() == 0:  # numpy gives such a tensor strides of 0
        return torch.empty(x.shape, dtype=x.dtype) if layout != "strided" else x
    if layout == "contiguous" or x.dim() == 0:
        return x
    if layout == "expanded":
        return x[:1].expand(x.shape) if bool((x == x[:1]).all()) else x
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x
    fill = float("nan") if x.is_floating_point() else 1
    *outer, last = x.shape
    if layout == "odd":  # the base address is not aligned to a vector
        return x.new_full((x.numel() + 1,), fill)[1:].view(x.shape).copy_(x)
    if layout == "sliced":
        return x.new_full((*outer, last + 3), fill)[..., :last].copy_(x)
    if layout == "strided":
        return x.new_full((*outer, 2 * last), fill)[..., ::2].copy_(x)
    if layout == "shifted":  # logits[:, :-1]
        rows = max(x.dim() - 2, 0)
        shape = [size + (axis == rows) for axis, size in enumerate(x.shape)]
        return x.new_full(shape, fill).narrow(rows, 0, x.shape[rows]).copy_(x)
    raise ValueError(f"no layout {layout}")


def token_tensor(case: Case, tokens: Tokens, values: np.ndarray, dtype: str) -> Tensor:
    """Return `[N]` float values as a per-token tensor, with the case's values where masked."""
    if case.masked_values != "usual":
        values = np.where(tokens.valid, values, MASKED_VALUES[case.masked_values])
    return laid_out(flat_tensor(case, values, dtype).view(tokens.shape), case.token_layout)


def mask_tensor(case: Case, tokens: Tokens) -> Tensor | None:
    if tokens.mask is None:
        return None
    mask = torch.tensor(tokens.mask.astype(np.int64)).to(getattr(torch, case.mask_dtype))
    return laid_out(mask.view(tokens.shape), case.token_layout)


def bounds_argument(case: Case, tokens: Tokens) -> dict[str, Tensor]:
    if tokens.bounds is None:
        return {}
    return {"cu_seqlens": torch.tensor(tokens.bounds).to(getattr(torch, case.bounds_dtype))}


def as_held(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float64 numbers that a tensor of this dtype holds."""
    return torch.tensor(x).to(getattr(torch, dtype)).to(torch.float64).numpy()


def on_grid(case: Case, x: np.ndarray, steps: float) -> np.ndarray:
    """Return the multiples of a step next to these numbers, or what is drawn from all."""
    return np.round(x * steps) / steps if case.values == "grid" else x


def some(case: Case, feature: str, x: np.ndarray, value: float, share: float = 0.4) -> np.ndarray:
    """Return numbers with this value among them, if the case has the feature."""
    if not case.has(feature):
        return x
    return np.where(case.random(feature).random(len(x)) < share, value, x)
