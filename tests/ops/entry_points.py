"""The table of entry points that the property tests run over: functions, objectives, inputs.

A new op has a row in `ENTRIES`; `test_properties_of_calls.py` notices one without.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.objective.presets import PRESETS
from fastrl.ops._rows.statistics import OF_ROW
from tests.ops.inputs import (
    TEACHER_WEIGHT,
    compared,
    cu_seqlens,
    draw_gae,
    draw_mask,
    draw_pair,
    draw_returns,
    draw_values,
    draw_x,
    from_logprobs,
    normal,
    packed,
    rows,
)

#: What a preset is combined with.
EVERYTHING = {
    "kl_coef": 0.1,
    "entropy_coef": 0.05,
    "rollout_correction": RolloutCorrection(level="geometric"),
}
OWN = {"dr_grpo": {"length_norm": 9.0}, "vespo": {"rollout_correction": RolloutCorrection()}}
OBJECTIVES = {
    **{name: Objective.preset(name, **EVERYTHING | OWN.get(name, {})) for name in PRESETS},
    "gspo-token": Objective(level="sequence-token", clip_low=0.1),
    "bias-corrected": Objective(level="sequence", kl_coef=0.3, kl_gradient="bias-corrected"),
    "prompt-mean": Objective(aggregation="prompt-mean", dual_clip=3.0, delta=1.5),
    "by term": Objective(
        kl_coef=0.2,
        entropy_coef=0.1,
        off_policy_threshold=0.05,
        rollout_correction=(
            RolloutCorrection(level="sequence", low=0.5, high=2.0),
            RolloutCorrection(kind="filter", level="geometric", low=0.6, high=1.5),
            RolloutCorrection(kind="filter", level="max", estimator="k3", high=0.5),
            RolloutCorrection(kind="mask", low=0.2, high=3.0),
        ),
        rollout_weighs="policy",
        aggregation="seq-mean-token-mean",
        kl_aggregation="seq-mean-token-sum",
        entropy_aggregation="seq-mean-token-mean",
    ),
    "top entropy": Objective(
        level="sequence",
        kl_coef=0.1,
        entropy_coef=0.1,
        top_entropy_quantile=0.5,
        entropy_aggregation="token-mean",
        aggregation="seq-mean-token-mean",
    ),
    "function": Objective(
        surrogate=lambda logprobs, old, ref, advantages: (logprobs - old - advantages) ** 2,
        kl_coef=0.1,
    ),
}
#: With the sampler's most likely tokens: in one pass over the rows, and in two.
CENTERED = {
    "centered": Objective.preset("reinforce", score_centering=True, kl_coef=0.1, entropy_coef=0.05),
    "centered by weights": Objective.preset(
        "ppo", score_centering=True, rollout_correction=RolloutCorrection(low=0.7, high=1.4)
    ),
}
#: Those of the forms that make the log-probabilities themselves, and of the slower backends.
FEW = ("ppo", "gspo", "gmpo", "m2po", "vespo", "by term", "function")


class Entry(NamedTuple):
    """A function, what it is called with, and what holds for it."""

    function: Callable[..., Any]
    #: makes the inputs `[B, T, ...]` and `[B]` by name
    draw: Callable[..., dict[str, torch.Tensor]]
    #: what may want a gradient
    leaves: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    #: "sequences": each has its own results; "loss": they are added up; "batch": they are one
    joins: str = "sequences"
    #: inputs `[B]`
    per_sequence: tuple[str, ...] = ()
    #: inputs in which an infinity at a counted position reaches the result
    infinite: tuple[str, ...] = ()
    #: whether it takes `cu_seqlens`
    packs: bool = True
    #: who refuses a second derivative
    refuse_twice: tuple[str, ...] = ()

    def call(self, backend, inputs, **more):
        """The results that are tensors, by name, without those that are passed on."""
        given = {**inputs, **self.options, **more}
        if "sampler_ids" in given:
            sampler = given.pop("sampler_ids"), given.pop("sampler_logprobs")
            given["rollout_top_k"] = fastrl.TopKLogprobs(*sampler)
        if "kept" in given:
            given["kept"] = fastrl.KeptTokens.from_padded(given["kept"])
        if "beta" in given:
            given["teacher"] = teacher_of(given, given.pop("beta"))
        if self.function in PLAIN or callable(surrogate_of(given)):
            backend = "reference" if backend == "reference" else "auto"
        found = flat(self.function(**given, backend=backend))
        passed_on = ("logprobs", "entropy") if self.function is fastrl.policy_loss else ()
        return {name: x for name, x in found.items() if name not in passed_on}


def teacher_of(given, beta):
    """Take what is the teacher's out of the inputs."""
    own = {name: given.pop(name) for name in [*given] if name.startswith("teacher_")}
    if "teacher_logprobs" in own:
        ids, logprobs = own["teacher_ids"], own["teacher_logprobs"]
        return fastrl.Teacher.from_top_k(ids, logprobs, beta=beta)
    if "teacher_hidden" in own:
        weight = TEACHER_WEIGHT.to(own["teacher_hidden"].dtype)
        return fastrl.Teacher.from_hidden(own["teacher_hidden"], weight, beta=beta)
    return fastrl.Teacher.from_logits(
        own["teacher_logits"], beta=beta, temperature=0.7, logit_softcap=9.0
    )


def surrogate_of(given):
    return getattr(given.get("objective"), "surrogate", None)


def flat(result):
    """All tensors of a result by name, those of metrics too."""
    if isinstance(result, torch.Tensor):
        return {"result": result}
    found = {}
    for name, x in result._asdict().items():
        if isinstance(x, Mapping):
            found |= {f"metric {key}": value for key, value in x.items()}
        elif x is not None:
            found[name] = x
    return found


def outcome(entry, backend, inputs, leaves=None, **more):
    """Results of a call, and the gradients of their sum, by the names of the leaves."""
    leaves = entry.leaves if leaves is None else leaves
    inputs = {k: x.detach().requires_grad_() if k in leaves else x for k, x in inputs.items()}
    results = entry.call(backend, inputs, **more)
    totals = [x.sum() for x in results.values() if x.requires_grad]
    if totals:
        sum(totals).backward()
    gradients = {f"d {k}": inputs[k].grad for k in leaves if inputs[k].grad is not None}
    return {k: x.detach() for k, x in results.items()} | gradients


def pack(tensors, shape, lengths):
    """The same with the first tokens of each sequence of `[B, T]`, one after the other."""
    return {name: packed(x, lengths) if x.shape[:2] == shape else x for name, x in tensors.items()}


def cut(entry, inputs, lengths):
    """Packed inputs, and the bounds if the entry takes them."""
    bounds = {"cu_seqlens": cu_seqlens(lengths)} if entry.packs else {}
    return pack(inputs, inputs["mask"].shape, lengths) | bounds


def per_token(entry, inputs):
    """The names of the float inputs that have a value (or a row) per token."""
    return [
        name
        for name, x in inputs.items()
        if x.is_floating_point() and name not in ("weight", *entry.per_sequence)
    ]


def losses(names, function, leaves, form=None, *, kept=False, teacher=None, **options):
    for name in names:
        o = {**OBJECTIVES, **CENTERED}[name]
        if teacher is not None:
            o = dataclasses.replace(o, teacher_coef=0.7)
        own = {"objective": o, **({"group_size": 1} if name == "prompt-mean" else {})}
        by_batch = o.top_entropy_quantile < 1 or name == "m2po"
        by_sequence = () if o.aggregation in ("token-mean", "prompt-mean") else ("advantages",)
        yield (
            f"{function.__name__} {name}{' kept' * kept}{f' {teacher}' if teacher else ''}",
            Entry(
                function,
                from_logprobs(o)
                if form is None
                else rows(form, scored=o, kept=kept, teacher=teacher),
                leaves,
                own | options,
                "batch" if by_batch else "loss",
                by_sequence,
                refuse_twice=EVERYWHERE,
            ),
        )


def clips(objective):
    def draw(B, T, dtype):
        drawn, names = from_logprobs(objective)(B, T, dtype), ("logprobs", "old_logprobs")
        return {name: drawn[name] for name in (*names, "advantages", "mask")}

    return draw


ALL = {"outputs": OF_ROW}
WITH_TEACHER = {"outputs": fastrl.TokenStats._fields, "beta": 0.3}
EVERYWHERE = ("reference", "cpu", "triton", "cuda")
BY_KERNELS = ("cpu", "triton", "cuda")  # eager torch has second derivatives
ENTRIES = {
    **dict(losses(OBJECTIVES, fastrl.policy_loss, ("logprobs", "entropy"))),
    **{
        f"clipped_tokens {name}": Entry(
            fastrl.clipped_tokens,
            clips(OBJECTIVES[name]),
            options={"objective": OBJECTIVES[name]},
            per_sequence=by_sequence,
        )
        for name, by_sequence in (("ppo", ()), ("gspo", ("advantages",)))
    },
    **dict(losses(FEW, fastrl.logits_policy_loss, ("logits",), "logits")),
    **dict(losses(FEW, fastrl.linear_policy_loss, ("hidden", "weight"), "hidden", chunk_tokens=7)),
    **dict(losses(FEW[:2], fastrl.logits_policy_loss, ("logits",), "logits", kept=True)),
    **dict(losses(CENTERED, fastrl.logits_policy_loss, ("logits",), "logits")),
    **dict(
        losses(CENTERED, fastrl.linear_policy_loss, ("hidden", "weight"), "hidden", chunk_tokens=7)
    ),
    **dict(
        losses(
            FEW[:2], fastrl.logits_policy_loss, ("logits",), "logits", teacher="logits", beta=1.0
        )
    ),
    **dict(
        losses(
            (*FEW[:2], "function"),
            fastrl.linear_policy_loss,
            ("hidden", "weight"),
            "hidden",
            teacher="hidden",
            beta=0.0,
            chunk_tokens=7,
        )
    ),
    **{
        f"{function.__name__} {kind} {beta:g}": Entry(
            function,
            compared(form, kind),
            leaves,
            {"beta": beta},
            infinite=leaves[:1],
            packs=False,
            refuse_twice=EVERYWHERE,
        )
        for function, form, leaves in (
            (fastrl.token_divergence, "logits", ("logits",)),
            (fastrl.linear_divergence, "hidden", ("hidden", "weight")),
        )
        for kind, beta in (("logits", 0.0), ("hidden", 1.0), ("top-k", 0.5), ("logits", 0.1))
    },
    **{
        f"{function.__name__} {kind} beside": Entry(
            function,
            rows(form, scored=None, teacher=kind),
            leaves,
            WITH_TEACHER,
            infinite=leaves[:1],
            packs=False,
            refuse_twice=EVERYWHERE,
        )
        for function, form, leaves, kind in (
            (fastrl.token_stats, "logits", ("logits",), "logits"),
            (fastrl.token_stats, "logits", ("logits",), "top-k"),
            (fastrl.linear_token_stats, "hidden", ("hidden", "weight"), "hidden"),
        )
    },
    **dict(losses(FEW[:2], fastrl.linear_policy_loss, ("hidden", "weight"), "hidden", kept=True)),
    **{
        f"{function.__name__}{''.join(f' {name}' for name in options)}{' kept' * kept}": Entry(
            function,
            rows(form, scored=None, kept=kept),
            leaves,
            options,
            infinite=() if "logit_softcap" in options else leaves[:1],
            packs=False,
            refuse_twice=BY_KERNELS if form == "logits" else EVERYWHERE,
        )
        for kept in (False, True)
        for function, form, leaves, options in (
            (fastrl.token_logprobs, "logits", ("logits",), {}),
            (fastrl.token_stats, "logits", ("logits",), ALL),
            (fastrl.token_stats, "logits", ("logits",), {"logit_softcap": 5.0, "logit_scale": 0.5}),
            (fastrl.linear_token_logprobs, "hidden", ("hidden", "weight"), {"chunk_tokens": 7}),
            (fastrl.linear_token_stats, "hidden", ("hidden", "weight"), ALL),
            (fastrl.linear_token_stats, "hidden", ("hidden", "weight"), {"compact": False}),
        )
    },
    "gae": Entry(
        fastrl.gae,
        draw_gae(True),
        options={"gamma": 0.9},
        per_sequence=("bootstrap_values",),
        infinite=("rewards", "values"),
    ),
    "gae by token": Entry(fastrl.gae, draw_gae(False), options={"gamma": 0.9, "lam": 1.0}),
    "discounted_returns": Entry(
        fastrl.discounted_returns,
        draw_returns,
        options={"gamma": 0.9},
        per_sequence=("bootstrap_values",),
        infinite=("rewards",),
    ),
    **{
        f"group_advantages {baseline} {scale}": Entry(
            fastrl.group_advantages,
            lambda B, T, dtype: {"rewards": normal(B, T, dtype=dtype)},
            options={"baseline": baseline, "scale": scale},
            infinite=("rewards",),
            joins="batch" if scale == "batch" else "sequences",
            packs=False,
        )
        for baseline, scale in (("mean", "group"), ("leave_one_out", "none"), ("mean", "batch"))
    },
    **{
        f"value_loss {kind}": Entry(
            fastrl.value_loss,
            draw_values,
            ("values",),
            {"clip": 0.2, "loss": kind, "aggregation": aggregation},
            "loss",
            infinite=("values", "returns"),
        )
        for kind, aggregation in (("mse", "seq-mean-token-mean"), ("huber", "token-mean"))
    },
    **{
        f"kl_divergence {estimator}": Entry(
            fastrl.kl_divergence,
            draw_pair,
            ("logprobs", "ref_logprobs"),
            {"estimator": estimator},
            packs=False,
        )
        for estimator in ("k1", "k3")
    },
    "masked_mean": Entry(
        fastrl.masked_mean, draw_x, ("x",), joins="batch", infinite=("x",), packs=False
    ),
    "masked_mean dim": Entry(
        fastrl.masked_mean, draw_x, ("x",), {"dim": -1}, infinite=("x",), packs=False
    ),
    **{
        f"whiten{' unshifted' * (not shift)}": Entry(
            fastrl.whiten, draw_x, options={"shift_mean": shift}, joins="batch", packs=False
        )
        for shift in (True, False)
    },
    **{
        f"token_weights {aggregation}": Entry(
            fastrl.token_weights,
            lambda B, T, dtype: draw_mask(B, T),
            options={"aggregation": aggregation, "group_size": size},
            joins="loss",
        )
        for aggregation, size in (("seq-mean-token-mean", None), ("prompt-mean", 1))
    },
}
#: Functions of torch, without kernels; each runs once.
PLAIN = (
    *(fastrl.value_loss, fastrl.kl_divergence, fastrl.masked_mean, fastrl.whiten),
    *(fastrl.token_weights, fastrl.clipped_tokens),
)


#: What the slow stand-ins of GPUs run.
ON_GPUS = (
    *("policy_loss ppo", "policy_loss gspo", "policy_loss gmpo", "policy_loss by term"),
    *("logits_policy_loss ppo", "logits_policy_loss gspo", "token_logprobs", "token_stats outputs"),
    *("token_stats logits beside", "token_divergence logits 0", "token_divergence logits 0.1"),
    *("logits_policy_loss centered", "logits_policy_loss centered by weights"),
    *("gae", "gae by token", "group_advantages mean group", "group_advantages mean batch"),
)


def marks_of(name):
    """Plain functions and functions as objectives run on the reference alone."""
    entry = ENTRIES[name]
    if entry.function in PLAIN:
        return [pytest.mark.not_on("cpu", "triton", "cuda")]
    if entry.function.__name__.startswith("linear") or callable(surrogate_of(entry.options)):
        return [pytest.mark.not_on("triton", "cuda")]
    return [] if name in ON_GPUS else [pytest.mark.not_on("triton", "cuda")]


def entries(keep=lambda entry: True):
    """Parametrize a test over the entries that `keep` selects."""
    names = [name for name, entry in ENTRIES.items() if keep(entry)]
    return pytest.mark.parametrize(
        "entry",
        [pytest.param(ENTRIES[name], marks=marks_of(name), id=name) for name in names],
    )
