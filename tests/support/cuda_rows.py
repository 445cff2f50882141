"""Rows of logits for the tests of the CUDA kernels, and what is exactly true of them."""

import torch

from fastrl import TokenStats, reference
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import make_logits

# (vocabulary, elements beside each row): rows of one split and of many, aligned and not
_SHAPES = ((1, 0), (37, 2), (1000, 0), (1003, 1), (5001, 0))
_OPTIONS = (
    {},
    {"temperature": 0.7, "logit_scale": 1.5, "logit_softcap": 8.0},
    {"temperatures": torch.tensor([[0.5, 1.0, 1.7], [0.9, 1.2, float("nan")]])},
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: (V, beside, dtype, options): every dtype and option with every shape, if not with each other;
#: then rows of large splits, and of more splits than a cluster has blocks
CASES = [
    (*shape, dtype, _OPTIONS[(i + j) % 3])
    for i, shape in enumerate(_SHAPES)
    for j, dtype in enumerate(_DTYPES)
] + [(20000, 0, torch.bfloat16, {}), (30000, 0, torch.float32, {})]


def make_rows(V, beside, dtype, B=2, T=3):
    """Logits [B, T, V] in a larger tensor, with ids and mask; the last row does not count."""
    token_ids = torch.randint(V, (B, T))
    whole = make_logits(B, T + 1, V + beside, dtype=dtype)
    logits = whole[:, :T, :V]
    lift = torch.full((B, T, 1), 5.0).to(dtype)
    logits.scatter_add_(-1, token_ids[..., None], lift)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[-1, -1] = False
    logits[-1, -1] = float("nan")
    return whole, logits, token_ids, mask


def exact(logits, token_ids, mask, temperatures=None, temperature=1.0, **options):
    options = {"logit_scale": 1.0, "logit_softcap": None, **options}
    heat = temperature if temperatures is None else temperatures.double()
    stats = reference.token_stats(logits.double(), token_ids, mask, temperature=heat, **options)
    return TokenStats(*stats)


def gradient(logits, token_ids, mask, grads, temperatures=None, temperature=1.0, **options):
    """Return what flows to the logits from `grads`, and the magnitude of its parts."""
    leaf = logits.double()
    leaf[~mask] = 0
    leaf.requires_grad_()
    stats = exact(leaf, token_ids, mask, temperatures, temperature, **options)
    grads = [torch.where(mask, grad.double(), 0.0) for grad in grads]
    of_logprobs, of_entropy, of_logsumexp = grads
    loss = stats.logprobs * of_logprobs + stats.entropy * of_entropy
    loss = loss + stats.logsumexp * of_logsumexp
    heat = temperature if temperatures is None else temperatures[..., None]
    slope = torch.where(mask[..., None], options.get("logit_scale", 1.0) / heat, 0.0)
    cap = options.get("logit_softcap")
    z = leaf.detach() * slope if cap is None else cap * torch.tanh(leaf * slope * heat / cap) / heat
    logp = torch.where(mask[..., None], z.detach(), 0.0).log_softmax(-1)
    of_logprobs, of_entropy, of_logsumexp = (grad.abs()[..., None] for grad in grads)
    parts = of_logprobs + of_logsumexp + of_entropy * (stats.entropy.detach()[..., None] + 1)
    size = logp.exp() * (parts - of_entropy * logp) * (1 - logp)
    size.scatter_add_(-1, token_ids[..., None], of_logprobs)
    return torch.autograd.grad(loss.sum(), leaf)[0], size * slope


def assert_gradient(actual, expected, size):
    """In the arithmetic of float32, then rounded once."""
    float32 = torch.finfo(torch.float32).eps
    smallest = torch.finfo(actual.dtype).smallest_normal
    assert_within_budget(actual, expected, ulps=1, atol=16 * float32 * size + smallest)
