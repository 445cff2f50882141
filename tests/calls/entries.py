"""The table of entry points that the property tests run over: cases, and what holds for each.

A function of rows has an entry by itself, another one is added by `entry`;
`test_properties_of_calls.py` notices one without.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import fastrl
from fastrl import KeptTokens
from fastrl.objective.presets import PRESETS
from fastrl.ops._rows.statistics import OF_ROW
from tests.ops.inputs import cu_seqlens, packed

from .call import Call, Place
from .case import DIVERGENCES, IN_TORCH, LINEAR, Case
from .examine import COMPILED, FUNCTIONS, place_of
from .objectives import objective_fields
from .rows_call import FUNCTIONS as OF_ROWS

#: Inputs in which an infinity at a counted position reaches the result.
INFINITE = {
    "gae": ("rewards", "values"),
    "discounted_returns": ("rewards",),
    "group_advantages": ("rewards",),
    "value_loss": ("values", "returns"),
    "masked_mean": ("x",),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A case, of which sizes, dtype and seed are chosen later, and what holds for it.

    Attributes:
        joins: "sequences": each has its own results; "loss": they are added up; "batch": they are
            one.
    """

    case: Case
    joins: str = "sequences"

    @property
    def infinite(self) -> tuple[str, ...]:
        """The inputs in which an infinity at a counted position reaches the result."""
        if self.case.function in OF_ROWS and self.case.logit_softcap is None:
            return self.leaves[:1]
        return INFINITE.get(self.case.function, ())

    @property
    def packs(self) -> bool:
        """Whether it takes `cu_seqlens`."""
        return "cu_seqlens" in inspect.signature(self.function).parameters

    @functools.cached_property
    def per_sequence(self) -> tuple[str, ...]:
        """The inputs `[B]`."""
        tensors = {k: x for k, x in self._small.given.items() if isinstance(x, torch.Tensor)}
        return tuple(name for name, x in tensors.items() if x.dim() == 1)

    @property
    def refuse_twice(self) -> tuple[str, ...]:
        """The backends that refuse a second derivative."""
        case = self.case
        if not self.leaves or case.function in IN_TORCH:
            return ()
        of_rows = case.function in OF_ROWS and case.function not in (*LINEAR, *DIVERGENCES)
        eager = of_rows and "teacher" not in self.options  # which torch differentiates twice
        return COMPILED if eager else ("reference", *COMPILED)

    def _made(self, sequences: int, tokens: int, **options: Any) -> Call:
        case = self.case.changed(sequences=sequences, tokens=tokens, **options)
        with np.errstate(all="ignore"):
            return FUNCTIONS[case.function].call(case, Place())

    @functools.cached_property
    def _small(self) -> Call:
        return self._made(2, 2)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(fastrl, self._small.function)

    @property
    def leaves(self) -> tuple[str, ...]:
        """What may want a gradient."""
        return self._small.leaves if self._small.differentiable else ()

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The arguments that no sequence has as its own."""
        tensors = (torch.Tensor, KeptTokens)
        return {name: x for name, x in self._small.given.items() if not isinstance(x, tensors)}

    def draw(self, sequences: int, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return inputs `[B, T, ...]` and `[B]`, those in structures as `teacher.logits`."""
        name, seed = str(dtype).removeprefix("torch."), int(torch.randint(10**6, ()))
        dtypes = dict.fromkeys(("dtype", "token_dtype", "sampler_dtype"), name)
        call = self._made(sequences, tokens, seed=seed, **dtypes)
        found: dict[str, torch.Tensor] = {}
        for name, x in call.given.items():
            if isinstance(x, KeptTokens):
                sets = [*x.token_ids.split(x.offsets.diff().tolist()), x.token_ids.new_zeros(1)]
                padded = pad_sequence(sets, batch_first=True, padding_value=-1)[:-1]
                found[name] = padded.view(sequences, tokens, padded.shape[1])
            elif hasattr(x, "_asdict"):
                fields = {f"{name}.{field}": part for field, part in x._asdict().items()}
                found |= {k: y for k, y in fields.items() if isinstance(y, torch.Tensor)}
            elif isinstance(x, torch.Tensor):
                found[name] = x
        top = [name for name in found if name.startswith("rollout_top_k")]
        count = found[top[0]].shape[-1] if top else 0
        return found | {name: found[name].view(sequences, tokens, count) for name in top}

    def arguments(self, inputs: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Return what the function takes: inputs as drawn, the other options, and more."""
        given = {**self.options, **inputs, **more}
        for name in [name for name in given if "." in name]:
            whole, field = name.split(".")
            given[whole] = given[whole]._replace(**{field: given.pop(name)})
        if "kept" in given:
            given["kept"] = KeptTokens.from_padded(given["kept"])
        return given

    def call(self, backend: str, inputs: Mapping[str, Any], **more: Any) -> dict[str, torch.Tensor]:
        """Return the results that are tensors, by name, without those that are passed on."""
        backend = place_of(self.case, backend).backend
        found = flat(self.function(**self.arguments(inputs, **more), backend=backend))
        passed_on = ("logprobs", "entropy") if self.function is fastrl.policy_loss else ()
        return {name: x for name, x in found.items() if name not in passed_on}


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


def of_all(name):
    """Whether an input is one of all sequences."""
    return name.rpartition(".")[2] == "weight"


def sequences_of(inputs, chosen, width):
    """Some of the sequences, cut to this width."""
    return {
        name: x if of_all(name) else x[chosen, :width] if x.dim() > 1 else x[chosen]
        for name, x in inputs.items()
    }


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
        if x.is_floating_point() and not of_all(name) and name not in entry.per_sequence
    ]


ENTRIES = {}


def entry(name, function, joins="sequences", **options):
    options = {"values": "real", "mask": "gaps", **options}
    ENTRIES[name] = Entry(Case(function, **options), joins)


# --- values, rewards, weights, means

SCAN = {"gamma": 0.9, "terminated": 0.15, "truncated": 0.15, "bootstrap": "sequence"}
BY_TOKEN = {**SCAN, "lam": 1.0, "bootstrap": "token"}
CLIPPED = {"clip": 0.2, "loss": "mse", "aggregation": "seq-mean-token-mean"}
entry("gae", "gae", parameters=SCAN)
entry("gae by token", "gae", parameters=BY_TOKEN)
entry("discounted_returns", "discounted_returns", parameters=SCAN)
for baseline, scale in (("mean", "group"), ("leave_one_out", "none"), ("mean", "batch")):
    joins = "batch" if scale == "batch" else "sequences"
    options = {"mask": "absent", "parameters": {"baseline": baseline, "scale": scale}}
    entry(f"group_advantages {baseline} {scale}", "group_advantages", joins, **options)
HUBER = {**CLIPPED, "loss": "huber", "aggregation": "token-mean"}
entry("value_loss mse", "value_loss", "loss", spread=2.0, parameters=CLIPPED)
entry("value_loss huber", "value_loss", "loss", spread=2.0, parameters=HUBER)
for estimator in ("k1", "k3"):
    options = {"mask": "all", "ref": "near", "parameters": {"estimator": estimator}}
    entry(f"kl_divergence {estimator}", "kl_divergence", **options)
entry("masked_mean", "masked_mean", "batch", spread=3.0)
entry("masked_mean dim", "masked_mean", spread=3.0, parameters={"dim": -1})
entry("whiten", "whiten", "batch", spread=3.0)
entry("whiten unshifted", "whiten", "batch", spread=3.0, parameters={"shift_mean": False})
for aggregation, groups in (("seq-mean-token-mean", None), ("prompt-mean", 1)):
    options = {"parameters": {"aggregation": aggregation}, "groups": groups}
    entry(f"token_weights {aggregation}", "token_weights", "loss", **options)

# --- statistics of rows

LOGITS = {"vocabulary": 23, "spread": 2.0}
HIDDEN = {"vocabulary": 23, "hidden": 4}
KINDS = {"logits": "own", "hidden": "hidden", "top-k": "tokens"}
#: Options of functions of rows; another one has an entry without.
OF_STATISTICS = {
    "token_stats": [{"outputs": OF_ROW}, {"logit_softcap": 5.0, "logit_scale": 0.5}],
    "linear_token_logprobs": [{"chunk_tokens": 7}],
    "linear_token_stats": [{"outputs": OF_ROW}, {"compact": False}],
}


def of_rows(name, function, joins="sequences", kind=None, **options):
    """Add the entry of a function of rows, with a kind of teacher."""
    options |= HIDDEN if function in LINEAR else LOGITS
    if kind is not None:
        options["teacher"] = KINDS[kind]
    if kind == "logits":
        options |= {"teacher_temperature": 0.7, "teacher_softcap": 9.0}
    entry(name, function, joins, **options)


for function in OF_ROWS:
    if function in DIVERGENCES:
        for kind, beta in (("logits", 0.0), ("hidden", 1.0), ("top-k", 0.5), ("logits", 0.1)):
            options = {"beta": beta, "temperature": "per-token"}
            of_rows(f"{function} {kind} {beta:g}", function, kind=kind, **options)
        continue
    for options in OF_STATISTICS.get(function, [{}]):
        name, heated = " ".join([function, *options]), {**options, "temperature": "per-token"}
        of_rows(name, function, **heated)
        of_rows(f"{name} kept", function, kept="few", **heated)
BESIDE = {"beta": 0.3, "outputs": fastrl.TokenStats._fields, "temperature": "per-token"}
of_rows("token_stats logits beside", "token_stats", kind="logits", **BESIDE)
of_rows("token_stats top-k beside", "token_stats", kind="top-k", **BESIDE)
of_rows("linear_token_stats hidden beside", "linear_token_stats", kind="hidden", **BESIDE)

# --- losses

#: What a preset is combined with.
EVERYTHING = {"kl_coef": 0.1, "entropy_coef": 0.05, "rollout_correction": [{"level": "geometric"}]}
OWN = {"dr_grpo": {"length_norm": 9.0}, "vespo": {"rollout_correction": [{}]}}
CORRECTIONS = [
    {"level": "sequence", "low": 0.5, "high": 2.0},
    {"kind": "filter", "level": "geometric", "low": 0.6, "high": 1.5},
    {"kind": "filter", "level": "max", "estimator": "k3", "high": 0.5},
    {"kind": "mask", "low": 0.2, "high": 3.0},
]
BY_TERM = {
    "aggregation": "seq-mean-token-mean",
    "kl_aggregation": "seq-mean-token-sum",
    "entropy_aggregation": "seq-mean-token-mean",
}
TOP = {**BY_TERM, "kl_aggregation": None, "entropy_aggregation": "token-mean"}
KLS = {"kl_coef": 0.1, "entropy_coef": 0.1}
#: Presets and fields.
OBJECTIVES = {
    **{name: (name, EVERYTHING | OWN.get(name, {})) for name in PRESETS},
    "gspo-token": ("gspo", {"level": "sequence-token", "clip_low": 0.1}),
    "bias-corrected": (
        "ppo",
        {"level": "sequence", "kl_coef": 0.3, "kl_gradient": "bias-corrected"},
    ),
    "prompt-mean": ("ppo", {"aggregation": "prompt-mean", "dual_clip": 3.0, "delta": 1.5}),
    "by term": (
        "ppo",
        {**KLS, **BY_TERM, "off_policy_threshold": 0.05, "rollout_correction": CORRECTIONS}
        | {"rollout_weighs": "policy"},
    ),
    "top entropy": ("ppo", {**KLS, **TOP, "level": "sequence", "top_entropy_quantile": 0.5}),
    "function": ("own square", {"kl_coef": 0.1}),
}
#: With the sampler's most likely tokens: in one pass over the rows, and in two.
WEIGHTS = {"score_centering": True, "rollout_correction": [{"low": 0.7, "high": 1.4}]}
CENTERED = {
    "centered": ("reinforce", {"score_centering": True, "kl_coef": 0.1, "entropy_coef": 0.05}),
    "centered by weights": ("ppo", WEIGHTS),
}
#: Those of the forms that make the log-probabilities themselves, and of the slower backends.
FEW = ("ppo", "gspo", "gmpo", "m2po", "vespo", "by term", "function")


def losses(function, names, words="", **options):
    for name in names:
        objective, fields = {**OBJECTIVES, **CENTERED}[name]
        given = {"objective": objective, "ref": "near" if fields.get("kl_coef") else None}
        given |= {"rollout": "near" if fields.get("rollout_correction") else None}
        given |= {"sampler": "near"} if name in CENTERED else {"old": "near"}
        given |= {"groups": 1} if name == "prompt-mean" else {}
        known = objective_fields(Case(function, **given, fields=fields))
        if known["aggregation"] not in ("token-mean", "prompt-mean"):
            given["advantages"] = "sequence"
        fields = {**fields, "teacher_coef": 0.7} if "kind" in options else fields
        by_batch = known["top_entropy_quantile"] < 1 or name == "m2po"
        add = entry if function in ("policy_loss", "clipped_tokens") else of_rows
        of_tokens = "sequences" if function == "clipped_tokens" else "loss"
        joins = "batch" if by_batch else of_tokens
        add(f"{function} {name}{words}", function, joins, fields=fields, **given, **options)


CHUNKS = {"chunk_tokens": 7}
losses("policy_loss", OBJECTIVES, entropy=True, policy_weights="token")
losses("clipped_tokens", ("ppo", "gspo"))
losses("logits_policy_loss", (*FEW, *CENTERED))
losses("linear_policy_loss", (*FEW, *CENTERED), **CHUNKS)
losses("logits_policy_loss", FEW[:2], " kept", kept="few")
losses("linear_policy_loss", FEW[:2], " kept", kept="few")
losses("logits_policy_loss", FEW[:2], " logits", kind="logits")
losses("linear_policy_loss", (*FEW[:2], "function"), " hidden", kind="hidden", beta=0.0, **CHUNKS)

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
    case = ENTRIES[name].case
    if case.function in IN_TORCH:
        return [pytest.mark.not_on("cpu", "triton", "cuda")]
    return [] if name in ON_GPUS else [pytest.mark.not_on("triton", "cuda")]


def entries(keep=lambda entry: True):
    """Parametrize a test over the entries that `keep` selects."""
    names = [name for name, entry in ENTRIES.items() if keep(entry)]
    return pytest.mark.parametrize(
        "entry",
        [pytest.param(ENTRIES[name], marks=marks_of(name), id=name) for name in names],
    )
