"""Liger's score centering loss: what its nightly of 27 October 2026 computes, in float64."""

import pytest
import torch

from fastrl.integrations.liger import ISCorrection, LigerFusedLinearScoreCenteringLoss

B, T, V, H, K = 3, 5, 50, 8, 6
CORRECTIONS = {
    "none": None,
    "truncated": ISCorrection(high=1.3, outside="clamp"),
    "masked": ISCorrection(low=0.6, high=1.5),
    "ppo": ISCorrection(low=0.8, high=1.2, sign="ppo"),
    "unbounded": ISCorrection(),
}


def weight_of(ratio, positive, correction):
    """The weight of a token with this ratio of policy and sampler."""
    if correction is None:
        return torch.ones_like(ratio)
    low, high, outside, sign = correction
    inside = (ratio >= low) & (ratio <= high)
    if sign == "ppo":
        inside = torch.where(positive, ratio <= high, (ratio >= low) & (ratio <= 3.0))
    return torch.where(inside, ratio, ratio.clamp(low, high) if outside == "clamp" else 0.0)


def liger(hidden, weight, ids, mask, A, token_q, top, top_q, bias, *, center, correction, heat):
    """Liger's loss without its `-A alpha H`, which has no gradient; and its metrics."""
    logp = torch.log_softmax((hidden @ weight.T + bias) / heat, -1)
    A, up = A[:, None].expand(B, T), (A >= 0)[:, None].expand(B, T)
    own, head = logp.gather(-1, ids[..., None])[..., 0], logp.gather(-1, top)
    w = weight_of((own.detach() - token_q).exp(), up, correction)
    p, q = head.detach().exp(), top_q.exp()
    tail_q = 1 - q.sum(-1)
    rho = tail_q.clamp(min=0) / (1 - p.sum(-1)).clamp(min=1e-6)
    alpha = rho * weight_of(1 / rho, up, correction)
    coefficients = q * weight_of(p / q, up[..., None], correction) - alpha[..., None] * p
    score = w * own - (coefficients * head).sum(-1) if center else w * own
    entropy = -(logp.exp() * logp).sum(-1)
    kl = (q * (top_q - head)).sum(-1) + tail_q * rho.log()
    found = {"entropy": entropy, "kl_head": kl, "frac_masked": (w == 0).double()}
    return -(A * score)[mask].sum(), {name: x[mask].mean() for name, x in found.items()}


def drawn(seed=0):
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(B, T, H), torch.randn(V, H) * 0.5, torch.randn(V) * 0.1
    sampler = torch.log_softmax(hidden @ weight.T + bias + 0.4 * torch.randn(B, T, V), -1)
    ids, top = torch.randint(V, (B, T)), sampler.topk(K)
    of_token = sampler.gather(-1, ids[..., None])[..., 0]
    mask, A = torch.rand(B, T) > 0.2, torch.randn(B)
    return hidden, weight, ids, mask, A, of_token, top.indices, top.values, bias


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_loss_metrics_and_gradients(name, center):
    values, found = drawn(), []
    correction = CORRECTIONS[name]
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype) if x.is_floating_point() else x for x in values]
        leaves = [given[place].detach().clone().requires_grad_() for place in (0, 1, 8)]
        given[0], given[1], given[8] = leaves
        if dtype == torch.float32:
            ours = LigerFusedLinearScoreCenteringLoss(center, correction, temperature=0.9)
            loss, metrics = ours(*given, num_items_in_batch=20)
        else:
            options = {"center": center, "correction": correction, "heat": 0.9}
            loss, metrics = liger(*given, **options)
            loss = loss / 20
        (2 * loss).backward()
        found.append((loss.detach(), metrics, [x.grad for x in leaves]))
    (loss, metrics, grads), (wanted, of_liger, exact) = found
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == of_liger.keys()
    for key in metrics:
        torch.testing.assert_close(metrics[key].double(), of_liger[key], rtol=1e-5, atol=1e-6)
    for x, y in zip(grads, exact, strict=True):
        assert (x - y).abs().max() <= 2e-5 * y.abs().max()


def test_the_mean_is_over_the_tokens_that_count():
    values = drawn()
    loss, _ = LigerFusedLinearScoreCenteringLoss()(*values)
    total, _ = LigerFusedLinearScoreCenteringLoss()(*values, num_items_in_batch=1)
    torch.testing.assert_close(loss * values[3].sum(), total)


def test_advantages_of_tokens():
    *before, A, q, top, top_q, bias = drawn()
    of_tokens = A[:, None].expand(B, T)
    both = [
        LigerFusedLinearScoreCenteringLoss()(*before, x, q, top, top_q, bias)
        for x in (A, of_tokens)
    ]
    assert torch.equal(both[0][0], both[1][0])
