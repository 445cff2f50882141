"""Corner cases where a wrong result would go unnoticed; each was wrong once."""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.integrations import openrlhf, verl

pytestmark = pytest.mark.kernels

ONE, PAIR = torch.ones(1), torch.ones(1, 2)


def test_a_function_with_an_infinite_slope_at_zero_leaves_masked_tokens_alone():
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)

    def unlikelihood(new, old, ref, advantages):
        return -advantages * torch.log(1 - new.exp())

    mask = torch.tensor([[1, 0]])
    fastrl.policy_loss(logprobs, ONE, mask, objective=unlikelihood).loss.backward()
    assert logprobs.grad[0, 1] == 0
    assert torch.isfinite(logprobs.grad).all()


def test_a_bool_mask_of_other_bytes_means_what_torch_reads(backend):
    mask = torch.tensor([[2, 2, 0, 255]], dtype=torch.uint8).view(torch.bool)
    result = fastrl.policy_loss(torch.zeros(1, 4), ONE, mask, objective="ppo", backend=backend)
    assert result.loss.item() == -1.0
    assert result.metrics["active_tokens"].item() == 3
    logits, ids = torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64)
    logprobs = fastrl.token_logprobs(logits, ids, mask=mask, backend=backend)
    assert ((logprobs != 0) == mask).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_ids_of_any_integer_dtype(backend, dtype):
    logits, ids = torch.randn(1, 2, 300), torch.tensor([[156, 3]])
    expected = fastrl.token_logprobs(logits, ids, backend=backend)
    actual = fastrl.token_logprobs(logits, ids.to(dtype), backend=backend)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [-1e9, -1e10, -1e20, -1e30, -1e38, "lowest"])
def test_logits_filled_far_below_the_others(backend, fill, dtype):
    """As a mask over the vocabulary does: parts of a row have no other logits."""
    fill = torch.finfo(dtype).min if fill == "lowest" else fill
    logits = torch.full((1, 2, 1500), fill)
    logits[..., 700:705] = torch.randn(2, 5)
    logits = logits.to(dtype)
    ids = torch.tensor([[700, 704]])
    outcomes = []
    for given, name in ((logits, backend), (logits.double(), "reference")):
        leaf = given.clone().requires_grad_()
        stats = fastrl.token_stats(leaf, ids, temperature=2.0, backend=name)
        (stats.logprobs + stats.entropy).sum().backward()
        outcomes.append([stats.logprobs.detach(), stats.entropy.detach(), leaf.grad])
    for found, wanted in zip(*outcomes, strict=True):
        tolerance = 4e-3 if found.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=1e-5)


def test_bootstrap_values_per_token_win_where_both_shapes_fit(backend):
    zeros, bounds = torch.zeros(2), torch.tensor([0, 2, 2], dtype=torch.int32)
    options = {"gamma": 1.0, "lam": 1.0, "cu_seqlens": bounds, "backend": backend}
    returns = fastrl.gae(zeros, zeros, bootstrap_values=torch.tensor([5.0, 7.0]), **options).returns
    assert returns.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("zero", [torch.tensor(0), torch.tensor(0.0), 0, 0.0], ids=repr)
def test_a_count_of_zero_is_a_fine_normalizer_of_nothing(backend, zero):
    """As a tensor and as a number, which must not be taken for no normalizer."""
    hidden, weight = torch.ones(1, 2, 4), torch.ones(3, 4)
    ids = torch.zeros(1, 2, dtype=torch.long)
    losses = {
        "policy_loss": lambda mask, **given: fastrl.policy_loss(PAIR, ONE, mask, **given).loss,
        "logits_policy_loss": lambda mask, **given: (
            fastrl.logits_policy_loss(torch.ones(1, 2, 3), ids, ONE, mask, **given).loss
        ),
        "linear_policy_loss": lambda mask, **given: (
            fastrl.linear_policy_loss(hidden, weight, ids, ONE, mask, **given).loss
        ),
    }
    # the convention counts empty sequences
    for o in ("dapo", "grpo", Objective.preset("grpo", convention="trl")):
        for loss in losses.values():
            given = {"objective": o, "normalizer": zero, "backend": backend}
            assert loss(torch.zeros(1, 2), **given) == 0
            if backend in ("cpu", "reference"):  # kernels for a GPU do not check its value
                with pytest.raises(ValueError, match="normalizer must be above 0"):
                    loss(torch.tensor([[0.0, 1.0]]), **given)


@pytest.mark.parametrize("zero", [torch.tensor(0), 0], ids=repr)
def test_a_count_of_zero_in_plain_torch_and_in_drop_ins(zero):
    losses = {
        "value_loss": lambda mask: fastrl.value_loss(PAIR, PAIR, mask, normalizer=zero).loss,
        "token_weights": lambda mask: fastrl.token_weights(
            mask, aggregation="token-mean", normalizer=zero
        ).sum(),
        "agg_loss": lambda mask: verl.agg_loss(PAIR, mask, "token-mean", 2, zero),
        "PolicyLoss": lambda mask: openrlhf.PolicyLoss()(
            PAIR, PAIR, PAIR, mask, batch_num_tokens=zero
        )[0],
        "ValueLoss": lambda mask: openrlhf.ValueLoss()(
            PAIR, PAIR, PAIR, mask, batch_num_tokens=zero
        ),
    }
    for loss in losses.values():
        assert loss(torch.zeros(1, 2)) == 0
        with pytest.raises(ValueError, match="normalizer must be above 0, got 0"):
            loss(torch.ones(1, 2))


def test_numbers_beyond_any_float_are_refused_by_name():
    with pytest.raises(ValueError, match="gamma must be finite"):
        fastrl.gae(PAIR, PAIR, gamma=10**400)


def test_a_weight_of_zero_is_no_reason_to_project_a_row(backend):
    """The ratio of a row that was not projected may overflow with its advantage."""
    hidden, weight = torch.tensor([[-300.0], [1.0]]), torch.tensor([[1.0], [-1.0]])
    ids, mask = torch.tensor([0, 0]), torch.ones(2)
    advantages, old = torch.tensor([-1e6, 1.0]), torch.tensor([-600.0, -0.125])
    losses = [
        fastrl.linear_policy_loss(
            hidden.clone().requires_grad_(),
            weight,
            ids,
            advantages,
            mask,
            old_logprobs=old,
            policy_weights=torch.tensor([0.0, 1.0]),
            objective="ppo",
            metrics=metrics,
            backend=backend,
        ).loss
        for metrics in (True, False)
    ]
    assert losses[0].isfinite()
    assert losses[0] == losses[1]


def test_scalings_at_their_bounds(backend):
    logits, ids = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0])
    sizes = (1e-30, 1e-10, 1.0, 1e10, 1e30)
    for scale, softcap, temperature in itertools.product(sizes, (None, *sizes), sizes):
        beside = [scale, temperature, 1.0] + ([] if softcap is None else [softcap])
        if max(beside) / min(beside) > 1.0001e30:
            continue
        if backend in ("triton", "cuda") and softcap is not None and softcap > 1e3 * scale:
            continue  # its tanh has an absolute error of 2^-22, and the logits this times softcap
        if backend == "cuda" and (2 * softcap if softcap else scale) > 1e6 * temperature:
            with pytest.raises(ValueError, match="temperature must be at least"):
                fastrl.token_stats(
                    logits,
                    ids,
                    temperature=temperature,
                    logit_scale=scale,
                    logit_softcap=softcap,
                    backend="cuda",
                )
            continue
        found = []
        for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
            leaf = logits.to(dtype, copy=True).requires_grad_()
            stats = fastrl.token_stats(
                leaf,
                ids,
                temperature=temperature,
                logit_scale=scale,
                logit_softcap=softcap,
                backend=name,
            )
            (stats.logprobs + stats.entropy).sum().backward()
            found.append([stats.logprobs.detach(), stats.entropy.detach(), leaf.grad])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-6)


def test_the_slope_of_a_softcap_has_its_digits_next_to_the_cap(backend):
    softcap, token_ids = 2.0, torch.zeros(1, 24, dtype=torch.int64)
    logits = torch.zeros(1, 24, 5)
    logits[0, :, 0] = torch.arange(24) - 12.0  # 1 - tanh^2 is down to 2e-5

    def gradient(dtype, backend):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        options = {"logit_softcap": softcap, "backend": backend}
        fastrl.token_logprobs(leaf, token_ids, **options).sum().backward()
        return leaf.grad.double()[..., 0]

    came, wanted = gradient(torch.float32, backend), gradient(torch.float64, "reference")
    # ten roundings, 12 of the exponent 2 x, and 1 - p, which is above 1 / 3
    assert (came - wanted).abs().le(25 * 2**-24 * wanted.abs()).all(), came / wanted - 1


@pytest.mark.not_on("triton", "cuda")  # Triton has them up to 15 nats
@pytest.mark.parametrize("lead", [12.0, 17.0])
def test_a_likely_token_has_its_digits(backend, lead):
    """1 - p, which float32 has not where p is nearly 1."""

    def found(dtype, backend):
        leaf = torch.tensor([[lead, 0.0, -1.0]], dtype=dtype, requires_grad=True)
        more = {"outputs": ("logprobs", "entropy"), "backend": backend}
        stats = fastrl.token_stats(leaf, torch.zeros(1, dtype=torch.int64), **more)[:2]
        gradients = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in stats]
        return torch.cat([*stats, *(x.flatten() for x in gradients)]).double()

    wanted = found(torch.float64, "reference")
    assert wanted[0].item() == pytest.approx(-math.log1p(math.exp(-lead) + math.exp(-lead - 1)))
    torch.testing.assert_close(found(torch.float32, backend), wanted, rtol=1e-5, atol=0)


@pytest.mark.not_on("triton", "cuda")
def test_the_first_of_many_equal_logits_has_its_digits(backend):
    """As a sum over the other tokens, its gradient of -1 / 50 would be a small difference."""
    leaf = torch.zeros(1, 50, requires_grad=True)
    fastrl.token_logprobs(leaf, torch.ones(1, dtype=torch.int64), backend=backend).backward()
    assert leaf.grad[0, 0].item() == pytest.approx(-0.02, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [2, 33, 1000, 9001])
def test_the_log_probability_of_a_token_far_ahead_keeps_its_digits(backend, vocabulary, dtype):
    """It is -log1p of the sum of the others: 1e-5 is 80 units of roundoff."""
    gaps = torch.tensor([4.0, 10, 16, 17, 20, 40, 60, 66])
    logits = torch.randn(len(gaps), vocabulary)
    ids = torch.arange(len(gaps)) * (vocabulary - 1) // (len(gaps) - 1)
    logits[range(len(gaps)), ids] = logits.amax(1) + gaps
    logits = logits.to(dtype)
    below = logits.double() - logits.double().gather(1, ids[:, None])
    expected = below.scatter(1, ids[:, None], -torch.inf).exp().sum(1).log1p()
    found = -fastrl.token_logprobs(logits, ids, backend=backend)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    weight, one = logits.float().t().contiguous(), torch.eye(len(gaps))
    found = -fastrl.linear_token_logprobs(one, weight, ids, backend=backend)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_a_column_behind_whole_blocks_counts(backend):
    logits, ids = torch.randn(2, 16385), torch.tensor([0, 16384])
    logits[:, -1] = 9.0
    found = fastrl.token_logprobs(logits, ids, backend=backend)
    expected = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
