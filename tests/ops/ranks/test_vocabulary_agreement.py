"""The ranks of a split vocabulary agree on every argument, or all of them raise."""

import functools
import inspect
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastrl
from fastrl import Objective
from fastrl.ops._rows.projected import ProjectedRows
from fastrl.ops._vocabulary_parts.descriptions import description_of
from tests.ops.ranks.gloo_ranks import on_ranks

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
    """A function as an objective, which holds numbers."""
    return lambda new, old, ref, a: -(new - old).exp() * a * factor**power


def kept_first(token):
    """Two tokens that the first row has kept."""
    offsets = torch.full((TOKENS + 1,), 2)
    offsets[0] = 0
    return fastrl.KeptTokens(torch.tensor([0, token]), offsets)


def teacher_of(beta):
    """Logits beside the student's."""
    return fastrl.Teacher.from_logits(-GIVEN["logits"], beta=beta)


TEACHER = teacher_of(1.0)
FROM_HIDDEN = fastrl.Teacher.from_hidden(
    torch.ones(TOKENS, 3),
    torch.ones(COLUMNS, 3),
    bias=torch.ones(COLUMNS),
    lora=(torch.ones(2, 3), torch.ones(COLUMNS, 2), 0.5),
)
TOP_K = fastrl.Teacher.from_top_k(GIVEN["token_ids"][:, None] % 4, -ONES[:, None])
CENTERED = Objective.preset("reinforce", score_centering=True)
SAMPLER = fastrl.TopKLogprobs(TOP_K.token_ids, TOP_K.logprobs)
#: fields of a teacher -> what rank 1 has there
OF_TEACHER = [
    (FROM_HIDDEN, {"hidden": FROM_HIDDEN.hidden.double()}),
    (FROM_HIDDEN, {"weight": FROM_HIDDEN.weight.double()}),
    (FROM_HIDDEN, {"bias": None}),
    (FROM_HIDDEN, {"lora": None}),
    (FROM_HIDDEN, {"lora": (torch.ones(1, 3), torch.ones(COLUMNS, 1), 0.5)}),
    (FROM_HIDDEN, {"lora": (*FROM_HIDDEN.lora[:2], 0.25)}),
    (FROM_HIDDEN, {"temperature": ONES}),
    (FROM_HIDDEN, {"logit_scale": 0.5}),
    (FROM_HIDDEN, {"logit_softcap": 3.0}),
    (TOP_K, {"token_ids": TOP_K.token_ids + 1}),
    (TOP_K, {"logprobs": TOP_K.logprobs * 2}),
    (TOP_K, {"has_tail": False}),
    (TOP_K, {"beta": 0.5}),
]
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
    "ref_logprobs": [
        ({"objective": Objective(kl_coef=0.0)}, -ONES),
        ({"objective": Objective(kl_coef=0.0), "ref_logprobs": -ONES}, -ONES - 1e-6),
    ],
    "rollout_logprobs": [
        ({**CORRECTED, "rollout_logprobs": -ONES}, -ONES.double()),
        ({**CORRECTED, "rollout_logprobs": -ONES}, -ONES - 1e-6),
    ],
    "rollout_top_k": [
        ({"objective": CENTERED, "rollout_top_k": SAMPLER}, SAMPLER._replace(token_ids=other))
        for other in (SAMPLER.token_ids + 1, SAMPLER.token_ids.int())
    ]
    + [
        ({"objective": CENTERED, "rollout_top_k": SAMPLER}, SAMPLER._replace(logprobs=other))
        for other in (SAMPLER.logprobs * 2, SAMPLER.logprobs.double())
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
    "kept": [
        ({}, kept_first(1)),
        ({"kept": kept_first(1)}, kept_first(2)),
        ({"kept": kept_first(1)}, fastrl.KeptTokens(*(x.int() for x in kept_first(1)))),
    ],
    "teacher": [
        ({}, teacher_of(0.5)),
        ({"teacher": TEACHER}, teacher_of(0.5)),
        ({"teacher": TEACHER}, teacher_of(1.0)._replace(temperature=0.5)),
        (
            {"teacher": TEACHER},
            fastrl.Teacher.from_top_k(torch.zeros(TOKENS, 1).long(), -ONES[:, None]),
        ),
        *(({"teacher": teacher}, teacher._replace(**other)) for teacher, other in OF_TEACHER),
    ],
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
    functions = filter(inspect.isfunction, (getattr(fastrl, name) for name in fastrl.__all__))
    for function in functions:
        parameters = [*inspect.signature(function).parameters]
        if "vocab_group" in parameters:
            parameters.remove("vocab_group")
            yield function, parameters


def outcome(function, parameters, changed, *, transformed=False):
    """What a call of all ranks returns or raises, or one inside a transform of torch.func."""
    needed = {"teacher": TEACHER} if function.__name__.endswith("divergence") else {}
    every = {**GIVEN, **needed, **changed}
    given = {name: x for name, x in every.items() if name in parameters}
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


def test_ranks_that_disagree_about_an_argument_all_raise(compiled):
    changed, refused, results = zip(*on_ranks(2, disagreements_on_ranks), strict=True)
    differ = " must be the same on every rank of vocab_group"
    for ranks in changed:
        for place, ending in ranks.items():
            assert isinstance(ending, str), place
            names, same, _ = ending.partition(differ)
            assert same, (place, ending)
            assert place.split(", ")[1] in names, (place, ending)
        values = ranks["token_logprobs, token_ids, 0"]
        assert f"{differ}, which splits the vocabulary and not" in values
    for place, ending in refused[0].items():
        assert ending == "ValueError: vocab_group: this call raised on its ranks [1]; see there"
        assert refused[1][place].startswith(("TypeError", "ValueError")), place
        assert "its ranks [1]" not in refused[1][place]
    assert len(results[0]) == len(results[1]) == 8 * (1 + len(SAME))
    assert all(map(torch.equal, *results))


def other_settings_on_ranks():
    """The errors of ranks that differ in what is no argument."""
    other, texts = dist.get_rank() == 1, []
    call = functools.partial(outcome, fastrl.token_stats, ["logits", "token_ids"], {})
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


def test_ranks_that_disagree_about_a_setting_all_raise(compiled):
    names = ("torch.is_grad_enabled()", "autocast", "backend", "the function")
    for texts in on_ranks(2, other_settings_on_ranks):
        for text, name in zip(texts, names, strict=True):
            assert text.startswith(f"ValueError: {name} must be the same on every rank")


def refusals_on_ranks():
    """The errors of calls that are wrong on every rank, or on one that has nothing to compare."""
    rank, ids = dist.get_rank(), torch.arange(4)
    hidden, weight, logits = torch.randn(4, 8), torch.randn(5, 8) + rank, torch.randn(4, 5) + rank
    rows = torch.randn(5, 5) + rank
    others = fastrl.Teacher.from_logits(rows[1:] if rank else rows[1:].clone())
    names = ["hidden", "weight", "token_ids", "bias"]
    from_hidden = functools.partial(outcome, fastrl.linear_token_logprobs, names)
    from_logits = functools.partial(outcome, fastrl.token_logprobs, ["logits", "token_ids"])
    head = {"hidden": hidden, "weight": weight, "token_ids": ids}
    return [
        from_hidden({**head, "weight": torch.randn(5 * rank, 8)}),
        from_logits({"logits": logits[:, : 5 * rank], "token_ids": ids}),
        from_hidden({**head, "token_ids": ids + 7}),
        from_logits({"logits": logits, "token_ids": ids + 7}),
        from_hidden({**head, "bias": torch.zeros(6)}),
        from_hidden({**head, "hidden": hidden.to("meta") if rank else hidden}),
        outcome(
            fastrl.token_stats,
            ["logits", "token_ids", "teacher", "inplace_backward"],
            {"logits": rows[:4], "token_ids": ids, "teacher": others, "inplace_backward": True},
        ),
    ]


def test_what_is_refused_is_refused_on_every_rank():
    columns = "every rank needs at least one column of the vocabulary"
    empty = f"ValueError: vocab_group: {columns}, got [0, 5]"
    outside = "ValueError: token_ids must lie in [0, 10) or be ignore_index, got 10 at (0, 3)"
    for *found, bias, device, overlap in on_ranks(2, refusals_on_ranks):
        assert overlap.startswith(
            ("ValueError: teacher.logits must not share", "ValueError: vocab_g")
        )
        assert found == [empty, empty, outside, outside]
        assert bias.startswith("ValueError: bias must have shape (5,)")
        assert isinstance(device, str)


def other_rows_on_ranks():
    """Calls that ranks may make although they differ: in masked rows and sequences, in rounding."""
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, ids = torch.randn(4, 8), torch.randn(5, 8) + rank, torch.arange(4)
    mask = torch.tensor([1, 1, 1, 0])
    other = torch.tensor([0, 1, 2, 3 * rank])
    fastrl.linear_token_logprobs(hidden, weight, other, mask=mask, vocab_group=group)
    fastrl.linear_policy_loss(
        hidden, weight, ids, torch.tensor([1.0, 0.5, 2.0, 3.0 * rank]), mask,
        objective=Objective(surrogate=scaled(1.0)), cu_seqlens=torch.tensor([0, 4]),
        vocab_group=group,
    )  # fmt: skip
    per_sequence = torch.tensor([1.0, float("nan")] if rank else [1.0, 2.0])
    fastrl.logits_policy_loss(
        torch.randn(2, 3, 5) + rank, ids[1:].expand(2, 3), per_sequence,
        torch.tensor([[1, 1, 0], [0, 0, 0]]), temperature=per_sequence[:, None] + 1,
        old_logprobs=-torch.ones(2, 3), policy_weights=per_sequence, vocab_group=group,
    )  # fmt: skip
    fastrl.logits_policy_loss(
        torch.randn(3, 5) + rank, ids[1:], per_sequence, torch.tensor([1, 1, 0]),
        cu_seqlens=torch.tensor([0, 2, 3]), vocab_group=group,
    )  # fmt: skip


def test_ranks_may_differ_in_what_counts_for_nothing():
    on_ranks(2, other_rows_on_ranks)


def dying_on_ranks():
    """The error of a rank whose partner dies between two chunks."""
    if dist.get_rank() == 1:
        project, left = ProjectedRows._chunk, iter(range(3))

        def die(*arguments):
            return project(*arguments) if next(left, None) is not None else os._exit(3)

        ProjectedRows._chunk = die
    given = {"chunk_tokens": 4, "vocab_group": dist.group.WORLD}
    weight = torch.randn(15, 8) + dist.get_rank()
    fastrl.linear_token_logprobs(torch.randn(20, 8), weight, torch.arange(20), **given)


def test_a_rank_that_dies_ends_the_others():
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError.*rank 1: died"):
        on_ranks(2, dying_on_ranks)


def test_functions_are_told_apart_by_what_they_do():
    alike = [scaled(2.0), scaled(2.0)]
    others = [
        scaled(3.0),
        scaled(2.0, 2),
        scaled(torch.ones(2)),
        lambda new, old, ref, a: -(new - old).exp() * a,
        lambda new, old, ref, a: -(new - old).log() * a,
        lambda new, old, ref, a: -(new - old).exp() * a * 3,
        lambda new, old, ref, a, by=3: -(new - old).exp() * a,
        functools.partial(scaled, 2.0),
        functools.partial(scaled, 3.0),
        torch.exp,
        torch.nn.Softplus(1.0),
        torch.nn.Softplus(2.0),
        torch.nn.Linear(1, 1),
    ]
    one, two, *texts = map(description_of, alike + others)
    assert one == two
    assert len({one, *texts}) == 1 + len(others)
    assert not any("0x" in text for text in (one, *texts))
