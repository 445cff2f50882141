"""NeMo RL's log-probabilities from hidden states on fastrl, and its loss as an `Objective`."""

import math
import sys
import types

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.integrations import nemo_rl
from tests.ops.gloo_ranks import on_ranks
from tests.integrations import nemo_rl_formulas
from tests.support import nemo_rl_ranks as ranks
from tests.support.importable import importable, without_modules

HOME = "nemo_rl.distributed.model_utils"
NAME = "from_parallel_hidden_states_to_logprobs"
LOSSES = "nemo_rl.algorithms.loss.loss_functions"
on_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")


@pytest.fixture
def package(monkeypatch):
    """A package with NeMo RL's module, made of the transcription."""
    without_modules(monkeypatch, "nemo_rl")
    for name in ("nemo_rl", "nemo_rl.distributed", HOME):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["nemo_rl"].__version__ = "0.7.0"
    theirs = getattr(nemo_rl_formulas, NAME)
    copy = types.FunctionType(theirs.__code__, vars(nemo_rl_formulas), NAME, theirs.__defaults__)
    copy.__module__ = HOME
    setattr(sys.modules[HOME], NAME, copy)
    return sys.modules[HOME]


def batch(S=7, B=3, H=8, V=19):
    torch.manual_seed(0)
    return torch.randn(S, B, H), torch.randn(V, H), torch.randint(V, (B, S))


def results(function, hidden, head, ids, temperature=None, **options):
    hidden, head = (x.detach().clone().requires_grad_() for x in (hidden, head))
    found = function(hidden * 1.0, head, False, ids, 0, len(head), None, **options)
    if temperature:
        found.div_(temperature)  # as NeMo RL does
    torch.manual_seed(1)
    (found * torch.randn(found.shape)).sum().backward()
    return [x.double() for x in (found.detach(), hidden.grad, head.grad)]


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("shape", [{}, {"B": 1}, {"S": 1}, {"S": 2, "V": 1}])
def test_values_and_gradients(shape, temperature):
    functions = (nemo_rl.from_parallel_hidden_states_to_logprobs, getattr(nemo_rl_formulas, NAME))
    a, b = (results(f, *batch(**shape), temperature) for f in functions)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_log_probabilities_of_16_bits_are_not_rounded():
    hidden, head, ids = (x.bfloat16() if x.is_floating_point() else x for x in batch())
    functions = (nemo_rl.from_parallel_hidden_states_to_logprobs, getattr(nemo_rl_formulas, NAME))
    a, b = (results(f, hidden, head, ids) for f in functions)
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a[1:], b[1:], rtol=1e-2, atol=3e-2)


def test_inference_needs_no_gradient():
    hidden, head, ids = batch()
    arguments = (hidden.requires_grad_(), head, False, ids, 0, 19, None)
    assert not nemo_rl.from_parallel_hidden_states_to_logprobs(
        *arguments, inference_only=True
    ).requires_grad


def test_the_function_is_replaced_and_restored(package):
    own = getattr(package, NAME)
    with nemo_rl.use_fastrl() as replaced:
        assert getattr(package, NAME) is nemo_rl.from_parallel_hidden_states_to_logprobs
        assert replaced.names == (f"{HOME}.{NAME}",)
    assert getattr(package, NAME) is own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_gloo
def test_a_head_on_two_ranks(dtype):
    on_ranks(4, ranks.equal_to_one_process, dtype)


@pytest.mark.skipif(importable(HOME) is None, reason="needs NeMo RL itself")
@on_gloo
def test_a_head_on_two_ranks_of_the_package():
    on_ranks(2, ranks.equal_to_the_package)


@pytest.mark.parametrize("function", [ranks.without_gradients, ranks.refusals])
@on_gloo
def test_other_calls_on_two_ranks(function):
    on_ranks(2, function)


def test_refusals(package, monkeypatch):
    hidden, head, ids = batch()
    with pytest.raises(ValueError, match=r"target must have shape \[B, S\] .*got \(7, 3\) for"):
        nemo_rl.from_parallel_hidden_states_to_logprobs(hidden, head, False, ids.T, 0, 19, None)
    with pytest.raises(ValueError, match=r"in rank order, got \[\(0, 18\)\] for \[19\] rows"):
        nemo_rl.from_parallel_hidden_states_to_logprobs(hidden, head, False, ids, 0, 18, None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group)
    with pytest.raises(ValueError, match="cp_group must have one rank, got 2"):
        nemo_rl.from_parallel_hidden_states_to_logprobs(
            hidden, head, False, ids, 0, 19, None, cp_group=2
        )

    def changed(tensor_parallel_hidden_states, output_weight):
        raise AssertionError

    changed.__module__ = HOME
    setattr(package, NAME, changed)
    with pytest.raises(NotImplementedError, match=r"nemo_rl 0.7.0 takes \(tensor_parallel"):
        nemo_rl.use_fastrl()


def test_without_nemo_rl(monkeypatch):
    without_modules(monkeypatch, "nemo_rl")
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    with pytest.raises(ImportError, match="nemo_rl is not importable"):
        nemo_rl.use_fastrl()


def samples(B=6, T=9, spread=0.3):
    """A batch as `ClippedPGLossFn` takes it: T log-probabilities for T + 1 tokens."""
    torch.manual_seed(2)
    token_mask = (torch.rand(B, T + 1) < 0.7).double()
    token_mask[:, 1] = 1.0
    old = -torch.rand(B, T + 1).double() - 0.5
    near = [old + spread * torch.randn(B, T + 1).double() for _ in range(3)]
    sample_mask = torch.ones(B).double()
    sample_mask[4] = 0.0
    data = {
        "input_ids": torch.zeros(B, T + 1).long(),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "advantages": torch.randn(B, T + 1).double(),
        "prev_logprobs": old,
        "generation_logprobs": near[0],
        "reference_policy_logprobs": near[1],
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
    }
    return near[2][:, 1:], data


def correction(o):
    """Return `rollout_correction` for NeMo RL's options, None without one."""
    if not o.get("use_importance_sampling_correction"):
        return None
    kind, level = o.get("truncated_importance_sampling_type"), "token"
    if o.get("sequence_level_importance_ratios"):
        level = "sequence"
    bounds = {
        "low": o.get("truncated_importance_sampling_ratio_min") or 0.0,
        "high": o.get("truncated_importance_sampling_ratio", math.inf),
    }
    plain = RolloutCorrection(level=level, high=math.inf)
    if kind == "seq-mask-tis":
        return RolloutCorrection(kind="filter", level="geometric", **bounds), plain
    if kind is None:
        return plain
    return RolloutCorrection(kind="mask" if kind == "icepop" else "truncate", level=level, **bounds)


def on_fastrl(logprobs, data, sequences, tokens, **o):
    """Return the loss of `ClippedPGLossFn` as `docs/losses.md` says."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    by_token = o.get("token_level_loss", True)
    rest = {"aggregation": "token-mean" if by_token else "seq-mean-token-mean"}
    count = {"normalizer": tokens if by_token else sequences}
    surrogate = {"level": "sequence"} if o.get("sequence_level_importance_ratios") else {}
    surrogate |= {"clip_low": o.get("ratio_clip_min", 0.2), "dual_clip": o.get("ratio_clip_c")}
    surrogate["clip_high"] = o.get("ratio_clip_max", 0.2)
    if o.get("use_cispo"):
        surrogate["surrogate"] = "cispo"
    if o.get("disable_ppo_ratio"):
        surrogate = {"surrogate": "reinforce"}
    old, generation = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
    given = {"old_logprobs": None if o.get("force_on_policy_ratio") else old}
    corrected = correction(o)
    if corrected:
        given["rollout_logprobs"] = generation
    objective = Objective(**surrogate, **rest, rollout_correction=corrected)
    advantages = data["advantages"][:, 1:]
    loss = fastrl.policy_loss(
        logprobs, advantages, mask, **given, **count, objective=objective
    ).loss
    if o.get("reference_policy_kl_penalty"):
        penalty = Objective(
            surrogate="reinforce",
            kl_coef=o["reference_policy_kl_penalty"],
            kl_estimator=o.get("reference_policy_kl_type", "k3"),
            kl_gradient="bias-corrected",
            **rest,
        )
        loss += fastrl.policy_loss(
            logprobs,
            torch.zeros_like(advantages),
            mask,
            old_logprobs=generation if o.get("use_on_policy_kl_approximation") else None,
            ref_logprobs=data["reference_policy_logprobs"][:, 1:],
            objective=penalty,
            **count,
        ).loss
    if o.get("positive_example_nll_weight"):
        right = mask * (data["rewards"] > 0)[:, None]
        ones = torch.ones(len(mask), dtype=logprobs.dtype)
        loss += (
            o["positive_example_nll_weight"]
            * fastrl.policy_loss(logprobs, ones, right, objective="reinforce").loss
        )
    return loss


CORRECTED = {"use_importance_sampling_correction": True}
TRUNCATED = {**CORRECTED, "truncated_importance_sampling_ratio": 1.2}
BOUNDED = {**TRUNCATED, "truncated_importance_sampling_ratio_min": 0.8}
CASES = {
    "ppo": {"ratio_clip_max": 0.28},
    "dual clip": {"ratio_clip_c": 1.5},
    "mean over sequences": {"token_level_loss": False},
    "gspo": {
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "ratio_clip_min": 0.03,
        "ratio_clip_max": 0.04,
    },
    "reinforce": {"disable_ppo_ratio": True},
    "on policy": {"force_on_policy_ratio": True},
    "cispo": {"use_cispo": True},
    "k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    "k3": {"reference_policy_kl_penalty": 0.1, "token_level_loss": False},
    "kl approximation": {
        "reference_policy_kl_penalty": 0.1,
        "use_on_policy_kl_approximation": True,
    },
    "correction": CORRECTED,
    "tis": {**TRUNCATED, "truncated_importance_sampling_type": "tis"},
    "icepop": {**BOUNDED, "truncated_importance_sampling_type": "icepop"},
    "seq-mask-tis": {**BOUNDED, "truncated_importance_sampling_type": "seq-mask-tis"},
    "gspo, corrected": {
        **CORRECTED,
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
    },
    "positive examples": {"positive_example_nll_weight": 0.3},
}


def of_package(logprobs, data, sequences, tokens, **options):
    losses = importable(LOSSES)
    options = {"reference_policy_kl_penalty": 0.0, **options}
    function = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**options))
    return function(logprobs, data, torch.tensor(sequences), torch.tensor(tokens))[0]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("implementation", ["transcribed", "installed"])
def test_the_loss_as_an_objective(implementation, options):
    if implementation == "installed" and importable(LOSSES) is None:
        pytest.skip("needs NeMo RL itself")
    theirs = nemo_rl_formulas.clipped_pg_loss if implementation == "transcribed" else of_package
    found = []
    for function in (on_fastrl, theirs):
        logprobs, data = samples()
        loss = function(logprobs.requires_grad_(), data, 11.0, 70.0, **options)
        loss.backward()
        found.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)
