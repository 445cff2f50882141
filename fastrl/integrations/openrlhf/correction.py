"""OpenRLHF's importance weights for the mismatch between trainer and rollout engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import fastrl


class RolloutGate(NamedTuple):
    """Weights of tokens from the ratio exp(old_log_probs - rollout_log_probs).

    | level | mode | gating | weight of a token |
    | --- | --- | --- | --- |
    | `token` | `clip` | `ratio` | the ratio, clipped to the threshold (TIS) |
    | `token` | `mask` | `ratio` | the ratio, 0 outside the threshold (IcePop) |
    | `seq` | `mask` | `ratio` | the ratio, 0 if the geometric mean over the sequence is outside |
    | `token`, `seq` | `mask` | `binary_kl`, `tv` | the ratio, 0 if that divergence is outside |

    Log-ratios saturate at +-80, like those of a `RolloutCorrection`.

    Raises:
        ValueError: a field is invalid, or two fields conflict.
    """

    level: str
    mode: str
    gating: str
    threshold: tuple[float, float]

    @classmethod
    def of_0_11_0(
        cls, enabled: bool, threshold: tuple[float, float] | None, kind: str
    ) -> RolloutGate:
        """Return the gate for the options of OpenRLHF 0.11.0."""
        kinds = {
            "tis": ("token", "clip"),
            "icepop": ("token", "mask"),
            "seq-mask-tis": ("seq", "mask"),
        }
        if kind not in kinds:
            raise ValueError(
                f"vllm_is_correction_type must be one of {', '.join(kinds)}; got {kind!r}"
            )
        if enabled and threshold is None:
            raise ValueError("vllm_is_truncated_threshold is needed with the correction, got None")
        level, mode = kinds[kind]
        return cls(level if enabled else "off", mode, "ratio", threshold or (0.0, 2.0)).checked()

    def checked(self) -> RolloutGate:
        """Return the gate if OpenRLHF accepts it, else raise."""
        choices = {
            "level": ("off", "token", "seq"),
            "mode": ("mask", "clip"),
            "gating": ("ratio", "binary_kl", "tv"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"is_correction_{name} must be one of {', '.join(known)}; "
                    f"got {getattr(self, name)!r}"
                )
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            raise ValueError(
                "is_correction_mode clip needs is_correction_level token and is_correction_gating "
                f"ratio, got {self.level} and {self.gating}"
            )
        low, _ = self.threshold
        if self.gating != "ratio" and self.level != "off" and low > 0:
            raise ValueError(
                f"is_correction_threshold must have no lower bound with gating {self.gating}, "
                f"got {low}"
            )
        return self

    @torch.no_grad()
    def weigh(
        self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights `[B, T]`, the KL to the rollout engine, and the share dropped."""
        wide = torch.promote_types(old_log_probs.dtype, torch.float32)  # e^80 is above any float16
        old_log_probs, rollout_log_probs = old_log_probs.to(wide), rollout_log_probs.to(wide)
        log_ratio = old_log_probs - rollout_log_probs
        statistic = self._statistic(log_ratio, old_log_probs, rollout_log_probs, mask)
        low, high = self.threshold
        outside = (statistic < low) | (statistic > high)
        if self.mode == "clip":
            weights = statistic.clamp(low, high)
        else:
            weights = torch.where(outside, 0.0, _ratio(log_ratio))
        share = outside.to(log_ratio.dtype)
        filtered = share.mean() if self.level == "seq" else fastrl.masked_mean(share, mask)
        return weights, fastrl.masked_mean(-log_ratio, mask), filtered

    def _statistic(
        self, log_ratio: Tensor, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the quantity to compare with the threshold, `[B, T]`, or `[B, 1]` per sequence."""
        statistic = log_ratio
        if self.gating != "ratio":
            p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (rollout_log_probs, old_log_probs))
            statistic = (p - q).abs()
            if self.gating == "binary_kl":
                statistic = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        if self.level == "seq":
            statistic = fastrl.masked_mean(statistic, mask, dim=-1)[:, None]
        return _ratio(statistic) if self.gating == "ratio" else statistic


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-80.0, 80.0).exp()
