"""Rows of logits for the tests of GPU kernels, and what is exactly true of them."""

import contextlib
from math import nan

import torch

from fastrl import Objective, TokenStats
from fastrl.contract import (
    KL_ESTIMATORS,
    KL_GRADIENTS,
    SURROGATES,
    LossArguments,
    RowArguments,
    RowStats,
)
from fastrl.library import operators
from fastrl.ops._rows.reference import reference_stats
from tests.ops.inputs import make_logits
from tests.ptx.cuda_operators import device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = (
    {},
    {"temperature": 0.7, "logit_scale": 1.5, "logit_softcap": 8.0},
    {"temperatures": torch.tensor([[0.5, 1.0, 1.7, nan]])},
)


def shared_out(backend, monkeypatch, otherwise=True):
    """Share out rows otherwise: over several programs, or without clusters of blocks."""
    if not otherwise:
        return contextlib.nullcontext()
    if backend == "cuda":
        return device(8, 40)
    return _over_programs(monkeypatch)


@contextlib.contextmanager
def _over_programs(monkeypatch):
    from fastrl.triton.vocabulary import rows

    with monkeypatch.context() as patch:
        patch.setattr(rows, "processors", lambda device: 10**6)
        yield


def make_rows(V, dtype, beside=0, B=1, T=4):
    """Logits [B, T, V] with NaN beside them, ids and mask; the last row does not count."""
    token_ids = torch.randint(V, (B, T))
    token_ids.view(-1)[:2] = torch.tensor([V - 1, 0])[: B * T]
    whole = torch.full((B, T + 1, V + beside), nan, dtype=dtype)
    logits = whole[:, :T, :V]
    logits.copy_(make_logits(B, T, V, token_ids=token_ids))
    mask = torch.ones(B, T, dtype=torch.bool)
    if B * T > 1:
        mask[-1, -1] = False
        logits[-1, -1] = nan
    return whole, logits, token_ids, mask


def rows_of(token_ids, mask=None, **options):
    """Return what accompanies logits."""
    plain = RowArguments(token_ids, mask, -100, None, 1.0, 1.0, 0.0)
    return plain._replace(**options)


def token_stats(backend, logits, rows):
    return RowStats._make(operators(backend).token_stats_fwd(logits, *rows, True, True))


def saved(stats):
    return stats.row_max, stats.log_sum, stats.entropy


def exact(logits, token_ids, mask, temperatures=None, **options):
    heat = None if temperatures is None else temperatures.double()
    rows = rows_of(token_ids, mask, temperatures=heat, **options)
    stats = reference_stats(logits.double(), rows, with_entropy=True, with_sum_sq_probs=True)
    return TokenStats(*stats)


# --- the loss in one pass


def objective_of(surrogate="ppo_clip", kl_estimator="k3", kl_gradient="exact", **scalars):
    """Return an objective as the operators take it; a bound that is not given is not set."""
    plain = Objective().arguments
    return plain._replace(
        surrogate=SURROGATES.index(surrogate),
        kl_estimator=KL_ESTIMATORS.index(kl_estimator),
        kl_gradient=KL_GRADIENTS.index(kl_gradient),
        coefficients=plain.coefficients._replace(**scalars),
    )


OBJECTIVE = objective_of(kl_gradient="bias-corrected", kl_coef=0.1, entropy_coef=0.02)


def loss_of(logits, token_ids, mask, **options):
    """Return the arguments of a loss that needs all of them, per token, and its objective."""
    logprobs = exact(logits, token_ids, mask, **options).logprobs.float().nan_to_num(0.0)
    noise = [torch.randn_like(logprobs) for _ in range(5)]
    everything = LossArguments(
        advantages=noise[0],
        weights=noise[1].abs(),
        kl_weights=noise[2].abs(),
        entropy_weights=noise[3].abs(),
        policy_weights=noise[4].abs(),
        old_logprobs=logprobs + 0.3 * noise[1],
        ref_logprobs=logprobs + 0.3 * noise[2],
        cu_seqlens=None,
    )
    return everything, OBJECTIVE


def one_pass(backend, logits, rows, loss, objective):
    return operators(backend).logits_policy_loss_fwd(logits, *rows, *loss, *objective)
