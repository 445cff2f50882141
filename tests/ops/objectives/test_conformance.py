"""Each convention gives its trainer's numbers: loss and gradients against golden values."""

import math
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.objective.presets import ADVANTAGE_CONVENTIONS, CONVENTIONS, convention_table
from tests.ops.objectives.trainer_formulas import Batch, group_norm, openrlhf, trl, verl

B, T = 6, 7
CLIP = {"clip_low": 0.05, "clip_high": 0.08}  # close enough that some sequences stay inside
NARROW = (0.05, 0.08)


def batch(noise, advantages_by_token):
    """Inputs exact in float32; one row is empty."""
    mask = (torch.rand(B, T) < 0.8).double()
    mask[0] = 1
    mask[4] = 0
    logprobs = -torch.rand(B, T) * 3 - 0.01

    def near():
        shift = torch.randn(B, 1) * noise / 2 + torch.randn(B, T) * noise
        return (logprobs + shift).double()

    A = torch.randn(B, T) if advantages_by_token else torch.randn(B, 1).expand(B, T)
    return Batch(
        logprobs.double(), near(), near(), near(), torch.rand(B, T).double() * 2, A.double(), mask
    )


def golden(formula, b, **settings):
    """Loss and gradients in logprobs and entropy, by autograd through the trainer's formula."""
    leaves = [x.clone().requires_grad_() for x in (b.logprobs, b.entropy)]
    loss = formula(b._replace(logprobs=leaves[0], entropy=leaves[1]), **settings)
    return loss.detach(), torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_conforms(backend, b, objective, expected, normalizer=None, tolerance=1e-12):
    real = torch.float64 if backend == "reference" else torch.float32
    logprobs, entropy = (x.to(real).requires_grad_() for x in (b.logprobs, b.entropy))
    o = objective
    sampled = o.rollout_corrections or None
    result = fastrl.policy_loss(
        logprobs,
        b.advantages.to(real),
        b.mask,
        old_logprobs=b.old.to(real),
        ref_logprobs=b.ref.to(real) if o.kl_coef else None,
        rollout_logprobs=b.rollout.to(real) if sampled else None,
        entropy=entropy,
        objective=o,
        normalizer=normalizer,
        backend=backend,
    )
    result.loss.backward()
    budget = tolerance if backend == "reference" else 3e-5
    loss, gradients = expected
    grads = (logprobs.grad, torch.zeros_like(entropy) if entropy.grad is None else entropy.grad)
    for came, wanted in ((result.loss, loss), *zip(grads, gradients, strict=True)):
        # the loss adds up terms of both signs, a gradient is a term by itself
        size = float(wanted.abs().max()) + (1e-3 if wanted.dim() else 0.1)
        torch.testing.assert_close(came.detach().double(), wanted, rtol=0, atol=budget * size)


#: whether advantages are by token, and how far apart the log-probabilities are
BATCHES = {"[B]": (False, 0.15), "[B,T]": (True, 0.15), "far": (False, 9.0)}
SMALLEST = math.exp(-20)  # verl's own bound of a rollout ratio

# preset: TRL's settings for it, changes to the preset
TRL = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": 9}, {"length_norm": 9.0}),
    "dapo": ({"loss_type": "dapo", "num_items": 50.0}, {}),
    "cispo": ({"loss_type": "cispo", "epsilon": (None, 5.0), "num_items": 50.0}, {}),
    "sapo": ({"loss_type": "sapo"}, {}),
    "gspo": ({"loss_type": "grpo", "level": "sequence", "epsilon": NARROW}, CLIP),
    "luspo": ({"loss_type": "luspo", "level": "sequence", "epsilon": NARROW}, CLIP),
    "gmpo": ({"loss_type": "gmpo", "epsilon": (0.4, 0.4)}, {}),
    "vespo": ({"loss_type": "vespo", "num_items": 50.0}, {}),
}
MODES = [
    ("token_truncate", None, 1.1),
    ("token_mask", 0.9, 1.1),
    ("sequence_truncate", 0.8, 1.2),
    ("sequence_mask", None, 1.2),
]
TRL_OPTIONS = {
    "plain": ({}, {}),
    "kl": ({"beta": 0.04}, {"kl_coef": 0.04}),
    "plain kl": (
        {"beta": 0.04, "bias_correction": False},
        {"kl_coef": 0.04, "kl_gradient": "exact"},
    ),
    "entropy": ({"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    "top entropy": (
        {"top_entropy_quantile": 0.25, "beta": 0.04, "entropy_coef": 0.01},
        {"top_entropy_quantile": 0.25, "kl_coef": 0.04, "entropy_coef": 0.01},
    ),
    "off policy": (
        {"off_policy_mask_threshold": 0.02, "beta": 0.04},
        {"off_policy_threshold": 0.02, "kl_coef": 0.04},
    ),
    "off policy, sampled": (
        {"off_policy_mask_threshold": 0.02, "sampling": MODES[0]},
        {
            "off_policy_threshold": 0.02,
            "rollout_correction": RolloutCorrection(high=1.1),
        },
    ),
    **{
        mode: (
            {"sampling": (mode, low, high), "beta": 0.04},
            {
                "kl_coef": 0.04,
                "rollout_correction": RolloutCorrection(
                    kind=mode.split("_")[1], level=mode.split("_")[0], low=low or 0.0, high=high
                ),
            },
        )
        for mode, low, high in MODES
    },
}


def test_trl_cispo_with_its_default_bound(backend):
    b = batch(0.5, False)
    o = Objective.preset("cispo", convention="trl", clip_high=0.2 - 1)
    expected = golden(trl, b, loss_type="cispo", epsilon=(None, 0.2), num_items=50.0)
    assert_conforms(backend, b, o, expected, {"policy": 50.0})


@pytest.mark.parametrize("by_token", [False, True])
def test_trl_delta(backend, by_token):
    b = batch(0.5, by_token)
    o = Objective.preset("grpo", convention="trl", delta=1.5)
    assert_conforms(backend, b, o, golden(trl, b, loss_type="grpo", delta=1.5))


VERL = {
    "ppo": ({"loss_mode": "vanilla"}, {}),
    "grpo": ({"loss_mode": "vanilla"}, {}),
    "dapo": ({"loss_mode": "vanilla", "clip": (0.2, 0.28)}, {}),
    "dr_grpo": ({"loss_mode": "vanilla", "mode": "seq-mean-token-sum-norm"}, {}),
    "cispo": ({"loss_mode": "cispo"}, {}),
    "sapo": ({"loss_mode": "sapo"}, {}),
    "gspo": ({"loss_mode": "gspo", "clip": NARROW}, CLIP),
    "gmpo": ({"loss_mode": "geo_mean", "clip": (0.4, 0.4)}, {}),
    "reinforce": ({"loss_mode": "reinforce"}, {}),
    "dppo_tv": ({"loss_mode": "dppo_tv"}, {}),
    "dppo_kl": ({"loss_mode": "dppo_kl"}, {}),
}
VERL_OPTIONS = {
    "plain": ({}, {}),
    "kl and entropy": (
        {"kl_coef": 0.04, "entropy_coef": 0.01},
        {"kl_coef": 0.04, "entropy_coef": 0.01},
    ),
    **{
        name: (
            {"kl_coef": 0.04, "kl_type": name},
            {
                "kl_coef": 0.04,
                "kl_estimator": name.rstrip("+"),
                "kl_gradient": "straight-through" if name.endswith("+") else "exact",
            },
        )
        for name in ("k1", "k2", "abs", "k1+", "k3+")
    },
    **{
        f"{level} {low} {high}": (
            {"rollout": (level, low, high), "kl_coef": 0.04},
            {
                "kl_coef": 0.04,
                "rollout_correction": RolloutCorrection(
                    kind="truncate" if low is None else "mask",
                    level=level,
                    low=low or SMALLEST,
                    high=high,
                ),
            },
        )
        for level in ("token", "sequence")
        for low, high in ((None, 1.1), (0.9, 1.2))
    },
}


MODES_OF_VERL = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")


@pytest.mark.parametrize("mode", [*MODES_OF_VERL, "seq-mean-token-sum-norm"])
def test_verl_aggregations_with_global_counts(backend, mode):
    b = batch(0.15, False)
    counts = {"batch_num_tokens": 50.0, "global_batch_size": 9.0}
    counts |= {"loss_scale_factor": 12.0} if mode.endswith("norm") else {}
    settings = {"loss_mode": "vanilla", "mode": mode, "kl_coef": 0.1, "entropy_coef": 0.02}
    changes = {"length_norm": 12.0} if mode.endswith("norm") else {}
    o = Objective.preset(
        "grpo", convention="verl", aggregation=mode, kl_coef=0.1, entropy_coef=0.02, **changes
    )
    normalizer = {"token-mean": 50.0, "token-sum": None}.get(mode, 9.0)
    expected = golden(verl, b, **settings, **counts)
    assert_conforms(backend, b, o, expected, normalizer, tolerance=3e-8)


def test_verl_gspo_with_global_counts(backend):
    b = batch(0.15, False)
    o = Objective.preset("gspo", convention="verl", kl_coef=0.1, entropy_coef=0.02, **CLIP)
    expected = golden(
        verl,
        b,
        loss_mode="gspo",
        clip=NARROW,
        kl_coef=0.1,
        entropy_coef=0.02,
        batch_num_tokens=50.0,
        global_batch_size=9.0,
    )
    normalizer = {"policy": 9.0, "kl": 50.0, "entropy": 50.0}
    assert_conforms(backend, b, o, expected, normalizer, tolerance=3e-8)


OPENRLHF = {
    "ppo": ({}, {}),
    "grpo": ({}, {}),
    "dapo": ({"clip_eps_high": 0.28}, {}),
    "gspo": ({"policy_loss_type": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.08}, CLIP),
}
BOUNDS = {"low": 0.9, "high": 1.15}
#: OpenRLHF's options, and the same as fastrl's correction
CORRECTIONS = {
    "tis": (
        {"is_correction_level": "token", "is_correction_mode": "clip"},
        RolloutCorrection(**BOUNDS),
    ),
    "icepop": ({"is_correction_level": "token"}, RolloutCorrection(kind="mask", **BOUNDS)),
    "seq-mask-tis": (
        {"is_correction_level": "seq"},
        (
            RolloutCorrection(kind="filter", level="geometric", **BOUNDS),
            RolloutCorrection(high=math.inf),
        ),
    ),
}
OPENRLHF_OPTIONS = {
    "plain": ({}, {}),
    "dual clip": ({"dual_clip": 1.5}, {"dual_clip": 1.5}),
    "entropy": ({"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    **{
        name: (
            {"kl_coef": 0.04, "kl_estimator": name},
            {"kl_coef": 0.04, "kl_estimator": name},
        )
        for name in ("k1", "k2", "k3")
    },
    **{
        name: (
            {**options, "is_correction_threshold": (0.9, 1.15), "kl_coef": 0.04},
            {"rollout_correction": correction, "kl_coef": 0.04},
        )
        for name, (options, correction) in CORRECTIONS.items()
    },
}


#: convention -> its formula, presets, options, and an error of its own: divisions by length + 1e-8
TRAINERS = {
    "trl": (trl, TRL, TRL_OPTIONS, 1e-12),
    "verl": (verl, VERL, VERL_OPTIONS, 3e-8),
    "openrlhf": (openrlhf, OPENRLHF, OPENRLHF_OPTIONS, 3e-8),
}


def exists(convention, preset, more, batch_name):
    """Whether a trainer has this, and its formula is the preset's."""
    if convention == "trl":  # log-ratios beyond 20 are where trainers part
        extra = {"entropy_coef", "top_entropy_quantile"} & more.keys()
        if preset == "vespo" and more.get("sampling", ("token",))[0].startswith("sequence"):
            return False
        return batch_name != "far" and (preset != "gmpo" or (batch_name == "[B]" and not extra))
    if convention == "verl":  # its gmpo takes the geometric mean of the rollout weights
        if preset.startswith("dppo") and batch_name == "far":  # where probabilities are above 1
            return False
        return preset != "gmpo" or "rollout" not in more
    return preset != "gspo" or "is_correction_level" not in more  # rollout instead of old ones


CASES = [
    (convention, preset, option, name)
    for convention, (_, presets, options, _) in TRAINERS.items()
    for preset in presets
    for option, (more, _) in options.items()
    for name in BATCHES
    if exists(convention, preset, more, name)
]


@pytest.mark.parametrize(("convention", "preset", "option", "name"), CASES)
def test_the_loss_of_a_trainer(backend, convention, preset, option, name):
    formula, presets, options, tolerance = TRAINERS[convention]
    (settings, changes), (more, fields) = presets[preset], options[option]
    by_token, noise = BATCHES[name]
    b = batch(noise, by_token)
    o = Objective.preset(preset, convention=convention, **changes, **fields)
    normalizer = {"policy": settings["num_items"]} if "num_items" in settings else None
    expected = golden(formula, b, **settings, **more)
    assert_conforms(backend, b, o, expected, normalizer, tolerance)


def test_every_preset_of_a_trainer_is_tested():
    tested = {convention: presets for convention, (_, presets, *_) in TRAINERS.items()}
    trainers = {name: set(presets) for name, presets in CONVENTIONS.items() if name != "fastrl"}
    assert {name: set(presets) for name, presets in tested.items()} == trainers


def test_the_table_in_the_docs_is_generated_from_the_code():
    assert convention_table() in (Path(__file__).parents[3] / "docs" / "conventions.md").read_text()
    assert all(f"`{name}`" in convention_table() for name in CONVENTIONS if name != "fastrl")


@pytest.mark.parametrize("preset", CONVENTIONS["fastrl"])
def test_the_default_convention_is_the_papers(preset):
    assert Objective.preset(preset, convention="fastrl") == Objective.preset(preset)


@pytest.mark.parametrize("convention", ["trl", "verl", "openrlhf"])
def test_advantages(backend, convention):
    ids = [3, 1, 3, 3, 1, 8, 1]
    near = 0.5 + 2.0**-13
    rewards = torch.tensor([1.0, 0.5, 0.0, 2.0, near, 0.75, 1 - near], dtype=torch.float64)
    correction, eps, singleton = ADVANTAGE_CONVENTIONS[convention]
    alone = (lambda r: r) if singleton == "raw" else (lambda r: 0 * r)
    expected = group_norm(
        rewards, ids, {"trl": 1e-4, "verl": 1e-6, "openrlhf": 1e-9}[convention], alone
    )
    came = fastrl.group_advantages(
        rewards.to(torch.float64 if backend == "reference" else torch.float32),
        group_ids=torch.tensor(ids),
        convention=convention,
        backend=backend,
    )
    tolerance = 1e-12 if backend == "reference" else 1e-6
    torch.testing.assert_close(came.advantages.double(), expected, rtol=tolerance, atol=1e-12)
    explicit = fastrl.group_advantages(
        rewards, group_ids=torch.tensor(ids), correction=correction, eps=eps, singleton=singleton
    )
    named = fastrl.group_advantages(rewards, group_ids=torch.tensor(ids), convention=convention)
    assert torch.equal(explicit.advantages, named.advantages)
