"""Log-probability, entropy and other statistics of given tokens, from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def squashed(logits: Tensor, logit_scale: float, logit_softcap: float | None) -> Tensor:
    """Return the logits under the softcap, if there is one; -inf remains -inf."""
    if logit_softcap is None:
        return logits
    x = logits * (logit_scale / logit_softcap)
    # autograd's slope of tanh is 1 - tanh^2; that of 2 sigmoid(2 x) - 1 keeps its digits
    twin = 2 * logsigmoid(2 * x).exp()
    capped = logit_softcap * (torch.tanh(x).detach() + (twin - twin.detach()))
    return torch.where(logits == float("-inf"), logits, capped)


def shifted_logits(
    logits: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    logit_softcap: float | None,
    row_max: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return z - max z and max z for z = softcap(logit_scale * logits) / temperature.

    The maximum is subtracted before anything is rounded, so a common offset of the logits costs no
    precision. If its token has more than half of the probability, the maximum is differentiated
    instead of treated as a constant: 1 - p is then summed over the other tokens, without
    cancellation. A logit of -inf excludes its token: it remains -inf under a softcap and gets no
    gradient. A temperature that is a tensor is per row. If the logits are a part of the row,
    `row_max` is the largest logit of the whole row.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature[..., None].to(logits.dtype)
    u = squashed(logits, logit_scale, logit_softcap)
    factor = 1.0 if logit_softcap is not None else logit_scale
    if row_max is None:
        largest = u.gather(-1, u.argmax(-1, keepdim=True))
        others = ((u - largest) * factor / temperature).detach().exp().sum(-1, keepdim=True) - 1
        largest = torch.where(others < 1, largest, largest.detach())
    else:
        largest = squashed(row_max, logit_scale, logit_softcap)[..., None]
    largest = torch.where(largest == float("-inf"), 0.0, largest)  # all logits are -inf
    excluded = torch.where(logits == float("-inf"), logits.detach(), 0.0)
    # the maximum gets its gradient even if the token itself is excluded
    shifted = (torch.where(excluded == 0, u, 0.0) - largest) * factor / temperature + excluded
    return shifted, largest * factor / temperature


def log_sum_exp(shifted: Tensor) -> Tensor:
    """Return log sum exp t, `[..., 1]`, for the t of `shifted_logits`.

    It is log1p of the sum without the maximum, which keeps its digits if one token has nearly all
    the probability.
    """
    columns = torch.arange(shifted.shape[-1], device=shifted.device)
    top = columns == shifted.argmax(-1, keepdim=True)
    # expm1 is 0 at the maximum, NaN in a row with NaN, and -1 in a row of -inf alone
    return torch.where(top, shifted.expm1(), shifted.exp()).sum(-1, keepdim=True).log1p()


def token_stats(
    logits: Tensor,
    token_ids: Tensor,
    active: Tensor,
    *,
    temperature: float | Tensor,
    logit_scale: float,
    logit_softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, entropy, logsumexp, sum of squared probabilities, and is_top1.

    With t = z - max z:  log p = t - log sum exp t,  H = log sum exp t - sum p t.
    Inactive rows have no effect, and all their outputs are 0. In an active row with an id outside
    the vocabulary the log-probability is NaN.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if isinstance(temperature, Tensor):
        temperature = torch.where(active, temperature, 1.0)
    x = torch.where(active[..., None], logits, 0.0).to(dtype)
    known = (token_ids >= 0) & (token_ids < logits.shape[-1])
    token_ids = torch.where(active & known, token_ids, 0)[..., None]
    shifted, maximum = shifted_logits(x, temperature, logit_scale, logit_softcap)
    log_sum = log_sum_exp(shifted)
    logprobs = shifted - log_sum
    probs = logprobs.exp()
    # 0 log 0 = 0: a token of probability 0 contributes neither to the entropy nor to its gradient
    finite = torch.where(probs == 0, 0.0, shifted)
    stats = (
        torch.where(known, logprobs.gather(-1, token_ids)[..., 0], float("nan")),
        log_sum[..., 0] - (probs * finite).sum(-1),
        (maximum + log_sum)[..., 0],
        probs.detach().square().sum(-1),
    )
    u = squashed(x.detach(), logit_scale, logit_softcap)
    top1 = u.gather(-1, token_ids) >= u.amax(-1, keepdim=True)
    inactive = torch.zeros((), dtype=dtype, device=logits.device)
    logprob, entropy, logsumexp, sum_sq_probs = (
        torch.where(active, stat, inactive) for stat in stats
    )
    return logprob, entropy, logsumexp, sum_sq_probs, top1[..., 0] & active
