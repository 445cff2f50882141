"""Generalized advantage estimation and discounted returns."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, resolve
from fastrl.checks import as_mask, floating, number, on_device, per_token, same_shape
from fastrl.library import operators
from fastrl.ops.token_weights import bounds_of


class Gae(NamedTuple):
    """Advantages and returns, in the shape of the rewards; 0 at masked tokens.

    Attributes:
        advantages: A_t, in units of the reward.
        returns: A_t + V_t, the targets of the value function.

    Examples:
        >>> import torch, fastrl
        >>> fastrl.gae(torch.ones(1, 1), torch.zeros(1, 1)).returns
        tensor([[1.]])
    """

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Gae:
    """Return generalized advantage estimates (Schulman et al. 2016, arXiv 1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        returns_t = A_t + V_t

    where t + 1 is the next active token: masked tokens are skipped. lam = 0 is one-step TD,
    lam = 1 is Monte Carlo.

    Args:
        rewards: `[B, T]` or packed `[N]`.
        values: the shape of `rewards`.
        mask: 0/1, the shape of `rewards`; masked tokens (padding, tool output) are skipped. None
            means all are active.
        gamma: discount per token, in [0, 1].
        lam: trace decay per token, in [0, 1].
        terminated: 0/1, the shape of `rewards`: 1 where the episode ends after t, so that V_{t+1} =
            A_{t+1} = 0.
        truncated: 0/1, the shape of `rewards`: 1 where the trajectory is cut after t, so that
            A_{t+1} = 0. V_{t+1} is then `bootstrap_values[b, t]` if these are per token, else the
            value of the next token.
        bootstrap_values: the value of the state after the last active token, `[B]` (packed `[S]`),
            or after every token, in the shape of `rewards` (which takes precedence if both shapes
            are equal); None means 0.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N. None is one
            sequence.
        backend: `auto`, or the backend to use.

    Returns:
        `Gae`, fp32 (fp64 from fp64), without gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value.

    Examples:
        >>> import torch, fastrl
        >>> rewards = torch.tensor([[0.0, 1.0, 0.0]])
        >>> values, mask = torch.tensor([[0.0, 0.0, 100.0]]), torch.tensor([[1, 1, 0]])
        >>> fastrl.gae(rewards, values, mask, gamma=1.0, lam=0.95).advantages
        tensor([[0.9500, 1.0000, 0.0000]])
    """
    r = per_token("rewards", rewards).detach()
    v = same_shape("values", floating("values", values), r, "rewards").detach()
    gamma = number("gamma", gamma, low=0.0, high=1.0)
    lam = number("lam", lam, low=0.0, high=1.0)
    bounds = bounds_of(r, cu_seqlens)
    dtype = torch.float64 if torch.float64 in (r.dtype, v.dtype) else torch.float32

    def as_2d(x: Tensor) -> Tensor:
        return x[None] if r.dim() == 1 else x

    def flags(name: str, value: Tensor | None) -> Tensor | None:
        return None if value is None else as_2d(as_mask(name, value, r, "rewards")).contiguous()

    sequences = r.shape[0] if r.dim() == 2 else 1 if bounds is None else bounds.shape[0] - 1
    inputs = (
        as_2d(r).to(dtype).contiguous(),
        as_2d(v).to(dtype).contiguous(),
        flags("mask", mask),
        flags("terminated", terminated),
        flags("truncated", truncated),
        _bootstrap(bootstrap_values, r, sequences, dtype),
        bounds,
        gamma,
        lam,
    )
    chosen = resolve(backend, r.device, dtype)
    if chosen == "reference":
        ones = torch.ones_like(inputs[0], dtype=torch.bool)
        active = ones if inputs[2] is None else inputs[2]
        outputs = reference.gae(inputs[0], inputs[1], active, *inputs[3:])
    else:
        outputs = cast("tuple[Tensor, Tensor]", operators(chosen).gae_fwd(*inputs))
    return Gae(*(output.reshape(r.shape) for output in outputs))


def discounted_returns(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the discounted rewards-to-go, the returns of REINFORCE (Williams 1992).

        G_t = r_t + gamma G_{t+1}

    where t + 1 is the next active token: masked tokens are skipped.

    Args:
        rewards: `[B, T]` or packed `[N]`.
        mask: 0/1, the shape of `rewards`; masked tokens (padding, tool output) are skipped. None
            means all are active.
        gamma: discount per token, in [0, 1].
        terminated: 0/1, the shape of `rewards`: 1 where the episode ends after t, so that G_{t+1} =
            0.
        truncated: 0/1, the shape of `rewards`: 1 where the trajectory is cut after t. G_{t+1} is
            then the bootstrap value of t, or 0 if t has none.
        bootstrap_values: the value of the state after the last active token, `[B]` (packed `[S]`),
            or after every token, in the shape of `rewards` (which takes precedence if both shapes
            are equal); None means 0.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N. None is one
            sequence.
        backend: `auto`, or the backend to use.

    Returns:
        fp32 (fp64 from fp64), the shape of `rewards`, without gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value.

    Examples:
        >>> import torch, fastrl
        >>> fastrl.discounted_returns(torch.tensor([[1.0, 1.0, 1.0]]), gamma=0.5)
        tensor([[1.7500, 1.5000, 1.0000]])
    """
    return gae(
        rewards,
        torch.zeros_like(per_token("rewards", rewards)),
        mask,
        gamma=gamma,
        lam=1.0,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        cu_seqlens=cu_seqlens,
        backend=backend,
    ).advantages


def _bootstrap(
    bootstrap_values: object, rewards: Tensor, sequences: int, dtype: torch.dtype
) -> Tensor | None:
    """Return bootstrap values per sequence, `[S]`, or per token, `[B, T]`."""
    if bootstrap_values is None:
        return None
    value = floating("bootstrap_values", bootstrap_values).detach()
    on_device("bootstrap_values", value, rewards, "rewards")
    if value.shape == rewards.shape:  # takes precedence if both shapes are equal
        value = value[None] if rewards.dim() == 1 else value
        return value.to(dtype).contiguous()
    if value.shape == (sequences,):
        return value.to(dtype).contiguous()
    raise ValueError(
        f"bootstrap_values must have shape ({sequences},) or {tuple(rewards.shape)}, "
        f"got {tuple(value.shape)}"
    )
