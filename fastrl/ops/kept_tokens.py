"""The part of the vocabulary that a sampler kept by top-p, top-k or min-p."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastrl.checks import can_read, integer, on_device, saveable, tensor, whole
from fastrl.ops._arguments import ALL_TOKENS, KeptArguments
from fastrl.ops._lens.kept import KeptRows, check_offsets
from fastrl.ops._lens.kept_outputs import listed, of_sglang, of_vllm, padded_sets


class KeptTokens(NamedTuple):
    """The set of tokens from which each token was sampled, in the order of `token_ids.flatten()`.

    A sampler with top-p, top-k or min-p normalizes its probabilities over the tokens that it keeps.
    With these sets, a function of logits or hidden states returns log-probabilities, entropies and
    all other statistics of the sampler's distribution, as if the logits of all other tokens were
    -inf ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556). An empty set stands for the whole
    vocabulary. A row's own token counts as a member even if the set lacks it, as can happen by
    rounding at the edge of top-p. A `Teacher` of hidden states or logits is
    normalized over the same sets; one of `Teacher.from_top_k` is refused.

    Attributes:
        token_ids: integers `[M]`, the sets of all rows one after another; no id twice in a set.
        offsets: integers `[rows + 1]`, where each set begins, from 0 to M.

    Examples:
        >>> import torch, fastrl
        >>> kept = fastrl.KeptTokens(torch.tensor([0, 2]), torch.tensor([0, 2, 2]))
        >>> fastrl.token_logprobs(torch.zeros(2, 4), torch.tensor([2, 1]), kept=kept).exp()
        tensor([0.5000, 0.2500])
    """

    token_ids: Tensor
    offsets: Tensor

    @classmethod
    def from_padded(cls, token_ids: Tensor, *, padding: int = -1) -> KeptTokens:
        """Return the sets in a padded tensor.

        Args:
            token_ids: integers `[B, T, K]` or `[N, K]`.
            padding: the entry that stands for no token.

        Returns:
            The sets.

        Raises:
            TypeError: `token_ids` or `padding` is not an integer.
            ValueError: `token_ids` has another shape, or a dtype that cannot hold `padding`.

        Examples:
            >>> import torch, fastrl
            >>> fastrl.KeptTokens.from_padded(torch.tensor([[3, 1, -1], [-1, -1, -1]])).offsets
            tensor([0, 2, 2])
        """
        ids = integer("token_ids", token_ids)
        if ids.dim() not in (2, 3):
            raise ValueError(
                f"token_ids must have shape [B, T, K] or [N, K], got {tuple(ids.shape)}"
            )
        padding, held = whole("padding", padding), torch.iinfo(ids.dtype)
        if not held.min <= padding <= held.max:
            raise ValueError(f"padding must be a number of {ids.dtype}, got {padding}")
        rows = ids.flatten(0, -2)
        is_token = rows != padding
        return cls(rows[is_token], pad(is_token.sum(1).cumsum(0), (1, 0)))

    @classmethod
    def from_lists(
        cls, sets: Sequence[Sequence[int]], *, device: torch.device | str | None = None
    ) -> KeptTokens:
        """Return one set of token ids per row.

        Args:
            sets: token ids of each row; an empty set stands for the whole vocabulary.
            device: the device of the result.

        Returns:
            The sets.

        Raises:
            TypeError: `sets` is not a list of lists, or an id is not an integer.
            ValueError: an id does not fit in int32.

        Examples:
            >>> import fastrl
            >>> fastrl.KeptTokens.from_lists([[3, 1], []]).offsets
            tensor([0, 2, 2])
        """
        expectation = "sets must be a list with a list of token ids for each row"
        if isinstance(sets, KeptTokens):
            raise TypeError(f"{expectation}, got KeptTokens")
        rows = listed(expectation, sets)
        return cls._of_lists("sets", rows, device)

    @classmethod
    def _of_lists(
        cls, name: str, given: Iterable[object], device: torch.device | str | None
    ) -> KeptTokens:
        sets = [listed(f"{name} must have a list of token ids for each row", x) for x in given]
        flat = list(chain.from_iterable(sets))
        for kind in set(map(type, flat)):
            if issubclass(kind, bool) or not issubclass(kind, Integral):
                raise TypeError(f"{name} must have integers as token ids, got {kind.__name__}")
        for extreme in (min(flat), max(flat)) if flat else ():
            if not -(2**31) <= extreme < 2**31:
                raise ValueError(f"{name} must have ids of int32, got {extreme}")
        counts = torch.tensor([len(one) for one in sets], dtype=torch.int64)
        ids = torch.tensor(flat, dtype=torch.int32)
        return cls(ids.to(device), pad(counts.cumsum(0), (1, 0)).to(device))

    @classmethod
    def from_vllm(
        cls,
        outputs: Sequence[Any],
        *,
        length: int | None = None,
        device: torch.device | str | None = None,
    ) -> KeptTokens:
        """Return the sets of completions from a vLLM engine with `return_sampling_mask=True`.

        The rows follow the layout of the losses: completions `[len(outputs), length]`, padded on
        the right.

        Args:
            outputs: `CompletionOutput`s. The `sampling_mask` of each has a list of ids per token
                (or flat `token_ids` and `offsets`), or is None for the whole vocabulary.
            length: the number of tokens to which completions are padded or cut; None takes the
                longest completion.
            device: the device of the result.

        Returns:
            The sets.

        Raises:
            TypeError: `outputs` is not a list of outputs, an output has no `sampling_mask`, or an
                id is not an integer.
            ValueError: a mask does not have one set for each token of its completion, its offsets
                do not rise from 0 to the number of ids, or `length` is below 0.

        Examples:
            >>> from types import SimpleNamespace as Output
            >>> import fastrl
            >>> output = Output(token_ids=[3, 7], sampling_mask=Output(token_ids=[[3, 5], [7]]))
            >>> fastrl.KeptTokens.from_vllm([output], length=3).offsets
            tensor([0, 2, 3, 3])
        """
        sets = padded_sets("token_ids", of_vllm(outputs), length)
        return cls._of_lists("outputs", sets, device)

    @classmethod
    def from_sglang(
        cls,
        outputs: Sequence[Any],
        *,
        length: int | None = None,
        device: torch.device | str | None = None,
    ) -> KeptTokens:
        """Return the sets of completions that SGLang generated with `return_sampling_mask=True`.

        The rows follow the layout of the losses: completions `[len(outputs), length]`, padded on
        the right.

        Args:
            outputs: the dicts of `Engine.generate` or of the endpoint `/generate`. Each has its
                `output_ids`, and in its `meta_info` an `output_token_sampling_mask`, a list of ids
                per token. sglang#27408 and #33593 define the format; no test runs SGLang.
            length: the number of tokens to which completions are padded or cut; None takes the
                longest completion.
            device: the device of the result.

        Returns:
            The sets.

        Raises:
            TypeError: `outputs` is not a list of such dicts, or an id is not an integer.
            ValueError: a mask does not have one set for each token of its completion, or `length`
                is below 0.

        Examples:
            >>> import fastrl
            >>> mask = {"output_token_sampling_mask": [[3, 5], [7]]}
            >>> output = {"output_ids": [3, 7], "meta_info": mask}
            >>> fastrl.KeptTokens.from_sglang([output], length=3).offsets
            tensor([0, 2, 3, 3])
        """
        sets = padded_sets("output_ids", of_sglang(outputs), length)
        return cls._of_lists("outputs", sets, device)

    @classmethod
    def concatenate(cls, parts: Iterable[KeptTokens]) -> KeptTokens:
        """Return the sets of the rows of all parts, one after another.

        Args:
            parts: the sets to join, at least one.

        Returns:
            The sets.

        Raises:
            TypeError: `parts` is not a list of `KeptTokens`.
            ValueError: there are no parts, or a part has the wrong shape or values.

        Examples:
            >>> import fastrl
            >>> one, two = (fastrl.KeptTokens.from_lists([ids]) for ids in ([1, 2], [3]))
            >>> fastrl.KeptTokens.concatenate([one, two]).offsets
            tensor([0, 2, 3])
        """
        if isinstance(parts, KeptTokens):
            raise TypeError("parts must be a list of KeptTokens, got KeptTokens")
        parts = listed("parts must be a list of KeptTokens", parts)
        if not parts:
            raise ValueError("parts must have an element, got none")
        for index, part in enumerate(parts):
            if not isinstance(part, KeptTokens):
                raise TypeError(f"parts must have KeptTokens, got {type(part).__name__} at {index}")
            part._check(f"parts[{index}]")
            for field, value in part._asdict().items():
                on_device(f"parts[{index}].{field}", value, parts[0].offsets, "parts[0]")
        counts = torch.cat([part.counts() for part in parts])
        ids = torch.cat([part.token_ids for part in parts])
        return cls(ids, pad(counts.cumsum(0), (1, 0)))

    def counts(self) -> Tensor:
        """Return how many tokens each row has kept.

        Returns:
            int64 `[rows]`; 0 stands for the whole vocabulary.

        Examples:
            >>> import fastrl
            >>> fastrl.KeptTokens.from_lists([[3, 1], []]).counts()
            tensor([2, 0])
        """
        return integer("kept.offsets", self.offsets).to(torch.int64).diff()

    def _check(self, name: str) -> None:
        """Check the fields, and on a CPU that the offsets fit."""
        _check_fields(self, name)
        check_offsets(self.token_ids, self.offsets, name)

    def lacking(self, token_ids: Tensor) -> Tensor:
        """Return which tokens are not in the set of their row.

        The functions treat these tokens as members. If there are more than a few, the sets probably
        belong to other tokens.

        Args:
            token_ids: the token ids that the functions get, integers `[B, T]` or `[N]`.

        Returns:
            bool, the shape of `token_ids`.

        Raises:
            TypeError: `token_ids` is not a tensor of integers.
            ValueError: `token_ids` or the sets have the wrong shape or values.

        Examples:
            >>> import torch, fastrl
            >>> kept = fastrl.KeptTokens.from_lists([[3, 1], [], [2]])
            >>> kept.lacking(torch.tensor([0, 0, 2]))
            tensor([ True, False, False])
        """
        arguments = kept_arguments(self, integer("token_ids", token_ids))
        check_offsets(self.token_ids, self.offsets)
        rows = KeptRows.of(arguments, token_ids.reshape(-1).to(torch.int64), 2**31)
        return rows.lacking.reshape(token_ids.shape)

    def take(self, rows: Tensor) -> KeptTokens:
        """Return the sets of some rows.

        Args:
            rows: indices `[n]` in the order of the result, of which negative ones count from the
                end, or bool `[rows]`.

        Returns:
            The sets.

        Raises:
            TypeError: `rows` is not a tensor of integers or bool.
            ValueError: `rows` has another shape, or on a CPU an index of no row.

        Examples:
            >>> import torch, fastrl
            >>> kept = fastrl.KeptTokens.from_lists([[3, 1], [], [2]])
            >>> kept.take(torch.tensor([2, 0])).token_ids
            tensor([2, 3, 1], dtype=torch.int32)
        """
        self._check("kept")
        count, selects = self.offsets.shape[0] - 1, tensor("rows", rows).dtype == torch.bool
        if rows.dim() != 1 or (selects and rows.shape[0] != count):
            expected = f"({count},) as a mask" if selects else "[n]"
            raise ValueError(f"rows must have shape {expected}, got {tuple(rows.shape)}")
        if not selects:
            rows = integer("rows", rows).to(torch.int64)  # torch takes uint8 for a mask
            outside = rows[(rows < -count) | (rows >= count)] if can_read(rows) else rows[:0]
            if len(outside):
                raise ValueError(f"rows must lie in [{-count}, {count}), got {int(outside[0])}")
        counts, starts = self.counts()[rows], self.offsets[:-1].to(torch.int64)[rows]
        offsets = pad(counts.cumsum(0), (1, 0))
        place = torch.arange(int(offsets[-1]), device=offsets.device)
        shift = (starts - offsets[:-1]).repeat_interleave(counts)
        return KeptTokens(self.token_ids[place + shift], offsets)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> KeptTokens:
        """Return the sets on a device.

        Args:
            device: the device of the result.
            non_blocking: whether a copy may run asynchronously; see `torch.Tensor.to`.

        Returns:
            The sets.

        Examples:
            >>> import fastrl
            >>> fastrl.KeptTokens.from_lists([[3, 1]]).to("cpu").token_ids.device.type
            'cpu'
        """
        return KeptTokens(*(x.to(device, non_blocking=non_blocking) for x in self))


def _check_fields(kept: KeptTokens, name: str) -> None:
    """Check the types and dimensions of the fields."""
    for field, value, shape in zip(kept._fields, kept, ("[M]", "[rows + 1]"), strict=True):
        result = integer(f"{name}.{field}", value)
        if result.dim() != 1 or (field == "offsets" and result.shape[0] == 0):
            raise ValueError(f"{name}.{field} must have shape {shape}, got {tuple(result.shape)}")


def kept_arguments(kept: object, token_ids: Tensor) -> KeptArguments:
    """Check the types and shapes of `kept` for rows with these tokens, but not its values."""
    if kept is None:
        return ALL_TOKENS
    if not isinstance(kept, KeptTokens):
        raise TypeError(f"kept must be KeptTokens or None, got {type(kept).__name__}")
    _check_fields(kept, "kept")
    ids, offsets = kept
    for name, value in (("kept.token_ids", ids), ("kept.offsets", offsets)):
        on_device(name, value, token_ids, "token_ids")
    rows = token_ids.numel()
    if offsets.shape != (rows + 1,):
        raise ValueError(
            f"kept.offsets must have shape ({rows + 1},) for {rows} tokens, got "
            f"{tuple(offsets.shape)}"
        )
    wide = (torch.int32, torch.int64)
    held = (x if x.dtype in wide else x.to(torch.int64) for x in (ids, offsets))
    return KeptArguments(*map(saveable, held))
