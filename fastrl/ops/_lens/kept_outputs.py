"""What vLLM and SGLang return of the tokens that they kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from fastrl.checks import whole

#: The token ids of a completion, and its mask.
Completion = tuple[object, object]


def of_vllm(outputs: Sequence[Any]) -> list[Completion]:
    """Return the ids and the mask of each `CompletionOutput`."""
    outputs = listed("outputs must be a list of CompletionOutputs", outputs)
    for index, output in enumerate(outputs):
        if not hasattr(output, "sampling_mask"):
            raise TypeError(
                "outputs must have a sampling_mask, which an engine returns with "
                f"return_sampling_mask=True; got {type(output).__name__} at {index}"
            )
    return [(getattr(output, "token_ids", None), output.sampling_mask) for output in outputs]


def of_sglang(outputs: Sequence[Any]) -> list[Completion]:
    """Return the ids and the mask of each dict of a response."""
    completions, key = list[Completion](), "output_token_sampling_mask"
    for index, output in enumerate(listed("outputs must be a list of dicts", outputs)):
        information = output.get("meta_info") if isinstance(output, Mapping) else None
        if not isinstance(information, Mapping) or information.get(key) is None:
            raise TypeError(
                f"outputs must have an {key} in meta_info, which SGLang returns with "
                f"return_sampling_mask=True; got {type(output).__name__} without at {index}"
            )
        completions.append((output.get("output_ids"), information[key]))
    return completions


def padded_sets(name: str, completions: list[Completion], length: int | None) -> list[object]:
    """Return the sets of each token, with empty ones behind the end of a completion."""
    lengths = [len(listed(f"outputs must have a list as {name}", ids)) for ids, _ in completions]
    length = max(lengths, default=0) if length is None else whole("length", length, low=0)
    sets: list[object] = []
    for index, ((_, mask), count) in enumerate(zip(completions, lengths, strict=True)):
        of_tokens = _sets_of(mask, count, index)
        if len(of_tokens) != count:
            raise ValueError(
                f"outputs must have a set for each token: {count} tokens and {len(of_tokens)} "
                f"sets at {index}"
            )
        of_tokens = of_tokens[:length]
        sets += [*of_tokens, *[()] * (length - len(of_tokens))]
    return sets


def listed(expectation: str, value: object) -> list[Any]:
    """Return the elements of a list, tuple, array, tensor or generator."""
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return list(value)
    raise TypeError(f"{expectation}, got {type(value).__name__}")


def _sets_of(mask: Any, tokens: int, index: int) -> Sequence[object]:
    """Return the set of each token of a completion from the completion's mask in vLLM."""
    if mask is None:
        return [()] * tokens
    ids = listed("outputs must have a sampling_mask of lists", getattr(mask, "token_ids", mask))
    offsets = getattr(mask, "offsets", None)
    if offsets is None:
        return ids
    bounds = list(pairwise(int(offset) for offset in offsets))
    total = len(ids)
    ends = (int(offsets[0]), int(offsets[-1])) if bounds else (0, 0)
    if ends != (0, total) or any(begin > end for begin, end in bounds):
        raise ValueError(
            f"outputs must have offsets that rise from 0 to the number of ids {total}, got "
            f"{list(offsets)} at {index}"
        )
    return [ids[begin:end] for begin, end in bounds]
