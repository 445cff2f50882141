"""Options of the weight that VESPO gives to a sequence."""

from __future__ import annotations

import dataclasses

from fastrl.checks import number, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class GammaWeights:
    """The weight that VESPO gives to a sequence in the policy term (arXiv 2602.10693; TRL, Liger).

    Let `log w` be the sum of `logprobs - old_logprobs` over a sequence. All tokens of the sequence
    have the weight

        phi = e^lambda w^k e^(-lambda w)

    which is 1 at `w = 1` and largest at `w = k / lambda`. It is a constant, so the gradient of
    `-phi A logprob` is `-phi A`. `lambda` and `k` follow the sign of the advantage `A`. A
    `RolloutCorrection` of kind `truncate` or `mask` enters `w`, as a factor of each token's ratio,
    instead of multiplying the loss; in the KL it remains a factor. The log-ratio of a token is
    clamped to [-20, 20], the logarithm of its factor and `log w` to [log 1e-8, 20], and `log phi`
    to at most 80.

    Attributes:
        k_pos: exponent for `A >= 0`.
        lambda_pos: decay for `A >= 0`.
        k_neg: exponent for `A < 0`.
        lambda_neg: decay for `A < 0`.

    Raises:
        ValueError: a field is invalid.
        TypeError: a field has the wrong type.

    Examples:
        >>> import torch, fastrl
        >>> logprobs = torch.full((2, 2), -1.0, requires_grad=True)
        >>> fastrl.policy_loss(
        ...     logprobs,
        ...     torch.tensor([1.0, -1.0]),
        ...     torch.ones(2, 2),
        ...     old_logprobs=torch.full((2, 2), -1.0 - 0.5),  # w = e
        ...     objective="vespo",
        ... ).loss.backward()
        >>> logprobs.grad * 4
        tensor([[-0.0426, -0.0426],
                [ 0.6463,  0.6463]])
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        for sign in ("pos", "neg"):
            k, decay = f"k_{sign}", f"lambda_{sign}"
            value = number(f"gamma_weights.{k}", getattr(self, k), low=0.0)
            object.__setattr__(self, k, value)
            value = positive(f"gamma_weights.{decay}", getattr(self, decay))
            object.__setattr__(self, decay, value)
