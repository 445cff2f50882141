"""What verl's unit tests of these functions check, and those tests where verl is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastrl.integrations import verl as ours
from tests.support.importable import importable

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
MODES = (*MODES, "seq-mean-token-mean")


def batch(lengths=(12, 7, 3, 11, 5, 9, 2, 6), T=12):
    torch.manual_seed(0)
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).float()
    return torch.randn(3, len(lengths), T), mask


def split(parts, count=8):
    step = count // parts
    return [slice(i, i + step) for i in range(0, count, step)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_do_not_depend_on_micro_batches_and_ranks(mode, parts, ranks):
    (x, values, returns), mask = batch()
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}

    def losses(x, part, **more):
        yield ours.agg_loss(x[part], mask[part], mode, **counts, **more)
        yield ours.compute_value_loss(
            x[part], returns[part], values[part], mask[part], 0.5, mode, **counts, **more
        )[0]

    whole, pieces = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = list(losses(whole, slice(None)))
    found = [losses(pieces, part, dp_size=ranks) for part in split(parts)]
    # gradients are averaged over ranks
    found = [sum(each) / ranks for each in zip(*found, strict=True)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    sum(expected).backward()
    sum(found).backward()
    torch.testing.assert_close(pieces.grad, whole.grad)


@pytest.mark.parametrize("parts", [2, 4])
def test_local_counts_make_the_loss_depend_on_micro_batches(parts):
    (x, values, returns), mask = batch(lengths=[12] * 8)
    whole, _ = ours.compute_value_loss(x, returns, values, mask, 0.5)
    found = sum(
        ours.compute_value_loss(x[p], returns[p], values[p], mask[p], 0.5)[0] for p in split(parts)
    )
    torch.testing.assert_close(found, parts * whole)


def test_the_scale_factor_and_the_share_of_clipped_values():
    (x, values, returns), mask = batch()
    norm = {"loss_agg_mode": "seq-mean-token-sum-norm", "global_batch_size": 8}
    losses = [
        ours.compute_value_loss(x, returns, values, mask, 0.5, loss_scale_factor=factor, **norm)
        for factor in (10, 5)
    ]
    torch.testing.assert_close(losses[1][0], 2 * losses[0][0])
    assert torch.equal(losses[1][1], losses[0][1])


def test_token_sum_by_hand():
    x = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 6.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    assert ours.agg_loss(x, mask, "token-sum", dp_size=4).item() == 52.0


@pytest.mark.parametrize(("gamma", "lam"), [(0.37, 0.81), (1.0, 1.0), (0.9, 0.0)])
def test_values_at_observations_change_no_advantage(gamma, lam):
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]], dtype=torch.float)
    rewards = torch.tensor([[0.0, 0.0, 0.1, 0.1, 0.1, 0.0, 0.0, 0.1, 1.0, 0.0, 0.0]])
    values = torch.tensor([[0.0, 0.0, 4.0, 5.0, 6.0, 0.0, 0.0, 7.0, 9.0, 0.0, 0.0]])
    other = torch.where(mask.bool(), values, torch.linspace(-100, 100, 11))
    results = [
        ours.compute_gae_advantage_return(rewards, v, mask, gamma, lam) for v in (values, other)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1] * mask, results[1][1] * mask)


def test_rewards_that_differ_in_the_fifth_digit_keep_their_spread():
    rewards = torch.tensor([[1.0], [1.00001], [2.0], [2.00001]])
    mask, index = torch.ones(4, 1), ["prompt-a", "prompt-a", "prompt-b", "prompt-b"]
    found, _ = ours.compute_grpo_outcome_advantage(rewards, mask, index)
    for pair in (slice(0, 2), slice(2, 4)):
        gap = (rewards[pair][1] - rewards[pair][0]).double()
        expected = gap / 2 / (gap / 2**0.5 + 1e-6)
        torch.testing.assert_close(found[pair, 0].double(), torch.cat([-expected, expected]))


def test_the_gradient_with_a_plus_is_that_of_k2():
    torch.manual_seed(0)
    ref = torch.randn(4, 8)
    grads = []
    for kind in ("k3+", "k2"):
        x = torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_()
        ours.kl_penalty(x, ref, kind).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


def own_tests():
    """Return the folder of verl's tests, which its wheel includes, or None."""
    core = importable("verl.trainer.ppo.core_algos")
    if core is None:
        return None
    folder = Path(core.__file__).parents[3] / "tests" / "trainer" / "ppo"
    return folder if folder.is_dir() else None


@pytest.mark.skipif(own_tests() is None, reason="needs verl with its tests")
def test_verls_own_unit_tests_pass_with_ours_in_place():
    folder = own_tests()
    names = ("core_algos", "loss_aggregation", "value_loss_normalization")
    names = (*names, "dynamic_policy_losses", "reinforce_pp_multiturn")
    files = [folder / f"test_{name}_on_cpu.py" for name in names]
    files.append(folder / "test_rollout_corr_integration.py")
    paths = (str(Path(__file__).parents[2]), *sys.path)
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "fastrl.integrations.verl.plugin",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    code = (
        "import sys, pytest, verl.trainer.ppo.core_algos as core;"
        "assert core.agg_loss.__module__.startswith('fastrl.');"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *map(str, files)],
        env=environment,
        cwd=folder.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
