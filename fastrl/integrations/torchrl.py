"""torchrl's functional GAE on `fastrl.discounted_returns`.

    with fastrl.integrations.torchrl.use_fastrl():
        ...

In the block, torchrl's GAE estimator calls fastrl.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.replacing import Replaced, named, original


def use_fastrl() -> Replaced:
    """Replace torchrl's `generalized_advantage_estimate` and its vectorized form by fastrl's.

    From then on, torchrl's modules in this process call fastrl's function, including the `GAE`
    estimator. Calls with a gamma or lmbda that is learned or given per step are forwarded to
    torchrl's function.

    Returns:
        A handle with `undo()` and `names`, which is also a context manager.

    Raises:
        ImportError: torchrl is not importable.
        NotImplementedError: a function of this torchrl is missing, has other parameters than in
            torchrl 0.14, or was already replaced; nothing is changed.
        RuntimeError: torchrl runs on fastrl already.

    Examples:
        >>> from fastrl.integrations.torchrl import use_fastrl
        >>> handle = use_fastrl()  # doctest: +SKIP
    """
    home = "torchrl.objectives.value.functional"
    ours = (generalized_advantage_estimate, vec_generalized_advantage_estimate)
    return Replaced("torchrl", named(home, *ours))


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
    """Return torchrl's GAE advantages and value targets (arXiv 1506.02438).

        delta_t = r_t + gamma (1 - terminated_t) V'_t - V_t
        A_t = delta_t + gamma lmbda (1 - done_t) A_{t+1}
        targets_t = A_t + V_t

    where V'_t is the given value of the next state. Both results are differentiable once.

    Args:
        gamma: discount in [0, 1]; a number or a tensor of one element, which is read on the host.
            If it has several values or requires a gradient, torchrl's function computes the whole
            call.
        lmbda: trace decay in [0, 1]; like gamma.
        state_value: V, `[*B, T, F]`.
        next_state_value: V', the shape of V.
        reward: the shape of V.
        done: 0/1, the shape of V: 1 where the trajectory ends.
        terminated: 0/1, the shape of V: 1 where V' counts as 0; None means `done`.
        time_dim: the dimension T.

    Returns:
        Advantages and targets, the shape of V.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes differ, or `time_dim`, gamma or lmbda is out of range.
        NotImplementedError: gamma or lmbda has several values or requires a gradient, and without
            `use_fastrl` torchrl's function is unknown.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.torchrl import generalized_advantage_estimate
        >>> zero, done = torch.zeros(3, 1), torch.tensor([[False], [False], [True]])
        >>> generalized_advantage_estimate(0.5, 1.0, zero, zero, torch.ones(3, 1), done)[0].T
        tensor([[1.7500, 1.5000, 1.0000]])
    """
    theirs = _torchrls(generalized_advantage_estimate, gamma=gamma, lmbda=lmbda)
    if theirs is not None:
        tensors = (state_value, next_state_value, reward, done, terminated)
        return theirs(gamma, lmbda, *tensors, time_dim=time_dim)  # type: ignore[no-any-return]
    decay, trace = _numbers(gamma, lmbda)
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


@functools.wraps(generalized_advantage_estimate, assigned=())
def vec_generalized_advantage_estimate(
    gamma: float | Tensor, lmbda: float | Tensor, *given: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return `generalized_advantage_estimate`, which is already vectorized."""
    theirs = _torchrls(vec_generalized_advantage_estimate, gamma=gamma, lmbda=lmbda)
    function = generalized_advantage_estimate if theirs is None else theirs
    return function(gamma, lmbda, *given, **options)


class _Scan(torch.autograd.Function):
    """A_t = delta_t + decay (1 - done_t) A_{t+1}; the gradient is the same scan forward in time."""

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


def _torchrls(function: Callable[..., Any], **given: float | Tensor) -> Callable[..., Any] | None:
    """Return torchrl's function if gamma or lmbda needs it, None if both are numbers."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        learned = value.requires_grad and torch.is_grad_enabled()
        if value.numel() == 1 and not learned:
            continue
        theirs = original(function)
        if theirs is None:
            given_as = "one that requires a gradient" if learned else f"shape {tuple(value.shape)}"
            raise NotImplementedError(
                f"{name} must be a number or a tensor of one element without a gradient, got "
                f"{given_as}; torchrl's function takes it while `use_fastrl` is in use"
            )
        return theirs
    return None


def _numbers(gamma: float | Tensor, lmbda: float | Tensor) -> tuple[float, float]:
    """Return gamma and lmbda as floats; two tensors are read with one GPU synchronization."""
    if isinstance(gamma, Tensor) and isinstance(lmbda, Tensor) and gamma.device == lmbda.device:
        gamma, lmbda = torch.stack([gamma.reshape(()), lmbda.reshape(())]).tolist()
    found = []
    for name, value in (("gamma", gamma), ("lmbda", lmbda)):
        number = float(value)
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {number}")
        found.append(number)
    return found[0], found[1]
