"""torchrl's functional GAE on `fastrl.discounted_returns`.

with fastrl.integrations.torchrl.use_fastrl():
    ...  # torchrl's GAE estimator calls fastrl
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.replacing import Replaced, Replacement
from fastrl.integrations.support import Support

TRIED = "Tried with torchrl 0.14.1: the functions, and its `GAE` estimator around them."

SUPPORT = [
    Support(
        option="`generalized_advantage_estimate`, `vec_generalized_advantage_estimate`",
        handling="replaced",
        note="`done`, `terminated`, any `time_dim` and `[*B, T, F]`; differentiable once",
    ),
    Support(
        option="`gamma` or `lmbda` per step, or learned",
        handling="refused",
        note="a tensor of one element is fine",
    ),
    Support(
        option="TD(0), TD(1), TD(lambda), V-trace; `GRPOLoss` and other loss modules",
        handling="own",
    ),
]


def use_fastrl() -> Replaced:
    """Replace torchrl's `generalized_advantage_estimate` and its vectorized form by ours.

    torchrl's own modules, its `GAE` estimator among them, call ours from then on, in this process.

    Returns:
        A handle with `undo()` and `names`, which is a context manager, too.

    Raises:
        ImportError: torchrl is not importable.
        NotImplementedError: a function of this torchrl is missing, has other parameters than those
            of torchrl 0.14, or was replaced by somebody else; nothing is changed then.
        RuntimeError: torchrl runs on fastrl already.
    """
    home = "torchrl.objectives.value.functional"
    return Replaced(
        "torchrl",
        [
            Replacement(home, "generalized_advantage_estimate", generalized_advantage_estimate),
            Replacement(
                home, "vec_generalized_advantage_estimate", vec_generalized_advantage_estimate
            ),
        ],
    )


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Return advantages and value targets of torchrl's GAE, of the shape of the inputs.

    delta_t = r_t + gamma (1 - terminated_t) V'_t - V_t,
    A_t = delta_t + gamma lmbda (1 - done_t) A_{t+1},  targets = A + V,
    with the value V'_t of the next state as it is given. Differentiable, as torchrl's is, once.

    Args:
        gamma: discount in [0, 1]; a number or a tensor of one element.
        lmbda: trace decay in [0, 1]; a number or a tensor of one element.
        state_value: V, `[*B, T, F]`.
        next_state_value: V', the shape of V.
        reward: the shape of V.
        done: 0/1, the shape of V: a trajectory ends here, the trace is cut.
        terminated: 0/1, the shape of V: nothing follows, V' counts 0; None is `done`.
        time_dim: where T stands.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes differ, `time_dim` is out of range, gamma or lmbda is.
        NotImplementedError: gamma or lmbda holds several values or requires a gradient.

    Example:
        >>> import torch
        >>> from fastrl.integrations.torchrl import generalized_advantage_estimate
        >>> zero, done = torch.zeros(3, 1), torch.tensor([[False], [False], [True]])
        >>> generalized_advantage_estimate(0.5, 1.0, zero, zero, torch.ones(3, 1), done)[0].T
        tensor([[1.7500, 1.5000, 1.0000]])
    """
    decay, trace = _number("gamma", gamma), _number("lmbda", lmbda)
    terminated = done if terminated is None else terminated
    inputs = {
        "next_state_value": next_state_value,
        "reward": reward,
        "done": done,
        "terminated": terminated,
    }
    for name, value in inputs.items():
        if value.shape != state_value.shape:
            raise ValueError(
                f"{name} must have shape {tuple(state_value.shape)} like state_value, "
                f"got {tuple(value.shape)}"
            )
    if not -state_value.dim() <= time_dim < state_value.dim():
        raise ValueError(
            f"time_dim must be a dimension of tensors of shape {tuple(state_value.shape)}, "
            f"got {time_dim}"
        )
    following = torch.where(terminated.bool(), 0.0, next_state_value)
    delta = (reward + decay * following - state_value).movedim(time_dim, -1)
    rows = delta.reshape(-1, delta.shape[-1])
    cut = done.movedim(time_dim, -1).reshape(rows.shape)
    scanned = cast("Tensor", _Scan.apply(rows, cut, decay * trace))  # type: ignore[no-untyped-call]
    advantage = scanned.reshape(delta.shape).movedim(-1, time_dim).to(next_state_value.dtype)
    return advantage, advantage + state_value


def vec_generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Return `generalized_advantage_estimate`, which has no loop to be rid of."""
    return generalized_advantage_estimate(
        gamma,
        lmbda,
        state_value,
        next_state_value,
        reward,
        done,
        terminated,
        time_dim=time_dim,
    )


class _Scan(torch.autograd.Function):
    """A_t = delta_t + decay (1 - done_t) A_{t+1}; its gradient is that scan forward in time."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, done: Tensor, decay: float) -> Tensor:
        ctx.save_for_backward(done)
        ctx.decay = decay
        return fastrl.discounted_returns(delta, gamma=decay, terminated=done)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (done,) = ctx.saved_tensors
        cut = done.roll(1, -1).flip(-1)  # g_t = grad_t + decay (1 - done_{t-1}) g_{t-1}
        found = fastrl.discounted_returns(grad.flip(-1), gamma=ctx.decay, terminated=cut)
        return found.flip(-1).to(grad.dtype), None, None


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise NotImplementedError(
                f"{name} must be one number for all steps, got a tensor of shape "
                f"{tuple(value.shape)}"
            )
        if value.requires_grad:
            raise NotImplementedError(f"{name} must not require a gradient: it has none here")
        value = value.item()
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
    return float(value)
