"""OpenRLHF's log-probabilities and KL estimates of tokens."""

from __future__ import annotations

from torch import Tensor

import fastrl
from fastrl.integrations.formulas import kl_estimate, straight_through

#: Bound of the KL estimate of a token, and of the weight of `unbiased_gradient`.
_KL_CLAMP = 10.0


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of labels, log softmax(logits / temperature)[label].

    `token_logprobs` computes them and leaves the logits as they are; OpenRLHF's function divides
    the logits by the temperature in place.

    Args:
        logits: `[..., V]`.
        labels: integers `[...]`: the token that each position predicts.
        temperature: above 0.

    Returns:
        Log-probabilities in nats, fp32, `[...]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a label is outside the vocabulary, or the temperature is not above 0.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import log_probs_from_logits
        >>> log_probs_from_logits(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
    """
    rows = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    found = fastrl.token_logprobs(rows, labels.reshape(rows.shape[:-1]), temperature=temperature)
    return found.reshape(labels.shape)


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """Return a KL estimate per token, k1, k2 or k3 of `kl_divergence`, clamped to +-10.

    Args:
        log_probs: log-probabilities under the policy in nats, of any shape.
        log_probs_base: log-probabilities under the reference policy, of the same shape.
        log_probs_old: log-probabilities under the policy that sampled, of the same shape, or None.
        kl_estimator: `k1`, `k2` or `k3`.
        unbiased_gradient: whether to keep the value, but take the gradient of w k2 with the
            detached weight w = min(exp(log_probs - log_probs_old), 10), whose expectation is the
            gradient of the KL.

    Returns:
        The estimates in nats, fp32, the shape of `log_probs`.

    Raises:
        TypeError: `kl_estimator` is passed by position, as in OpenRLHF before `log_probs_old`.
        ValueError: `kl_estimator` is none of the three.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.openrlhf import compute_approx_kl
        >>> compute_approx_kl(torch.tensor([-1.0]), torch.tensor([-2.0]), kl_estimator="k2")
        tensor([0.5000])
    """
    if isinstance(log_probs_old, str):
        raise TypeError("log_probs_old must be a tensor or None; pass kl_estimator by keyword")
    if kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"kl_estimator must be one of k1, k2, k3; got {kl_estimator!r}")
    value = kl_estimate(log_probs, log_probs_base, kl_estimator).clamp(-_KL_CLAMP, _KL_CLAMP)
    if not unbiased_gradient:
        return value
    slope = kl_estimate(log_probs, log_probs_base, "k2")
    if log_probs_old is not None:
        weight = (log_probs.detach().float() - log_probs_old.detach().float()).exp()
        slope = slope * weight.clamp(max=_KL_CLAMP)
    return straight_through(value, slope)
