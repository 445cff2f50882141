"""OpenRLHF's losses on fastrl equal its formulas and, where it is installed, its files."""

import ast
import importlib.util
import inspect
import math
import sys
import types
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl.integrations import openrlhf as ours
from fastrl.integrations.replacing import parameters
from tests.integrations import openrlhf_formulas
from tests.integrations.compared import close, each, equal, outcome

NAMES = ("PolicyLoss", "ValueLoss", "log_probs_from_logits", "compute_approx_kl")


def installed():
    """OpenRLHF's own functions, loaded file by file: the package needs deepspeed and flash-attn."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None:
        return None
    root, found = Path(spec.submodule_search_locations[0]), types.SimpleNamespace()
    package = sys.modules["openrlhf_models"] = types.ModuleType("openrlhf_models")
    package.__path__ = [str(root / "models")]
    stub = not importlib.util.find_spec("deepspeed")
    if stub:
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    for name in ("utils", "loss"):
        module = importlib.import_module(f"openrlhf_models.{name}")
        vars(found).update({key: value for key, value in vars(module).items() if key in NAMES})
    if stub:
        del sys.modules["deepspeed"]
    maker = (root / "trainer" / "ppo_utils" / "experience_maker.py").read_text()
    name, scope = "get_advantages_and_returns", {"torch": torch, "Tuple": tuple}
    (method,) = [x for x in ast.walk(ast.parse(maker)) if getattr(x, "name", None) == name]
    exec(compile(ast.Module([method], []), "experience_maker.py", "exec"), scope)
    found.method = scope[name]
    found.get_advantages_and_returns = lambda *arguments: found.method(None, *arguments)
    return found


INSTALLED = installed()
IMPLEMENTATIONS = {"transcribed": openrlhf_formulas}
if INSTALLED:
    IMPLEMENTATIONS["installed"] = INSTALLED


theirs = each(IMPLEMENTATIONS)


def batch(B=6, T=9, spread=0.4):
    torch.manual_seed(0)
    mask = (torch.rand(B, T) < 0.7).float()
    mask[:, 0] = 1
    old = -torch.rand(B, T) - 0.1
    return types.SimpleNamespace(
        mask=mask,
        old=old,
        log_probs=old + spread * torch.randn(B, T),
        rollout=old + spread * torch.randn(B, T),
        advantages=torch.randn(B, T),
        values=torch.randn(B, T),
        returns=torch.randn(B, T),
    )


def same(ours_of, theirs_of, x):
    close(outcome(ours_of, x), outcome(theirs_of, x))


CORRECTIONS = {
    "off": {},
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "icepop": {"is_correction_level": "token"},
    "seq-mask-tis": {"is_correction_level": "seq"},
    "token binary_kl": {"is_correction_level": "token", "is_correction_gating": "binary_kl"},
    "seq binary_kl": {"is_correction_level": "seq", "is_correction_gating": "binary_kl"},
    "seq tv": {"is_correction_level": "seq", "is_correction_gating": "tv"},
}
THRESHOLDS = {"ratio": (0.8, 1.2), "binary_kl": (0.0, 0.05), "tv": (0.0, 0.1)}
LOSSES = {
    "ppo": {},
    "clip-higher": {"clip_eps_low": 0.1, "clip_eps_high": 0.28},
    "dual clip": {"dual_clip": 1.5},
    "by sequence": {"token_level_loss": False},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.03, "clip_eps_high": 0.04},
    "gspo, dual clip": {"policy_loss_type": "gspo", "dual_clip": 1.1},
}
COUNTS = pytest.mark.parametrize(
    "counts",
    [{}, {"dp_size": 2, "batch_num_tokens": 90.0, "global_batch_size": 12.0}],
    ids=["local", "global"],
)


@COUNTS
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_policy_loss(theirs, loss, correction, counts):
    data, options = batch(), {**LOSSES[loss], **CORRECTIONS[correction]}
    options["is_correction_threshold"] = THRESHOLDS[options.get("is_correction_gating", "ratio")]
    rest = (data.old, data.advantages, data.mask, data.rollout)
    a, b = (n.PolicyLoss(**options) for n in (ours, theirs))
    same(lambda x: a(x, *rest, **counts), lambda x: b(x, *rest, **counts), data.log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "off"])
def test_the_ratio_of_an_accepted_token_is_finite(correction, dtype):
    """As that of a public correction, which saturates at e^80; the geometric mean here is 1."""
    log_probs = torch.full((2, 2), -3.0, dtype=dtype)
    rollout = torch.tensor([[-103.0, 97.0], [-3.0, -3.0]], dtype=dtype)
    ones = torch.ones(2, 2, dtype=dtype)
    loss = ours.PolicyLoss(**CORRECTIONS[correction], is_correction_threshold=(0.0, math.inf))
    value, *_, gradient = outcome(lambda x: loss(x, log_probs, ones, ones, rollout), log_probs)
    public = fastrl.RolloutCorrection(low=0.0, high=math.inf)
    x = log_probs.clone().requires_grad_()
    objective = fastrl.Objective.preset("ppo", convention="openrlhf", rollout_correction=public)
    wanted = fastrl.policy_loss(
        x, ones, ones, old_logprobs=log_probs, rollout_logprobs=rollout, objective=objective
    ).loss
    (3 * wanted).backward()
    assert math.isfinite(wanted.item())
    torch.testing.assert_close([value, gradient], [wanted.detach(), x.grad])


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_policy_loss_with_the_options_of_0_11_0(kind):
    data = batch()
    old_style = ours.PolicyLoss(
        enable_vllm_is_correction=True,
        vllm_is_truncated_threshold=[0.8, 1.2],
        vllm_is_correction_type=kind,
    )
    formula = openrlhf_formulas.PolicyLoss(**CORRECTIONS[kind], is_correction_threshold=(0.8, 1.2))
    rest = (data.old, data.advantages, data.mask, data.rollout)
    same(lambda x: old_style(x, *rest), lambda x: formula(x, *rest)[:4], data.log_probs)


@COUNTS
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(theirs, clip, token_level, counts):
    data = batch()
    rest, (a, b) = (
        (data.old, data.returns, data.mask),
        (n.ValueLoss(clip, token_level) for n in (ours, theirs)),
    )
    same(lambda x: a(x, *rest, **counts), lambda x: b(x, *rest, **counts), data.values)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_log_probs_from_logits(theirs, temperature, shape):
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(*shape, 50), torch.randint(50, shape)
    # theirs divides its logits in place, so it gets a copy
    same(
        lambda x: ours.log_probs_from_logits(x, labels, temperature=temperature),
        lambda x: theirs.log_probs_from_logits(x * 1.0, labels, temperature=temperature),
        logits,
    )


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_approximate_kl(theirs, estimator, unbiased, with_old):
    data = batch(spread=1.5)
    data.log_probs[0, :4] = data.old[0, :4] + torch.tensor([100.0, -90.0, 9.0, -2.6])
    options = {"kl_estimator": estimator, "unbiased_gradient": unbiased}
    options["log_probs_old"] = data.rollout if with_old else None
    same(
        lambda x: ours.compute_approx_kl(x, data.old, **options),
        lambda x: theirs.compute_approx_kl(x, data.old, **options),
        data.log_probs,
    )


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0)])
def test_advantages_and_returns(theirs, gamma, lambd):
    data = batch()
    a, b = (
        n.get_advantages_and_returns(data.values, data.returns, data.mask, gamma, lambd)
        for n in (ours, theirs)
    )
    close(a, b)


def losses(data, mask):
    """Everything that takes a mask."""
    policy = ours.PolicyLoss(dual_clip=3.0, **CORRECTIONS["seq-mask-tis"])
    rest = (data.old, data.advantages, mask, data.rollout)
    found = outcome(lambda x: policy(x, *rest), data.log_probs)
    value = ours.ValueLoss(0.2)
    found += outcome(lambda x: value(x, data.old, data.returns, mask), data.values)
    return found + list(ours.get_advantages_and_returns(data.values, data.returns, mask, 0.9, 0.9))


def test_masked_tokens_are_inert():
    data, poisoned = batch(), batch()
    for name in ("old", "log_probs", "rollout", "advantages", "values", "returns"):
        getattr(poisoned, name)[data.mask == 0] = float("nan")
    equal(losses(data, data.mask), losses(poisoned, data.mask))


def test_without_a_mask_every_token_counts():
    data = batch()
    torch.testing.assert_close(losses(data, None), losses(data, torch.ones_like(data.mask)))


@pytest.mark.skipif(INSTALLED is None, reason="needs OpenRLHF's files")
@pytest.mark.parametrize("name", [*NAMES, "get_advantages_and_returns"])
def test_the_parameters_are_those_of_openrlhf(name):
    mine = getattr(ours, name)
    if inspect.isclass(mine):
        own = getattr(INSTALLED, name)
        known, found = parameters(mine.__init__), parameters(own.__init__)
        assert known[: len(found)] == found
        assert parameters(mine.forward) == parameters(own.forward)
    elif name == "get_advantages_and_returns":
        assert ["self", *parameters(mine)] == parameters(INSTALLED.method)
    else:
        assert parameters(mine) == parameters(getattr(INSTALLED, name))
