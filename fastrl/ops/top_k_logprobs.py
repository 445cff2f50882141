"""The most likely tokens of the sampler, with their log-probabilities, for score centering."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastrl.checks import floating, integer, on_device, tensor, whole
from fastrl.ops._lens.kept_outputs import listed

_NOTHING = float("-inf")


class TopKLogprobs(NamedTuple):
    """The K most likely tokens of the sampler at each token, in the order of `token_ids.flatten()`.

    With sampler q and policy p, the expected update of a policy gradient has a part that no
    advantage of a group removes: E_q[A] E_q[grad log p], which draws the policy towards the
    sampler. With `Objective(score_centering=True)` the losses subtract it (arXiv 2609.20807, as
    NeMo RL's `loss_fn.score_centering`): A C is added to the loss of a token, with the weight and
    the aggregation of its policy term, and

        rho   = (1 - sum_H q) / max(1 - sum_H p, 1e-6)
        C     = sum_H sg[m - alpha p] log p
        m     = q w(p / q),  alpha = rho w(1 / rho)

    H are the K tokens, sg stops the gradient, and w is the weight of the `rollout_correction` at
    level `token`: 1 without one, the ratio clamped to bounds for `truncate`, 0 outside of them for
    `mask` and `filter`. Filters of sequences drop C with the tokens. If w = p / q everywhere, C is
    0; if H is the whole vocabulary, C is exact.

    q must be the distribution from which tokens were sampled, after temperature, top-p and
    penalties (vLLM: `logprobs_mode="processed_logprobs"`), over the whole vocabulary: K tokens of
    it, not renormalized. With `KeptTokens`, p and q are over the kept tokens. H must not depend on
    the sampled token: if an engine adds it to its K tokens, leave it out.

    The losses are `reinforce`, whose weight may depend on `rollout_correction`; `ppo_clip`, `sapo`
    and `cispo` on policy, without `old_logprobs`; and `cispo` with `old_logprobs` of the sampler,
    where w is the ratio within its bounds. `policy_weights` multiply C, too, so they must not
    depend on the sampled token.

    Attributes:
        token_ids: integers `[N, K]` or `[B, T, K]`, no id twice in a row; -1 stands for no token.
        logprobs: log q of these tokens in nats, in the shape of `token_ids`.

    Examples:
        >>> import torch, fastrl
        >>> logits = torch.zeros(1, 4, requires_grad=True)
        >>> ids, q = torch.arange(4)[None], torch.tensor([[0.4, 0.2, 0.2, 0.2]])
        >>> result = fastrl.logits_policy_loss(
        ...     logits,
        ...     torch.tensor([3]),
        ...     torch.ones(1),
        ...     torch.ones(1),
        ...     objective=fastrl.Objective.preset("reinforce", score_centering=True),
        ...     rollout_top_k=fastrl.TopKLogprobs(ids, q.log()),
        ... )
        >>> result.loss.backward()
        >>> logits.grad  # -(onehot - q)
        tensor([[ 0.4000,  0.2000,  0.2000, -0.8000]])
    """

    token_ids: Tensor
    logprobs: Tensor

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        *,
        device: torch.device | str | None = None,
    ) -> TopKLogprobs:
        """Return the tokens of each row, padded to the longest.

        Args:
            token_ids: a list of ids for each row, which may be empty.
            logprobs: a list of their log-probabilities for each row, in nats.
            device: the device of the result.

        Returns:
            The tokens.

        Raises:
            TypeError: an argument is not a list of lists of numbers.
            ValueError: the lists do not have the same lengths, or an id is negative.

        Examples:
            >>> import fastrl
            >>> fastrl.TopKLogprobs.from_lists([[3, 1], [2]], [[-1.0, -2.0], [-0.5]]).token_ids
            tensor([[ 3,  1],
                    [ 2, -1]])
        """
        rows = [
            listed("token_ids must be a list of lists", x) for x in _rows("token_ids", token_ids)
        ]
        values = [
            listed("logprobs must be a list of lists", x) for x in _rows("logprobs", logprobs)
        ]
        if [*map(len, rows)] != [*map(len, values)]:
            raise ValueError(
                "logprobs must have the lengths of token_ids, got "
                f"{[*map(len, values)]} for {[*map(len, rows)]}"
            )
        width = max(1, *map(len, rows), 1)
        ids = torch.tensor(
            [
                [*(whole("token_ids", x, low=0) for x in row), *[-1] * (width - len(row))]
                for row in rows
            ],
            dtype=torch.int64,
        )
        try:
            held = torch.tensor(
                [[*map(float, row), *[_NOTHING] * (width - len(row))] for row in values],
                dtype=torch.float32,
            )
        except (TypeError, ValueError) as error:
            raise TypeError(f"logprobs must be a list of lists of numbers: {error}") from None
        return cls(ids.reshape(-1, width).to(device), held.reshape(-1, width).to(device))

    @classmethod
    def from_vllm(
        cls,
        outputs: Sequence[Any],
        *,
        top_k: int,
        length: int | None = None,
        device: torch.device | str | None = None,
    ) -> TopKLogprobs:
        """Return the tokens of completions that vLLM sampled with `SamplingParams(logprobs=top_k)`.

        The rows follow the layout of the losses: completions `[len(outputs), length]`, padded on
        the right. The engine must run with `logprobs_mode="processed_logprobs"`: by default vLLM
        returns log-probabilities before temperature and top-p. It adds the sampled token to the
        `top_k`, which is left out.

        Args:
            outputs: `CompletionOutput`s. The `logprobs` of each have a dict for each token, from
                ids to `Logprob`s with `logprob` and `rank`.
            top_k: the number of tokens that was requested.
            length: the number of tokens to which completions are padded or cut; None takes the
                longest completion.
            device: the device of the result.

        Returns:
            The tokens.

        Raises:
            TypeError: an output has no `logprobs`, or not a dict of them for each token.
            ValueError: an output does not have log-probabilities for each of its tokens, or more
                than `top_k`.

        Examples:
            >>> from types import SimpleNamespace as Output
            >>> import fastrl
            >>> first = {7: Output(logprob=-3.0, rank=9), 2: Output(logprob=-0.1, rank=1)}
            >>> output = Output(token_ids=[7], logprobs=[first])
            >>> fastrl.TopKLogprobs.from_vllm([output], top_k=1).token_ids
            tensor([[2]])
        """
        top_k = whole("top_k", top_k, low=1)
        completions = []
        for index, output in enumerate(listed("outputs must be a list", outputs)):
            if getattr(output, "logprobs", None) is None:
                raise TypeError(
                    "outputs must have logprobs, which vLLM returns with "
                    f"SamplingParams(logprobs={top_k}); got none at {index}"
                )
            of_tokens = [_most_likely(found, top_k, index) for found in output.logprobs]
            if len(of_tokens) != len(output.token_ids):
                raise ValueError(
                    f"outputs must have logprobs for each token, got {len(of_tokens)} for "
                    f"{len(output.token_ids)} tokens at {index}"
                )
            completions.append(of_tokens)
        longest = max(map(len, completions), default=0)
        length = longest if length is None else whole("length", length, low=0)
        rows = [row for one in completions for row in [*one[:length], *[{}] * (length - len(one))]]
        made = cls.from_lists([[*row] for row in rows], [[*row.values()] for row in rows])
        return cls(*(x.to(device) for x in _padded(made, top_k)))

    @classmethod
    def concatenate(cls, parts: Iterable[TopKLogprobs]) -> TopKLogprobs:
        """Return the rows of all parts, one after another, padded to the largest K.

        Args:
            parts: those to join, at least one, with rows `[N, K]` or `[B, T, K]`.

        Returns:
            The tokens, `[N, K]`.

        Raises:
            TypeError: `parts` is not a list of `TopKLogprobs`.
            ValueError: there are no parts, or a part has the wrong shape.

        Examples:
            >>> import fastrl
            >>> one = fastrl.TopKLogprobs.from_lists([[3, 1]], [[-1.0, -2.0]])
            >>> two = fastrl.TopKLogprobs.from_lists([[2]], [[-0.5]])
            >>> fastrl.TopKLogprobs.concatenate([one, two]).token_ids
            tensor([[ 3,  1],
                    [ 2, -1]])
        """
        if isinstance(parts, TopKLogprobs):
            raise TypeError("parts must be a list of TopKLogprobs, got TopKLogprobs")
        parts = listed("parts must be a list of TopKLogprobs", parts)
        if not parts:
            raise ValueError("parts must have an element, got none")
        for index, part in enumerate(parts):
            if not isinstance(part, TopKLogprobs):
                found = type(part).__name__
                raise TypeError(f"parts must have TopKLogprobs, got {found} at {index}")
            check_fields(part, f"parts[{index}]")
            on_device(f"parts[{index}]", part.token_ids, parts[0].token_ids, "parts[0]")
        width = max(part.token_ids.shape[-1] for part in parts)
        fields = zip(*(_padded(part, width) for part in parts), strict=True)
        return cls(*(torch.cat([*field]) for field in fields))

    def take(self, rows: Tensor) -> TopKLogprobs:
        """Return some of the rows, `[n, K]`.

        Args:
            rows: indices `[n]` in the order of the result, or bool `[rows]`.

        Returns:
            The tokens.

        Raises:
            TypeError: `rows` is not a tensor of integers or bool.
            ValueError: `rows` has another shape.

        Examples:
            >>> import torch, fastrl
            >>> top = fastrl.TopKLogprobs.from_lists([[3], [1], [2]], [[-1.0], [-2.0], [-0.5]])
            >>> top.take(torch.tensor([2, 0])).token_ids
            tensor([[2],
                    [3]])
        """
        check_fields(self, "rollout_top_k")
        if tensor("rows", rows).dtype != torch.bool:
            rows = integer("rows", rows).to(torch.int64)  # torch takes uint8 for a mask
        flat = TopKLogprobs(*(x.flatten(0, -2) for x in self))
        count = len(flat.token_ids)
        if rows.dim() != 1 or (rows.dtype == torch.bool and len(rows) != count):
            raise ValueError(f"rows must have shape [n], or ({count},) as a mask, got {rows.shape}")
        return TopKLogprobs(*(x[rows] for x in flat))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TopKLogprobs:
        """Return the tokens on a device.

        Args:
            device: the device of the result.
            non_blocking: whether a copy may run asynchronously; see `torch.Tensor.to`.

        Returns:
            The tokens.

        Examples:
            >>> import fastrl
            >>> fastrl.TopKLogprobs.from_lists([[3]], [[-1.0]]).to("cpu").token_ids.device.type
            'cpu'
        """
        return TopKLogprobs(*(x.to(device, non_blocking=non_blocking) for x in self))


def _rows(name: str, value: object) -> list[list[Any]]:
    expectation = f"{name} must be a list with a list for each row"
    return [listed(expectation, row) for row in listed(expectation, value)]


def _most_likely(found: object, top_k: int, index: int) -> dict[int, float]:
    """Return the log-probabilities of a token's `top_k` most likely tokens, by id."""
    if not isinstance(found, Mapping):
        kind = type(found).__name__
        raise TypeError(
            f"outputs must have a dict of logprobs for each token, got {kind} at {index}"
        )
    ranked = {}
    for token, one in found.items():
        value = getattr(one, "logprob", one)
        if not isinstance(value, Real):
            kind = type(value).__name__
            raise TypeError(f"outputs must have numbers as logprobs, got {kind} at {index}")
        if (getattr(one, "rank", None) or 1) <= top_k:
            ranked[token] = float(value)
    if len(ranked) != top_k:  # with too large a top_k the sampled token would stay
        raise ValueError(
            f"outputs must have {top_k} tokens of a rank up to top_k, the number that was "
            f"requested, got {len(ranked)} at {index}"
        )
    return ranked


def _padded(top: TopKLogprobs, width: int) -> TopKLogprobs:
    """Return rows `[N, width]`."""
    missing = (0, width - top.token_ids.shape[-1])
    ids, logprobs = (x.flatten(0, -2) for x in top)
    ids = ids.to(torch.int64)  # unsigned ones hold no -1
    return TopKLogprobs(pad(ids, missing, value=-1), pad(logprobs, missing, value=_NOTHING))


def check_fields(top: TopKLogprobs, name: str) -> None:
    """Check the types and shapes of the fields."""
    ids = integer(f"{name}.token_ids", top.token_ids)
    logprobs = floating(f"{name}.logprobs", top.logprobs)
    if ids.dim() not in (2, 3) or ids.shape[-1] == 0 or ids.shape != logprobs.shape:
        raise ValueError(
            f"{name}.token_ids and logprobs must have one shape, [N, K] or [B, T, K] with K at "
            f"least 1, got {tuple(ids.shape)} and {tuple(logprobs.shape)}"
        )
