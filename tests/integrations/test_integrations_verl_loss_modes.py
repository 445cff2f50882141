"""verl's policy losses dppo_tv, dppo_kl, clip_cov, kl_cov, dro and bypass_mode on fastrl."""

import importlib
import math
import types

import pytest
import torch

import fastrl
from fastrl.integrations import verl as ours
from fastrl.integrations.verl import masks as verl_masks
from fastrl.integrations.verl import policy_losses, selected_tokens
from tests.support import verl_loss_mode_formulas
from tests.support.importable import importable
from tests.support.verl_cases import (
    CORE,
    GLOBAL,
    LOCAL,
    MODES,
    batch,
    installed,
    transcribed,
    value_and_gradient,
)

OURS = {name: getattr(selected_tokens, name) for name in ("dppo_tv", "dppo_kl", "clip_cov")}
OURS |= {"kl_cov": selected_tokens.kl_cov, "dro": policy_losses.dro}
OURS["reinforce"] = policy_losses.reinforce
FIELDS = {
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
}
CLIPPED = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
FIELDS["clip_cov"] = CLIPPED | {
    "policy_loss": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0}
}
FIELDS["kl_cov"] = {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}}
FIELDS["dro"] = {"policy_loss": {"dro_beta": 0.7}}


@pytest.fixture(params=["transcribed", "installed"])
def theirs(request):
    """Functions of verl by loss mode, and their configuration."""
    if request.param == "installed" and importable(CORE) is None:
        pytest.skip("needs verl itself")
    home = verl_loss_mode_formulas if request.param == "transcribed" else importable(CORE)
    functions = {name: getattr(home, f"compute_policy_loss_{name}") for name in OURS}
    return types.SimpleNamespace(functions=functions, config=CONFIGS[request.param])


def of_package(policy_loss=None, **fields):
    options = importlib.import_module("verl.workers.config.actor").PolicyLossConfig
    return installed(policy_loss=options(**(policy_loss or {})), **fields)


def of_transcription(policy_loss=None, **fields):
    return transcribed(policy_loss=types.SimpleNamespace(**(policy_loss or {})), **fields)


CONFIGS = {"transcribed": of_transcription, "installed": of_package}


def doubles(kind="zeros and ones", **options):
    """A batch in float64; the mask has holes, and one response is empty."""
    data = batch(**options)
    for name, value in vars(data).items():
        setattr(data, name, value if name == "mask" else value.double())
    data.log_prob = data.log_prob.clamp(max=-1e-3)
    if kind == "fractions":
        data.mask = data.mask * (torch.rand(data.mask.shape).double() + 0.1)
    elif kind == "integers":
        data.mask = data.mask.long()
    elif kind == "twos":
        data.mask = 2 * data.mask.long()
    return data


def loss_of(function, config, data, mode="token-mean", weights=None):
    def run(x):
        torch.manual_seed(7)  # for the tokens that clip_cov draws
        arguments = (data.old, x, data.advantages, data.mask)
        return function(*arguments, mode, config=config, rollout_is_weights=weights)

    loss, gradient, (metrics,) = value_and_gradient(run, data.log_prob)
    return loss, gradient, metrics


def same(name, theirs, data, mode="token-mean", info=LOCAL, weights=None, bound=1e-7, **fields):
    config = theirs.config(global_batch_info=info, **{**FIELDS.get(name, {}), **fields})
    a, b = (
        loss_of(function, config, data, mode, weights)
        for function in (OURS[name], theirs.functions[name])
    )
    for x, y in zip(a[:2], b[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)
    assert a[2].keys() == b[2].keys()
    assert all(type(value) is float for value in a[2].values())
    assert a[2] == pytest.approx(b[2], rel=bound, abs=bound)
    return a


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
def test_aggregations(theirs, name, mode, info):
    same(name, theirs, doubles(), mode, info)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["fractions", "integers", "twos"])
def test_masks_and_rollout_weights(theirs, name, mode, kind):
    data = doubles(kind, seed=1)
    data.weights[0, 0] = 0.0
    same(name, theirs, data, mode, GLOBAL, data.weights)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("mode", MODES)
def test_single_precision(theirs, name, mode):
    data = batch(seed=4)  # float32 takes the kernels
    data.log_prob = data.log_prob.clamp(max=-1e-3)
    same(name, theirs, data, mode, GLOBAL, data.weights, bound=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_far_from_the_old_policy(theirs, name):
    data = doubles(seed=2, spread=2.0)
    data.old[2] = data.log_prob[2] - 25.0
    data.old[3, 0] = data.log_prob[3, 0] - 15.0
    data.advantages[:, ::3] = 0.0
    same(name, theirs, data)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_defaults_of_dppo(theirs, name):
    low = {"clip_ratio": 0.15, "clip_ratio_low": None, "clip_ratio_high": None}
    _, gradient, metrics = same(name, theirs, doubles(), **low)
    assert metrics["actor/pg_clipfrac"] > 0
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_ratio_of_dppo_is_at_most_20_by_default(name):
    fields = {"clip_ratio_low": 9.0, "clip_ratio_high": 9.0, "global_batch_info": LOCAL}
    one = torch.ones(1, 2).double()
    log_prob = torch.tensor([[-1.0, -1.0]]).double().requires_grad_()
    old = torch.tensor([[-5.0, -3.0]]).double()  # ratios of 55 and 7
    loss, metrics = OURS[name](old, log_prob, -one, one, config=of_transcription(**fields))
    loss.backward()
    expected = torch.tensor([[20.0, math.e**2]]).double() / 2
    torch.testing.assert_close(log_prob.grad, expected)
    assert metrics["actor/pg_clipfrac_lower"] == 0.5


@pytest.mark.parametrize(
    "shares", [{"clip_cov_ratio": 1.0}, {"clip_cov_ratio": 1e-4}, {"clip_cov_lb": 99.0}]
)
def test_all_one_or_none_are_drawn(theirs, shares):
    options, data = {**FIELDS["clip_cov"]["policy_loss"], **shares}, doubles()
    share = same("clip_cov", theirs, data, policy_loss=options)[2]["actor/pg_clipfrac"]
    assert (share == 0) == ("clip_cov_lb" in shares)
    if options["clip_cov_ratio"] == 1e-4:
        assert share == pytest.approx(1 / data.mask.sum().item())


@pytest.mark.parametrize("share", [1e-4, 1.0])
def test_one_or_all_are_penalized(theirs, share):
    same("kl_cov", theirs, doubles(), policy_loss={"kl_cov_ratio": share, "ppo_kl_coef": 0.3})


@pytest.mark.parametrize("kind", ["zeros and ones", "fractions"])
@pytest.mark.parametrize("name", OURS)
def test_masked_tokens_are_inert(name, kind):
    data, poisoned = doubles(kind), doubles(kind)
    poisoned.mask = data.mask
    for field in ("old", "log_prob", "advantages", "weights"):
        getattr(poisoned, field)[data.mask == 0] = float("nan")
    config = of_transcription(global_batch_info=LOCAL, **FIELDS.get(name, {}))
    a, b = (loss_of(OURS[name], config, d, weights=d.weights) for d in (data, poisoned))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert a[2] == b[2]


@pytest.mark.parametrize("name", OURS)
def test_a_mask_that_cannot_be_read_gives_the_same(name, monkeypatch):
    # as on a GPU, where the values of a mask are not read; and an empty one gives 0
    config = of_transcription(global_batch_info=LOCAL, **FIELDS.get(name, {}))
    data = doubles("integers")
    plain = loss_of(OURS[name], config, data, "seq-mean-token-mean", data.weights)
    monkeypatch.setattr(verl_masks, "_on_the_host", lambda _: False)
    unread = loss_of(OURS[name], config, data, "seq-mean-token-mean", data.weights)
    torch.testing.assert_close(unread[:2], plain[:2], rtol=1e-6, atol=1e-6)
    assert unread[2] == pytest.approx(plain[2], abs=1e-6)
    data.mask = 0 * data.mask
    loss, gradient, metrics = loss_of(OURS[name], config, data)
    assert loss == 0
    assert gradient.abs().max() == 0
    assert set(metrics.values()) <= {0.0}


def test_dro_is_a_preset_with_a_kl_to_the_old_policy():
    data = doubles()
    config = of_transcription(global_batch_info=LOCAL, policy_loss={"dro_beta": 0.7})
    objective = fastrl.Objective.preset("reinforce", kl_coef=0.7, kl_estimator="k2")

    def preset(x):
        return fastrl.policy_loss(
            x, data.advantages, data.mask, ref_logprobs=data.old, objective=objective
        ).loss

    a = loss_of(policy_losses.dro, config, data)
    b = value_and_gradient(preset, data.log_prob)
    torch.testing.assert_close(a[:2], b[:2])


REFUSED = [
    ("config must be verl's ActorConfig, got None", "dppo_tv", None),
    ("config must be verl's ActorConfig, got None", "kl_cov", None),
    ("policy_loss.dro_beta must be above 0 .*got None", "dro", {"dro_beta": None}),
    ("policy_loss.kl_cov_ratio must be above 0", "kl_cov", {"kl_cov_ratio": 0.0}),
    ("policy_loss.clip_cov_ratio must be above 0", "clip_cov", {"clip_cov_ratio": -1.0}),
]


@pytest.mark.parametrize(("message", "name", "options"), REFUSED)
def test_unsupported_arguments_are_refused_by_name(message, name, options):
    config = options and of_transcription(
        global_batch_info=LOCAL, policy_loss={**FIELDS[name]["policy_loss"], **options}
    )
    with pytest.raises((ValueError, TypeError), match=message):
        loss_of(OURS[name], config, doubles())


@pytest.mark.skipif(importable(CORE) is None, reason="needs verl itself")
@pytest.mark.parametrize("loss_type", ["reinforce", "ppo_clip"])
def test_bypass_mode_runs_on_fastrl(loss_type):
    core = importable(CORE)
    options = importlib.import_module("verl.trainer.config.algorithm").RolloutCorrectionConfig
    correction = options(
        loss_type=loss_type, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2"
    )
    data = doubles("integers")
    data.mask[1, 0] = 1
    config = of_package(global_batch_info=LOCAL, policy_loss={"rollout_correction": correction})
    own = loss_of(core.compute_policy_loss_bypass_mode, config, data)
    with ours.use_fastrl():
        found = loss_of(core.compute_policy_loss_bypass_mode, config, data)
    torch.testing.assert_close(found[:2], own[:2], rtol=1e-7, atol=1e-9)
    assert found[2] == pytest.approx(own[2], rel=1e-6)


@pytest.mark.skipif(importable(CORE) is None, reason="needs verl itself")
def test_what_remains_verls():
    core = importable(CORE)
    with ours.use_fastrl():
        left = {name for name, x in core.POLICY_LOSS_REGISTRY.items() if x.__module__ == CORE}
    assert left == {"bypass_mode"}
