"""The metrics of the losses, collected over micro-batches on the device and read once per step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastrl import kl_divergence
from fastrl.train.packing import PackedBatch
from fastrl.train.rewards import Scored
from fastrl.train.rollout import Rollout, TokenCount

#: Of a micro-batch, what no mean over tokens says anything about.
_NO_MEANS = {"policy_loss", "ratio_max", "ratio_min", "active_tokens"}


class MetricMeans:
    """Means of a loss's metrics over tokens, the largest ratio, and the number of tokens."""

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._seen: list[dict[str, Tensor]] = []
        self._learned = 0
        self._minibatch = 0  # where the current minibatch begins

    def begin_minibatch(self) -> None:
        """Start the minibatch that `minibatch_kl` measures."""
        self._minibatch = len(self._seen)

    def minibatch_kl(self) -> float:
        """Return the minibatch's mean KL to the sampling policy; 0 without tokens."""
        seen, tokens = self._seen[self._minibatch :], self._tokens[self._minibatch :]
        total = sum(metrics["kl_old"] * count for metrics, count in zip(seen, tokens, strict=True))
        count = float(sum(tokens))
        return float(total) / count if count else 0.0

    def add(self, metrics: Mapping[str, Tensor], kl_sampler: Tensor, batch: PackedBatch) -> None:
        """Add a micro-batch: the loss's metrics, and the KL to the policy of the sampler."""
        kept = {name: value.detach() for name, value in metrics.items()}
        self._seen.append({**kept, "kl_sampler": kl_sampler})
        self._tokens.append(metrics["active_tokens"].detach().double())
        self._learned += batch.input_ids.shape[1]

    def read(self) -> dict[str, float]:
        """Return the means over all tokens so far; without tokens only ``learned_tokens``."""
        learned = {"learned_tokens": float(self._learned)}
        if not self._seen:
            return learned
        tokens = torch.stack(self._tokens)
        share = tokens / tokens.sum().clamp(min=1)
        values = {
            name: torch.stack([seen[name] for seen in self._seen]).double()
            for name in self._seen[0]
        }
        names = [name for name in values if name not in _NO_MEANS]
        means = {name: float((values[name] * share).sum()) for name in names}
        return {**means, "ratio_max": float(values["ratio_max"].max()), **learned}


def sampler_kl(logprobs: Tensor, of_sampler: Tensor) -> Tensor:
    """Return the mean KL (k3) from the sampler to its policy, over tokens ``[n]``."""
    return kl_divergence(of_sampler, logprobs.detach(), estimator="k3").mean()


def reward_std(scored: Scored) -> dict[str, float]:
    """Return the standard deviation of the rewards, if a completion has one."""
    rewards = scored.total[scored.known]
    return {"reward_std": float(rewards.std(correction=0))} if len(rewards) else {}


def lengths(rollout: Rollout, computed: TokenCount) -> dict[str, float]:
    """Return number of tokens, mean length and truncated share of completions, and token counts.

    ``real_tokens`` counts prompts and completions, and ``padded_tokens`` counts padding, too.
    ``kept_tokens`` is the mean number of tokens that the sampler kept, and ``kept_lacking`` the
    share of sampled tokens that are not among them. Completions that do not exist do not count.
    """
    row = {
        "tokens": float(rollout.mask.sum()),
        "real_tokens": float(computed.real),
        "padded_tokens": float(computed.padded),
    }
    present = rollout.mask.any(1)
    if not present.any():
        return row
    row["length"] = float(rollout.mask[present].sum(1).double().mean())
    row["truncated"] = float(rollout.truncated[present].double().mean())
    if rollout.kept is not None:
        counts, lacking = rollout.kept.counts(), rollout.kept.lacking(rollout.token_ids)
        row["kept_tokens"] = float(counts.view(rollout.mask.shape)[rollout.mask].double().mean())
        row["kept_lacking"] = float(lacking[rollout.mask].double().mean())
    return row


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return the share of the returns' variance that the values explain; 0 for equal returns."""
    y, error = returns[mask], (returns - values)[mask]
    variance = (y - y[:1]).var(correction=0)  # the rounded mean of equal returns may differ
    return float(torch.where(variance > 0, 1 - error.var(correction=0) / variance, 0.0))
