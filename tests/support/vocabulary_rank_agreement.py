"""What the ranks of a split vocabulary must agree on: calls that differ on one rank."""

import functools
import inspect

import numpy as np
import torch
import torch.distributed as dist

import fastrl
from fastrl import Objective
from fastrl.ops import _row_stats

#: One call per public function with `vocab_group`, of packed tokens, by parameter.
TOKENS, WIDTH, COLUMNS = 6, 8, 5
GIVEN = {
    "hidden": torch.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH) / 50,
    "weight": torch.ones(COLUMNS, WIDTH),
    "logits": torch.arange(TOKENS * COLUMNS).reshape(TOKENS, COLUMNS) / 30,
    "token_ids": torch.arange(TOKENS),
    "advantages": torch.linspace(-1, 2, TOKENS),
    "mask": torch.tensor([1, 1, 0, 1, 1, 1]),
    "cu_seqlens": torch.tensor([0, 2, 3, TOKENS]),
}
ONES = torch.ones(TOKENS)
LORA = (torch.ones(2, WIDTH), torch.ones(COLUMNS, 2), 0.5)
BY_PROMPT = {"objective": Objective(aggregation="prompt-mean")}
CORRECTED = {"objective": Objective(rollout_correction=fastrl.RolloutCorrection())}
TWO_TERMS = {"objective": Objective(entropy_coef=0.1, entropy_aggregation="seq-mean-token-mean")}


def scaled(factor, power=1):
    """An objective that holds numbers."""
    return lambda new, old, ref, a: -(new - old).exp() * a * factor**power


#: parameter -> (what every rank gives in addition, what rank 1 gives for the parameter)
CHANGES = {
    "hidden": [({}, GIVEN["hidden"].double()), ({}, GIVEN["hidden"].clone().requires_grad_())],
    "weight": [({}, GIVEN["weight"].clone().requires_grad_())],
    "logits": [({}, GIVEN["logits"].double()), ({}, GIVEN["logits"].clone().requires_grad_())],
    "token_ids": [({}, GIVEN["token_ids"].flip(0)), ({}, GIVEN["token_ids"].int())],
    "advantages": [({}, GIVEN["advantages"] * 2), ({}, GIVEN["advantages"].double())],
    "mask": [({}, 1 - GIVEN["mask"]), ({}, ONES)],
    "cu_seqlens": [
        ({}, torch.tensor([0, 1, 3, TOKENS])),
        ({}, torch.tensor([0, TOKENS])),
        # as many entries as there are tokens, the difference at the one that is masked
        (
            {"cu_seqlens": torch.tensor([0, 1, 3, 4, 5, TOKENS])},
            torch.tensor([0, 1, 2, 4, 5, TOKENS]),
        ),
    ],
    "bias": [({}, torch.zeros(COLUMNS))],
    "lora": [({}, LORA), ({"lora": LORA}, (*LORA[:2], 0.25))],
    "chunk_tokens": [({}, 2)],
    "compact": [({}, False)],
    "metrics": [({}, False)],
    "outputs": [({}, ("entropy",))],
    "temperature": [({}, 0.5), ({"temperature": ONES}, ONES * 2), ({}, torch.tensor(1.0))],
    "logit_scale": [({}, 0.5)],
    "logit_softcap": [({}, 3.0)],
    "ignore_index": [({}, -1)],
    "old_logprobs": [
        ({}, -ONES),
        ({"old_logprobs": -ONES}, -ONES.double()),
        ({"old_logprobs": -ONES}, -ONES - 1e-6),
    ],
    "ref_logprobs": [({}, -ONES), ({"ref_logprobs": -ONES}, -ONES - 1e-6)],
    "rollout_logprobs": [
        ({**CORRECTED, "rollout_logprobs": -ONES}, -ONES.double()),
        ({**CORRECTED, "rollout_logprobs": -ONES}, -ONES - 1e-6),
    ],
    "policy_weights": [({}, ONES), ({"policy_weights": ONES}, ONES * 2)],
    "objective": [
        ({}, "cispo"),
        ({}, Objective(clip_low=0.1)),
        ({"objective": scaled(1.0)}, scaled(2.0)),
        ({"objective": scaled(1.0)}, lambda new, old, ref, a: -(new - old) * a),
        ({"objective": functools.partial(max)}, functools.partial(min)),
    ],
    "normalizer": [
        ({}, 3.0),
        ({"normalizer": 2.0}, 3.0),
        ({"normalizer": torch.tensor(2.0)}, torch.tensor(3.0)),
        ({**TWO_TERMS, "normalizer": {"policy": torch.tensor(2)}}, {"policy": torch.tensor(3)}),
    ],
    "group_size": [({**BY_PROMPT, "group_size": 3}, 1)],
    "group_ids": [({**BY_PROMPT, "group_ids": torch.tensor([0, 1, 1])}, torch.tensor([0, 1, 0]))],
    "inplace": [({}, True)],
    "inplace_backward": [({}, True)],
    "reduce_hidden_gradient": [({}, False)],
    "backend": [({}, "reference")],
}

#: What is the same another way: what every rank gives in addition, by parameter what rank 1 gives.
SAME = [
    ({}, {"temperature": 1, "logit_scale": np.float32(1), "ignore_index": np.int64(-100)}),
    ({"logit_softcap": 3.0}, {"logit_softcap": 3, "mask": GIVEN["mask"] * 1}),
    ({}, {"objective": Objective.preset("grpo"), "metrics": True, "backend": "cpu"}),
    ({"normalizer": 3.0, "advantages": ONES * 0.0}, {"normalizer": 3, "advantages": ONES * -0.0}),
    (
        {**TWO_TERMS, "normalizer": {"policy": 2.0, "entropy": 3.0}},
        {"normalizer": {"entropy": 3, "policy": 2}},
    ),
    # values that count for nothing: of a sequence without a token, and of a masked token
    (
        {**BY_PROMPT, "group_ids": torch.tensor([0, 1, 1])},
        {"group_ids": torch.tensor([0, 2, 1]), "token_ids": torch.tensor([0, 1, 9, 3, 4, 5])},
    ),
]


def split_functions():
    """The public functions with `vocab_group`, and the parameters of each but that."""
    for name in fastrl.__all__:
        function = getattr(fastrl, name)
        parameters = [*inspect.signature(function).parameters] if callable(function) else []
        if "vocab_group" in parameters:
            parameters.remove("vocab_group")
            yield function, parameters


def outcome(function, parameters, changed, *, transformed=False):
    """What a call of all ranks returns or raises, or one inside a transform of torch.func."""
    given = {name: x for name, x in {**GIVEN, **changed}.items() if name in parameters}
    call = functools.partial(function, **given, vocab_group=dist.group.WORLD)
    try:
        return torch.vmap(lambda _: call())(torch.zeros(1)) if transformed else call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def disagreements_on_ranks():
    """What each call ends with if rank 1 gives something else for one parameter, or nonsense.

    Between these, calls on which the ranks agree.
    """
    changed, refused, agreed, other = {}, {}, [], dist.get_rank() == 1
    for function, parameters in split_functions():
        for name in parameters:
            for case, (both, value) in enumerate(CHANGES[name]):
                given = {**both, name: value} if other else both
                place = f"{function.__name__}, {name}, {case}"
                changed[place] = outcome(function, parameters, given)
            nonsense = {name: object()} if other else {}
            refused[f"{function.__name__}, {name}"] = outcome(function, parameters, nonsense)
        unknown = {"heat": 1.0} if other else {}
        refused[f"{function.__name__}, heat"] = outcome(function, [*parameters, *unknown], unknown)
        refused[f"{function.__name__}, vmap"] = outcome(function, parameters, {}, transformed=other)
        for both, here in ({}, {}), *SAME:
            found = outcome(function, parameters, {**both, **here} if other else both)
            agreed.append(found if isinstance(found, torch.Tensor | str) else found[0])
    return changed, refused, agreed


def other_settings_on_ranks():
    """The errors of ranks that differ in what is no argument."""
    other, texts = dist.get_rank() == 1, []
    call = functools.partial(outcome, fastrl.token_stats, [*GIVEN][2:4], {})
    with torch.set_grad_enabled(other):
        texts.append(call())
    with torch.autocast("cpu", enabled=other):
        texts.append(call())
    fastrl.set_backend("reference" if other else "auto")
    texts.append(call())
    fastrl.set_backend("auto")
    linear = (fastrl.linear_token_stats, ["hidden", "weight", "token_ids"])
    texts.append(outcome(*linear, {}) if other else call())
    return texts


def gradients_on_ranks(backend, further):
    """Which statistics have a gradient and how a backward ends: whole, and split over ranks."""
    _row_stats.DIFFERENTIABLE += further
    fields, found = fastrl.TokenStats._fields, []
    for function, parameters in split_functions():
        if "outputs" not in parameters:
            continue
        for group in (None, dist.group.WORLD):
            name = "logits" if "logits" in parameters else "hidden"
            given = {name: x for name, x in GIVEN.items() if name in parameters}
            given[name] = given[name].clone().requires_grad_()
            given["token_ids"] = given["token_ids"] % COLUMNS
            stats = function(**given, outputs=fields, vocab_group=group, backend=backend)
            try:
                sum(x.sum() for x in stats if x.requires_grad).backward()
                ending = "done"
            except (TypeError, ValueError, RuntimeError) as error:
                ending = type(error).__name__
            found.append(([x.requires_grad for x in stats], ending))
    return found
