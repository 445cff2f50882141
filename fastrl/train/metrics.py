"""The metrics of the losses, collected over micro-batches on the device, read once per step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastrl import kl_divergence

_MEANS = (
    "kl",
    "kl_old",
    "entropy",
    "ratio_mean",
    "clip_low",
    "clip_high",
    "clip_fraction",
    "zero_grad_fraction",
    "kl_sampler",
)


class MetricMeans:
    """Means over tokens of a loss's metrics, and the largest ratio."""

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._seen: list[dict[str, Tensor]] = []

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add a micro-batch."""
        self._seen.append({name: value.detach() for name, value in metrics.items()})
        self._tokens.append(metrics["active_tokens"].detach().double())

    def read(self) -> dict[str, float]:
        """The means over all tokens so far; empty if there are none."""
        if not self._seen:
            return {}
        tokens = torch.stack(self._tokens)
        share = tokens / tokens.sum().clamp(min=1)
        values = {
            name: torch.stack([seen[name] for seen in self._seen])
            for name in (*_MEANS, "ratio_max")
            if name in self._seen[0]
        }
        means = {
            name: float((values[name].double() * share).sum()) for name in _MEANS if name in values
        }
        return {**means, "ratio_max": float(values["ratio_max"].max())}


def sampler_kl(logprobs: Tensor, of_sampler: Tensor) -> Tensor:
    """Mean KL (k3) of the sampler to the policy that it samples for, over tokens ``[n]``."""
    return kl_divergence(of_sampler, logprobs.detach(), estimator="k3").mean()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Share of the returns' variance that the values explain; 0 if the returns are constant."""
    y, error = returns[mask], (returns - values)[mask]
    variance = y.var(correction=0)
    return float(torch.where(variance > 0, 1 - error.var(correction=0) / variance, 0.0))
