"""OpenRLHF's losses on fastrl equal its formulas and, where it is installed, its files."""

import ast
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from fastrl.integrations import openrlhf as ours
from fastrl.integrations.replacing import parameters
from tests.support import openrlhf_formulas

NAMES = (
    "PolicyLoss",
    "ValueLoss",
    "log_probs_from_logits",
    "compute_approx_kl",
    "get_advantages_and_returns",
)


def installed():
    """OpenRLHF's own functions, loaded file by file: the package needs deepspeed and flash-attn."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None:
        return None
    root = Path(spec.submodule_search_locations[0])
    package = types.ModuleType("openrlhf_models")
    package.__path__ = [str(root / "models")]
    stub = None
    if not importlib.util.find_spec("deepspeed"):
        stub = sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    sys.modules["openrlhf_models"] = package
    found = types.SimpleNamespace(name="installed")
    for name in ("utils", "loss"):
        where = importlib.util.spec_from_file_location(
            f"openrlhf_models.{name}", root / "models" / f"{name}.py"
        )
        module = importlib.util.module_from_spec(where)
        sys.modules[where.name] = module
        where.loader.exec_module(module)
        vars(found).update({key: value for key, value in vars(module).items() if key in NAMES})
    if stub is not None:
        del sys.modules["deepspeed"]
    maker = (root / "trainer" / "ppo_utils" / "experience_maker.py").read_text()
    (method,) = [
        node
        for node in ast.walk(ast.parse(maker))
        if isinstance(node, ast.FunctionDef) and node.name == "get_advantages_and_returns"
    ]
    scope = {"torch": torch, "Tuple": tuple}
    exec(compile(ast.Module([method], []), "experience_maker.py", "exec"), scope)
    method = scope["get_advantages_and_returns"]
    found.get_advantages_and_returns = lambda *arguments: method(None, *arguments)
    found.method = method
    return found


TRANSCRIBED = types.SimpleNamespace(name="transcribed", **vars(openrlhf_formulas))
INSTALLED = installed()


@pytest.fixture(
    params=[found for found in (TRANSCRIBED, INSTALLED) if found], ids=lambda found: found.name
)
def theirs(request):
    return request.param


def batch(seed=0, B=6, T=9, spread=0.4):
    torch.manual_seed(seed)
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


def close(a, b):
    if a is None or b is None:
        assert a is b
        return
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


def outcome(function, x):
    x = x.clone().requires_grad_()
    found = function(x)
    parts = found if isinstance(found, tuple) else (found,)
    parts[0].sum().backward()
    return *(None if part is None else part.detach() for part in parts), x.grad


def same(ours_of, theirs_of, x):
    a, b = outcome(ours_of, x), outcome(theirs_of, x)
    assert len(a) == len(b)
    for found, expected in zip(a, b, strict=True):
        close(found, expected)


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
COUNTS = {
    "local": {},
    "global": {"dp_size": 2, "batch_num_tokens": 90.0, "global_batch_size": 12.0},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("counts", COUNTS)
def test_policy_loss(theirs, loss, correction, counts):
    data = batch()
    options = {**LOSSES[loss], **CORRECTIONS[correction]}
    options["is_correction_threshold"] = THRESHOLDS[options.get("is_correction_gating", "ratio")]

    def of(n):
        module = n.PolicyLoss(**options)
        return lambda x: module(
            x,
            data.old,
            data.advantages,
            action_mask=data.mask,
            rollout_log_probs=data.rollout,
            **COUNTS[counts],
        )

    same(of(ours), of(theirs), data.log_probs)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_policy_loss_with_the_options_of_0_11_0(kind):
    data = batch()
    old_style = {
        "enable_vllm_is_correction": True,
        "vllm_is_truncated_threshold": [0.8, 1.2],
        "vllm_is_correction_type": kind,
    }
    new_style = {**CORRECTIONS[kind], "is_correction_threshold": (0.8, 1.2)}
    arguments = (data.log_probs, data.old, data.advantages, data.mask, data.rollout)
    a = ours.PolicyLoss(**old_style)(*arguments)
    b = openrlhf_formulas.PolicyLoss(**new_style)(*arguments)
    assert len(a) == 4
    for found, expected in zip(a, b[:4], strict=True):
        close(found, expected)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_value_loss(theirs, clip, token_level, counts):
    data = batch()

    def of(n):
        module = n.ValueLoss(clip, token_level)
        return lambda x: module(x, data.old, data.returns, action_mask=data.mask, **COUNTS[counts])

    same(of(ours), of(theirs), data.values)


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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("with_old", [False, True])
def test_approximate_kl(theirs, estimator, unbiased, with_old):
    data = batch(spread=1.5)
    data.log_probs[0, :4] = data.old[0, :4] + torch.tensor([100.0, -90.0, 9.0, -2.6])
    options = {"kl_estimator": estimator, "unbiased_gradient": unbiased}
    if with_old:
        options["log_probs_old"] = data.rollout
    same(
        lambda x: ours.compute_approx_kl(x, data.old, **options),
        lambda x: theirs.compute_approx_kl(x, data.old, **options),
        data.log_probs,
    )


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0)])
def test_advantages_and_returns(theirs, gamma, lambd):
    data = batch()
    arguments = (data.values, data.returns, data.mask, gamma, lambd)
    a, b = (n.get_advantages_and_returns(*arguments) for n in (ours, theirs))
    close(a[0], b[0])
    close(a[1], b[1])


def test_masked_tokens_are_inert():
    data, poisoned = batch(), batch()
    for name in ("old", "log_probs", "rollout", "advantages"):
        getattr(poisoned, name)[poisoned.mask == 0] = float("nan")
    loss = ours.PolicyLoss(dual_clip=3.0, **CORRECTIONS["seq-mask-tis"])
    results = [
        outcome(lambda x, d=d: loss(x, d.old, d.advantages, d.mask, d.rollout), d.log_probs)
        for d in (data, poisoned)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_a_mask_every_token_counts():
    data = batch()
    ones = torch.ones_like(data.mask)
    for module, x in (
        (ours.PolicyLoss(), (data.log_probs, data.old, data.advantages)),
        (ours.ValueLoss(0.2), (data.values, data.old, data.returns)),
    ):
        a, b = module(*x), module(*x, ones)
        close(a[0] if isinstance(a, tuple) else a, b[0] if isinstance(b, tuple) else b)


REFUSED = {
    "policy_loss_type must be ppo or gspo, got 'reinforce'": {"policy_loss_type": "reinforce"},
    "dual_clip must be above 1, got 0.5": {"dual_clip": 0.5},
    "is_correction_level must be one of off, token, seq; got 'batch'": {
        "is_correction_level": "batch"
    },
    "is_correction_mode must be one of mask, clip; got 'drop'": {"is_correction_mode": "drop"},
    "is_correction_gating must be one of .*got 'k3'": {"is_correction_gating": "k3"},
    "is_correction_mode clip needs .*got seq and ratio": {
        "is_correction_mode": "clip",
        "is_correction_level": "seq",
    },
    "is_correction_threshold must have no lower bound with gating tv, got 0.5": {
        "is_correction_level": "seq",
        "is_correction_gating": "tv",
    },
    "vllm_is_correction_type must be one of .*got 'sampled'": {
        "enable_vllm_is_correction": True,
        "vllm_is_correction_type": "sampled",
    },
    "vllm_is_truncated_threshold is needed .*got None": {"enable_vllm_is_correction": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_openrlhf_refuses_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        ours.PolicyLoss(**REFUSED[message])


def test_missing_arguments_are_named():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="rollout_log_probs is needed for the rollout corr"):
        ours.PolicyLoss(is_correction_level="token")(x, x, x, x)
    with pytest.raises(ValueError, match="kl_estimator must be one of k1, k2, k3; got 'abs'"):
        ours.compute_approx_kl(x, x, kl_estimator="abs")
    with pytest.raises(TypeError, match="pass kl_estimator by keyword"):
        ours.compute_approx_kl(x, x, "k3")
    with pytest.raises(TypeError, match="pass enable_vllm_is_correction by keyword"):
        ours.PolicyLoss(0.2, 0.2, None, True, "ppo", False)  # as in 0.11.0


@pytest.mark.skipif(INSTALLED is None, reason="needs OpenRLHF's files")
@pytest.mark.parametrize("name", NAMES)
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
