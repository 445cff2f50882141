"""The CUDA kernels of the one-pass policy loss, run on a CPU, against the reference in float64."""

from math import inf, nan

import pytest
import torch

from fastrl import reference
from fastrl.contract import LossArguments
from tests.support import cuda_vocabulary as kernels
from tests.support.cuda_host import watched
from tests.support.cuda_on_host import logits_policy_loss_fwd_, scale_
from tests.support.cuda_rows import CASES, assert_gradient, exact, gradient, make_rows
from tests.support.cuda_vocabulary import objective_of

# objectives, and which optional arguments there are
OBJECTIVES = {
    "ppo": (objective_of(clip_high=0.28, dual_clip=3.0), "old_logprobs"),
    "everything": (
        objective_of(kl_gradient="bias-corrected", kl_coef=0.1, entropy_coef=0.02),
        "old_logprobs ref_logprobs kl_weights entropy_weights policy_weights",
    ),
    "cispo": (
        objective_of(
            "cispo",
            kl_estimator="k1",
            kl_gradient="straight-through",
            clip_low=1.0,
            clip_high=0.1,
            kl_coef=0.3,
        ),
        "old_logprobs ref_logprobs",
    ),
    "sapo": (
        objective_of("sapo", kl_estimator="abs", kl_coef=0.1, kl_clamp=2.0, log_ratio_low=1.0),
        "old_logprobs ref_logprobs",
    ),
    "on policy": (objective_of(entropy_coef=0.1), ""),
    "reinforce": (
        objective_of("reinforce", kl_estimator="k2", kl_coef=0.2),
        "ref_logprobs entropy_weights",
    ),
}


def loss_arguments(logprobs, given):
    """The constants of a loss, per token, of which the optional ones named in `given`."""
    noise = [torch.randn_like(logprobs) for _ in range(5)]
    logprobs = logprobs.nan_to_num(0.0)
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
    wanted = ("advantages", "weights", *given.split())
    return LossArguments(
        **{name: x if name in wanted else None for name, x in everything._asdict().items()}
    )


def double(arguments):
    return LossArguments._make(
        x.double() if x is not None and x.is_floating_point() else x for x in arguments
    )


def loss_gradient(logits, token_ids, mask, arguments, objective, **options):
    """The exact gradient of the loss and the magnitude of its parts."""
    stats = exact(logits, token_ids, mask, **options)
    _, slope, entropy_slope, _ = reference.policy_loss(
        stats.logprobs, stats.entropy, mask, double(arguments), objective
    )
    zero = torch.zeros(token_ids.shape)
    flows = (slope, zero if entropy_slope is None else entropy_slope, zero)
    expected, size = gradient(logits, token_ids, mask, flows, **options)
    # the slope carries the rounding of the log-probability, which the parts of it multiply
    return expected, 8 * size + 2 * size.amax(-1, keepdim=True)


def one_pass(logits, token_ids, mask, arguments, objective, *, inplace, clusters, **options):
    logits = logits.clone() if inplace and logits.is_contiguous() else logits
    rows = kernels.rows_of(token_ids, mask, **options)
    grad = None if inplace else kernels.nan_like(logits.contiguous())
    stats = kernels.logits_policy_loss(logits, rows, arguments, objective, grad, clusters=clusters)
    return *stats, logits if inplace else grad


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("V", "beside"), [(1000, 0), (5001, 2)])
@pytest.mark.parametrize("clusters", [True, False])
def test_policy_loss_of_every_objective(name, V, beside, clusters):
    chosen, optional = OBJECTIVES[name]
    _, logits, token_ids, mask = make_rows(V, beside, torch.float32)
    arguments = loss_arguments(exact(logits, token_ids, mask).logprobs.float(), optional)
    inputs = (logits, token_ids, mask, arguments, chosen)
    expected, size = loss_gradient(*inputs)
    _, _, grad = one_pass(*inputs, inplace=False, clusters=clusters)
    assert_gradient(grad, expected, size)


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_policy_loss_of_every_shape(V, beside, dtype, options):
    chosen, optional = OBJECTIVES["everything"]
    whole, logits, token_ids, mask = make_rows(V, beside, dtype)
    arguments = loss_arguments(exact(logits, token_ids, mask, **options).logprobs.float(), optional)
    inputs = (token_ids, mask, arguments, chosen)
    expected, size = loss_gradient(logits, *inputs, **options)
    stats = kernels.token_stats(logits, kernels.rows_of(token_ids, mask, **options))
    grads = []
    for clusters in (True, False):
        lp, entropy, grad = one_pass(logits, *inputs, inplace=False, clusters=clusters, **options)
        # a ratio to the log-probabilities of an earlier call is exactly 1
        assert torch.equal(lp, stats.logprobs)
        assert torch.equal(entropy, stats.entropy)
        grads.append(grad)
    assert_gradient(grads[0], expected, size)
    assert not grads[0][~mask].any()
    before = whole.clone()
    for clusters in (True, False):
        whole.copy_(before)
        one_pass(logits, *inputs, inplace=True, clusters=clusters, **options)
        grads.append(logits.clone())
        logits.copy_(before[:, :3, :V])
        assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def everything(V, dtype, B, T, beside=0):
    chosen, optional = OBJECTIVES["everything"]
    _, logits, token_ids, mask = make_rows(V, beside, dtype, B, T)
    arguments = loss_arguments(exact(logits, token_ids, mask).logprobs.float(), optional)
    return logits, token_ids, mask, arguments, chosen


@pytest.mark.parametrize("V", [4096, 5001])
@pytest.mark.parametrize("clusters", [True, False])
def test_a_row_does_not_depend_on_the_others(V, clusters):
    logits, token_ids, mask, arguments, chosen = everything(V, torch.bfloat16, 1, 90)
    mask[0, 20:40] = False  # and on the turns that the others took
    *stats, grad = one_pass(
        logits, token_ids, mask, arguments, chosen, inplace=False, clusters=clusters
    )
    for t in (0, 41, 77, 88):
        alone = LossArguments._make(
            None if x is None else x[:, t : t + 1].clone() for x in arguments
        )
        row = (logits[:, t : t + 1].clone(), token_ids[:, t : t + 1].clone())
        *stat, one = one_pass(
            *row, mask[:, t : t + 1].clone(), alone, chosen, inplace=False, clusters=clusters
        )
        assert torch.equal(one[0, 0], grad[0, t])
        assert all(torch.equal(x[0, 0], y[0, t]) for x, y in zip(stat, stats, strict=True))


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("V", [4096, 5001])
def test_broken_rows(V, clusters):
    logits, token_ids, mask, arguments, chosen = everything(V, torch.float32, 1, 8)
    logits = logits.clone()
    clean = one_pass(logits, token_ids, mask, arguments, chosen, inplace=False, clusters=clusters)
    logits[0, 1, 3] = nan
    logits[0, 2, V - 1] = inf
    logits[0, 3] = -inf
    token_ids[0, 4] = V
    token_ids[0, 5] = -1
    logits[0, 6, V // 2 :] = -inf  # whole threads see nothing else
    token_ids[0, 6] = 5
    lp, entropy, grad = one_pass(
        logits, token_ids, mask, arguments, chosen, inplace=False, clusters=clusters
    )
    assert lp[0, 1:6].isnan().all()
    assert entropy[0, 1:4].isnan().all()
    assert grad[0, 1:4].isnan().all()
    assert torch.equal(lp[0, 0], clean[0][0, 0])
    assert torch.equal(grad[0, 0], clean[2][0, 0])
    expected = exact(logits[:, 6:7], token_ids[:, 6:7], mask[:, 6:7])
    assert abs(lp[0, 6] - expected.logprobs) < 2e-6
    assert abs(entropy[0, 6] - expected.entropy) < 5e-6
    assert not grad[0, 6, V // 2 :].any()
    assert grad[0, 6].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("clusters", [True, False])
def test_a_chosen_token_may_be_excluded(clusters, softcap):
    logits, token_ids, mask, arguments, *_ = everything(5001, torch.float32, 1, 3)
    logits = logits.clone()
    logits[0, 0, token_ids[0, 0]] = -inf
    chosen = objective_of("reinforce", kl_estimator="k1", entropy_coef=0.1)
    choice = {"inplace": False, "clusters": clusters, "logit_softcap": softcap or 0.0}
    lp, _, grad = one_pass(logits, token_ids, mask, arguments, chosen, **choice)
    assert lp[0, 0] == -inf
    assert grad[0, 0, token_ids[0, 0]] == 0
    assert lp[0, 1].isfinite()


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("V", [4096, 5001])
def test_a_common_offset_costs_nothing(V, clusters):
    logits, token_ids, mask, arguments, chosen = everything(V, torch.float32, 1, 4)
    logits = (logits * 256).round() / 256  # so that adding 8192 is exact
    shifted = logits + 8192
    options = {"inplace": False, "clusters": clusters}
    plain = one_pass(logits, token_ids, mask, arguments, chosen, **options)
    moved = one_pass(shifted, token_ids, mask, arguments, chosen, **options)
    assert (moved[0] - plain[0]).abs().max() < 2e-6
    assert (moved[1] - plain[1]).abs().max() < 5e-6
    assert (moved[2] - plain[2])[mask].abs().max() < 1e-5


@pytest.mark.parametrize("V", [4096, 5001])
@pytest.mark.parametrize("clusters", [True, False])
def test_rows_without_a_gradient_are_zeros(V, clusters):
    logits, token_ids, mask, arguments, *_ = everything(V, torch.bfloat16, 1, 8)
    arguments.advantages[0, 1] = 0
    arguments.weights[0, 2] = 0
    arguments.policy_weights[0, 3] = 0
    chosen = objective_of()
    _, _, grad = one_pass(
        logits, token_ids, mask, arguments, chosen, inplace=False, clusters=clusters
    )
    assert not grad[0, 1:4].any()
    assert not grad[~mask].any()
    assert grad[0, 0].any()


@pytest.mark.parametrize(("V", "beside"), [(4096, 0), (5001, 2)])
@pytest.mark.parametrize("inplace", [True, False])
def test_each_logit_is_loaded_once_and_stored_once(V, beside, inplace):
    N = 90
    wide, _, mask, arguments, chosen = everything(V + beside, torch.bfloat16, 1, N)
    wide = wide.contiguous()
    logits, token_ids = wide[..., :V], torch.randint(V, (1, N))
    rows = kernels.rows_of(token_ids, mask)
    grad = None if inplace else torch.empty_like(logits.contiguous())
    with watched("vocabulary", wide, *([] if inplace else [grad])) as counts:
        kernels.logits_policy_loss(logits, rows, arguments, chosen, grad, clusters=True)
    loads, stores = counts[0][0], counts[-1][1]
    loads, stores = loads.view(N, V + beside, 2), stores.view(N, -1, 2)
    assert (loads[: N - 1, :V] == 1).all()
    assert not loads[N - 1].any()  # does not count
    assert not loads[:, V:].any()
    # the chosen token's own gradient is written over what its vector held
    chosen = torch.zeros(N, V, dtype=torch.bool).scatter_(1, token_ids[0][:, None], True)
    chosen &= mask[0][:, None]
    assert (stores[:, :V] == torch.where(chosen[..., None], 2, 1)).all()
    assert not stores[:, V:].any()


@pytest.mark.parametrize(("factor", "times"), [(1.0, 4), (0.5, 8)])
def test_bytes_of_forward_and_backward_together(factor, times):
    """In bfloat16 4 per logit, read and written once, where the upstream gradient is 1."""
    N, V = 30, 4096
    logits, token_ids, _, arguments, chosen = everything(V, torch.bfloat16, 1, N)
    logits = logits.nan_to_num(0.0).contiguous()
    rows = kernels.rows_of(token_ids)
    with watched("vocabulary", logits) as of_forward:
        logits_policy_loss_fwd_(logits, *rows, *arguments, *chosen, False)
    with watched("scale", logits) as of_backward:
        scale_(logits, torch.tensor(factor))
    moved = sum(count.sum().item() for (pair,) in (of_forward, of_backward) for count in pair)
    own = 2 * N  # the chosen token's gradient replaces what its vector held
    assert moved == times * N * V + own


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_constants_per_sequence(packed, clusters):
    chosen, optional = OBJECTIVES["everything"]
    B, T, count, bounds = 4, 3, 4, None
    if packed:
        ends = (0, 2, 3, 3, 11, 12, 12)
        B, T, count, bounds = 1, 12, len(ends), torch.tensor([0, *ends], dtype=torch.int32)
    _, logits, token_ids, mask = make_rows(1000, 0, torch.float32, B, T)
    per_token = loss_arguments(exact(logits, token_ids, mask).logprobs.float(), optional)
    names = ("advantages", "weights", "kl_weights", "entropy_weights", "policy_weights")
    sequences = reference.sequences_of(token_ids, bounds)
    by_sequence = per_token._replace(
        cu_seqlens=bounds, **{name: torch.randn(count) for name in names}
    )
    spread = by_sequence._replace(
        cu_seqlens=None,
        **{
            name: sequences.spread(getattr(by_sequence, name), token_ids).contiguous()
            for name in names
        },
    )
    mixed = by_sequence._replace(weights=spread.weights, entropy_weights=spread.entropy_weights)
    results = [
        one_pass(logits, token_ids, mask, arguments, chosen, inplace=False, clusters=clusters)
        for arguments in (spread, by_sequence, mixed)
    ]
    assert results[0][2].any()
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))
