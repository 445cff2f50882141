"""Per-token estimates of the KL divergence between two policies."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, torch_only
from fastrl.checks import floating, one_of, positive, same_shape
from fastrl.contract import KL_ESTIMATORS, KlEstimator


def kl_divergence(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: KlEstimator = "k3",
    clamp: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return an estimate of KL(pi || ref) for each token sampled from pi.

    With d = ref_logprobs - logprobs, clamped to +-80:

        k1 = -d              unbiased, any sign
        k2 = d^2 / 2         biased, never negative
        k3 = exp(d) - 1 - d  unbiased, never negative
        abs = |d|

    (Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html). verl
    calls them kl, mse, low_var_kl and abs. If both log-probabilities are the same infinity (a token
    that both policies exclude), d = 0. An infinite log-probability is a constant with gradient 0;
    any other has the gradient NaN if the estimate is NaN.

    Args:
        logprobs: log-probabilities under the policy, in nats, of any shape; differentiable.
        ref_logprobs: log-probabilities under the reference policy, in nats, in the shape of
            `logprobs`; differentiable.
        estimator: `k1`, `k2`, `k3` or `abs`.
        clamp: bound on the absolute value of the estimate, with gradient 0 outside, or None.
        backend: `auto` or `reference`; the function is plain torch on every device.

    Returns:
        The estimate for each token in nats, the shape of `logprobs`, fp32 (fp64 from fp64).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value.

    Examples:
        >>> import torch, fastrl
        >>> fastrl.kl_divergence(torch.tensor([-1.0]), torch.tensor([-2.0]), estimator="k1")
        tensor([1.])
        >>> fastrl.kl_divergence(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor([0.3679])
    """
    torch_only(backend)
    current = floating("logprobs", logprobs)
    ref = same_shape("ref_logprobs", floating("ref_logprobs", ref_logprobs), current, "logprobs")
    one_of("estimator", estimator, KL_ESTIMATORS)
    bound = inf if clamp is None else positive("clamp", clamp)
    dtype = torch.float64 if current.dtype == torch.float64 else torch.float32
    kl = reference.kl_estimate(current.to(dtype), ref.to(dtype), estimator, bound)
    if estimator in ("k1", "abs") and kl.requires_grad:  # whose gradients would be finite at NaN
        kl = kl * torch.where(kl.isnan(), kl.detach(), 1.0)
    return kl
