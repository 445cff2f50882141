"""The scale and the softcap of a causal language model, between its LM head and its logits.

Both are read from the model and its configuration, where families use different names. A few rows
are then compared with the model's own logits, once for each model.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fastrl.integrations.transformers.linear import head_layers
from fastrl.integrations.transformers.random_rows import RandomRows
from fastrl.integrations.transformers.wrappers import (
    LOGITS,
    causal_model,
    is_fsdp1,
    only_thread_in,
    unwrapped_once,
    wrappers,
)

#: Names of a factor on the logits, and whether they are divided by it.
_SCALES = (
    ("logit_scale", False),  # Cohere
    ("output_multiplier", False),
    ("lm_head_multiplier", False),  # Falcon-H1
    ("logits_scaling", True),  # Granite, MiniCPM3
    ("logits_scaling", False),  # HyperCLOVA X
    ("logits_mup_width_multiplier", True),  # Inkling divides the hidden states
)
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class Transform(NamedTuple):
    """A transform of logits: softcap(logit_scale * logits).

    Attributes:
        logit_scale: multiplies the logits.
        logit_softcap: `c` of `c tanh(logits / c)`, or None.
    """

    logit_scale: float
    logit_softcap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits for the output of its linear layer."""
        scaled = logits * self.logit_scale
        cap = self.logit_softcap
        return scaled if cap is None else cap * (scaled / cap).tanh()


class _Compared(NamedTuple):
    """A transform that gives a model's logits, and the candidates that it was chosen from."""

    candidates: tuple[Transform, ...]
    forward: Any  # of the linear layer, if it has one of its own
    transform: Transform


_COMPARED: weakref.WeakKeyDictionary[nn.Module, _Compared] = weakref.WeakKeyDictionary()


def transform_of(model: nn.Module) -> Transform:
    """Return the transform of a causal language model; compare it first if the model is whole.

    Raises:
        ValueError: the model's logits differ from every transform that its attributes may mean, or
            the model is being traced and has not been compared.
    """
    causal = causal_model(model)
    candidates = _candidates(causal)
    known = _COMPARED.get(causal)
    if known is not None and known.candidates == candidates:
        return known.transform
    if torch.compiler.is_compiling():
        raise ValueError(
            "lm_head must be called once before it is compiled: it compares a few rows with the "
            "model's logits"
        )
    if _is_whole(causal) and not _is_capturing():
        return prove(model)
    return candidates[0]


def prove(model: nn.Module) -> Transform:
    """Compare a few rows with the logits of a causal language model, unless that has been done.

    The model is called as it is, with its wrappers if it is sharded, on a few tokens. Random rows
    replace the output of its backbone; the backbone itself is called only if it is sharded.

    Raises:
        ValueError: the logits differ for every transform that the model's attributes may mean.
    """
    causal = causal_model(model)
    candidates = _candidates(causal)
    forward = head_layers(causal.get_output_embeddings()).linear.__dict__.get("forward")  # type: ignore[operator]
    known = _COMPARED.get(causal)
    if known is not None and known.candidates == candidates and known.forward is forward:
        return known.transform
    if _has_no_values(causal):
        return candidates[0]
    is_whole = _is_whole(causal)
    if is_whole:  # DDP and DeepSpeed would communicate
        model = next(part for part in wrappers(model) if unwrapped_once(part) is None)
    scales = {x.logit_scale for x in candidates}
    rows = RandomRows(causal, is_whole=is_whole, scales=scales)
    with only_thread_in(causal):
        logits, linear = rows.logits(model)
    linear = linear[:, : vocabulary_of(causal)]
    equal = [x for x in candidates if _distance(x(linear), logits, rows.rounding) <= 1]
    if not equal:
        _refuse(type(causal).__name__, candidates, linear, logits, rows.rounding)
    # a head of zeros or NaN shows nothing: compare again later
    if len(equal) == 1 and linear.nan_to_num().any():
        _COMPARED[causal] = _Compared(candidates, forward, equal[0])
    return equal[0]


def _distance(expected: Tensor, logits: Tensor, rounding: float) -> float:
    """Return the distance between logits, in units that rounding explains."""
    if expected.shape != logits.shape or not torch.equal(expected.isfinite(), logits.isfinite()):
        return math.inf
    # the product, scale, division by the cap, tanh and factor round once, by half of `rounding`
    finite = expected.isfinite()
    expected, logits = expected[finite], logits[finite]
    error = (expected - logits).abs() / (2.5 * rounding * expected.abs() + 1e-30)
    # errors of rounding have both signs: they do not change the size of all logits
    size = (expected * logits).sum() / (expected.square().sum() + 1e-30)
    systematic = (size - 1).abs() / rounding if expected.any() else size.new_zeros(())
    return max(error.amax().item() if len(error) else 0.0, systematic.item())


def _refuse(
    name: str, candidates: tuple[Transform, ...], linear: Tensor, logits: Tensor, rounding: float
) -> None:
    if linear.shape != logits.shape:
        raise ValueError(
            f"the logits of {name} must have the shape of its LM head's, {tuple(linear.shape)}, "
            f"got {tuple(logits.shape)}; pass the used part of the weight to the linear functions "
            "yourself"
        )
    errors = [(x(linear) - logits).nan_to_num().abs().amax().item() for x in candidates]
    raise ValueError(
        f"the logits of {name} differ from softcap(scale (hidden W^T + bias)) by {min(errors):.3g} "
        f"where the largest is {logits.nan_to_num().abs().amax().item():.3g}, for every scale and "
        f"softcap that it names ({rounding:.2g} is the rounding); pass weight, scale and softcap "
        "to the linear functions yourself, with the hidden states that its last linear layer is "
        f"given. {LOGITS}"
    )


def _candidates(causal: nn.Module) -> tuple[Transform, ...]:
    """Return the transforms that a model's attributes may mean, likeliest first."""
    scales = [
        1 / value if divides else value
        for name, divides in _SCALES
        for value in _numbers(causal, name)
        if value or not divides
    ]
    caps = [value for name in _SOFTCAPS for value in _numbers(causal, name) if value]
    found = [Transform(scale, cap) for cap in (*caps, None) for scale in (*scales, 1.0)]
    return tuple(dict.fromkeys(found))


def _numbers(causal: nn.Module, name: str) -> list[float]:
    """Return the values of a number in the model and its configuration, as either may be read."""
    config = causal.config.get_text_config()  # type: ignore[union-attr, operator]
    values = (causal.__dict__.get(name), getattr(config, name, None))
    numbers = [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]
    return [float(x) for x in dict.fromkeys(numbers) if math.isfinite(x)]


def vocabulary_of(causal: nn.Module) -> int | None:
    """Return how many rows of the head give logits, if the configuration says that it is padded.

    Inkling's head is padded.
    """
    count = getattr(causal.config.get_text_config(), "unpadded_vocab_size", None)  # type: ignore[union-attr, operator]
    return count if isinstance(count, int) else None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _has_no_values(causal: nn.Module) -> bool:
    """Return whether parameters are on the meta device, or traced."""
    return any(p.is_meta or isinstance(p, FakeTensor) for p in causal.parameters())


def _is_whole(causal: nn.Module) -> bool:
    """Return whether a model can be called by one rank alone, and has values."""
    if any(is_fsdp1(module) for module in causal.modules()):
        return False
    weight = getattr(causal.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    if weight is not None and weight.dim() != 2:  # a part of what FSDP1 around the model has
        return False
    if any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in causal.parameters()):
        return False
    return not _has_no_values(causal)
