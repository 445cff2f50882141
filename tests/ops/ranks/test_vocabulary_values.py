"""Ranks of a split vocabulary notice a value that differs, and columns that do not."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import fastrl
from fastrl import Objective, Teacher
from tests.ops.ranks.gloo_ranks import on_ranks
from tests.ops.ranks.vocabulary_ranks import columns

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")

N, V, SIZES = 6, 20, (13, 7)
#: As many sequences and kept tokens as there are tokens, so that shapes tell nothing.
BOUNDS = torch.tensor([0, 2, 2, 3, 5, 6, 6])
KEPT = fastrl.KeptTokens(torch.tensor([1, 3, 14, 5, 7, 2]), torch.tensor([0, 2, 3, 4, 4, 6, 6]))
SAME = {"token_ids": torch.tensor([1, 3, 5, 0, 7, 2]), "mask": torch.tensor([1.0, 1, 1, 0, 1, 1])}
LOSS = {
    **SAME,
    "advantages": torch.linspace(-1, 2, N),
    "old_logprobs": torch.linspace(-3, -2, N),
    "ref_logprobs": torch.linspace(-2, -3, N),
    "policy_weights": torch.linspace(0.5, 1, N),
    "temperature": torch.linspace(0.7, 1.3, N),
    "cu_seqlens": BOUNDS,
    "group_ids": torch.arange(N),
}
BY_PROMPT = Objective(aggregation="prompt-mean", kl_coef=0.1, teacher_coef=0.5)
WITHOUT = Objective(aggregation="prompt-mean", kl_coef=0.1)
COUNTED = {**LOSS, "objective": Objective(kl_coef=0.0), "normalizer": torch.tensor(3.0)}
del COUNTED["group_ids"]


def top_k(shape):
    """A teacher's tokens, two of each row."""
    ids = torch.arange(2 * N).reshape(*shape, 2) + 1
    return Teacher.from_top_k(ids, torch.linspace(-2, -1, 2 * N).reshape(*shape, 2), beta=0.5)


def calls(own):
    """The values that a call depends on, and the call of them with this rank's columns."""
    generator = torch.Generator().manual_seed(0)
    logits, other, hidden = (torch.randn(N, n, generator=generator) for n in (V, V, 8))
    weight = torch.randn(V, 8, generator=generator)
    scaled = Teacher.from_logits(other[:, own], temperature=torch.linspace(0.5, 1.5, N))
    from_logits = functools.partial(fastrl.logits_policy_loss, logits[:, own])
    from_hidden = functools.partial(fastrl.linear_policy_loss, hidden, weight[own])
    yield {**LOSS, "objective": WITHOUT, "kept": KEPT}, from_logits
    yield {**COUNTED, "kept": KEPT}, from_hidden
    for teacher in (top_k((N,)), top_k((1, N)), scaled):
        yield {**LOSS, "objective": BY_PROMPT, "teacher": teacher}, from_logits
    stats = functools.partial(fastrl.token_stats, logits[:, own])
    yield {**SAME, "outputs": ("divergence", "agrees"), "teacher": top_k((N,))}, stats


def changed(given):
    """The call with one number of one tensor changed, for each that may be."""
    leaves = []
    tree_map_only(torch.Tensor, leaves.append, given)
    for leaf in leaves:
        if len(leaf.shape) == 2 and leaf.shape[0] == N and leaf.shape[1] > 2:
            continue  # a teacher's own columns
        for place in range(leaf.numel()):
            other = leaf.clone()
            other.view(-1)[place] += 0.25 if leaf.is_floating_point() else 1
            if leaf is given["mask"]:
                other.view(-1)[place] = 1 - leaf[place]

            def exchanged(x, leaf=leaf, other=other):
                return other if x is leaf else x

            yield tree_map_only(torch.Tensor, exchanged, given)


def outcome(call, given):
    """What a call returns, or the text of its error."""
    try:
        return [x for x in call(**given)[:4] if isinstance(x, torch.Tensor)]
    except ValueError as error:
        return str(error)


def values_on_ranks():
    """What happens if rank 1 alone changes a value on which the result of one process depends."""
    together, endings = {"vocab_group": dist.group.WORLD}, []
    for (whole, alone), (given, part) in zip(
        calls(slice(None)), calls(columns(SIZES)), strict=True
    ):
        expected = outcome(alone, whole)
        for one, two in zip(outcome(part, {**given, **together}), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
        for of_one, other in zip(changed(whole), changed(given), strict=True):
            result = outcome(alone, of_one)
            if isinstance(result, str) or all(map(torch.equal, result, expected)):
                continue
            mine = other if dist.get_rank() == 1 else given
            endings.append(outcome(part, {**mine, **together}))
    return endings


def test_every_value_that_a_result_depends_on_is_compared():
    ranks = on_ranks(2, values_on_ranks)
    for endings in ranks:
        assert len(endings) > 200
        for ending in endings:
            assert isinstance(ending, str)
            assert "must be the same on every rank of vocab_group" in ending


def copies_on_ranks():
    """The errors of calls in which every rank has all columns of something."""
    generator, own, group = torch.Generator().manual_seed(0), columns(SIZES), dist.group.WORLD
    logits, other, hidden = (torch.randn(N, n, generator=generator) for n in (V, V, 8))
    weight, ids, mask = torch.randn(V, 8, generator=generator), torch.arange(N), torch.ones(N)
    half = logits[:, : V // 2] + dist.get_rank()
    from_logits, from_head = Teacher.from_logits, Teacher.from_hidden
    apart = logits.clone()
    apart[0] += dist.get_rank()
    given = {"vocab_group": group}
    loss = {"advantages": torch.ones(N), "mask": mask, "objective": "dapo", **given}
    of_teacher = {**given, "outputs": ("divergence",)}
    texts = [
        outcome(fastrl.token_stats, {"logits": x, "token_ids": ids, **more, **given})
        for x, more in (
            (logits, {}),
            (logits.bfloat16(), {}),
            (logits[None], {"token_ids": ids[None]}),
            (apart, {"mask": ids > 0}),
            (half, {"teacher": from_logits(other[:, : V // 2]), **of_teacher}),
            (half, {"teacher": from_head(hidden, weight[: V // 2]), **of_teacher}),
        )
    ]
    texts.append(outcome(fastrl.logits_policy_loss, {"logits": logits, "token_ids": ids, **loss}))
    head = {"hidden": hidden, "weight": weight, "token_ids": ids}
    texts.append(outcome(fastrl.linear_policy_loss, {**head, **loss}))
    texts.append(outcome(fastrl.linear_token_stats, {**head, **given}))
    accepted = [
        torch.zeros(N, V),
        torch.full((N, V), float("nan")),
        torch.full((N, V), -float("inf")),
        torch.eye(N, V) * 5,
        logits[:, :1],
        torch.where(ids[:, None] > 0, apart + dist.get_rank(), logits)[:, :5],
        logits[:0],
        logits[:, own],
        apart,
    ]
    for x in accepted:
        found = outcome(fastrl.token_stats, {"logits": x, "token_ids": 0 * ids[: len(x)], **given})
        assert not isinstance(found, str), found
    nothing = {"logits": logits, "token_ids": ids, "mask": 0 * mask, **given}
    assert not isinstance(outcome(fastrl.token_stats, nothing), str)
    flat = {**head, "weight": torch.ones(V, 8), **given}
    assert not isinstance(outcome(fastrl.linear_token_stats, flat), str)
    return texts


def test_ranks_that_all_have_the_whole_vocabulary_raise():
    names = ["logits"] * 4 + ["teacher.logits", "teacher.weight", "logits", "weight", "weight"]
    for texts in on_ranks(2, copies_on_ranks):
        for text, name in zip(texts, names, strict=True):
            assert isinstance(text, str), name
            assert text.startswith(
                f"{name} must be this rank's part of the vocabulary, got the same"
            )
            assert "leave vocab_group out" in text


def replicas_on_ranks():
    """Two replicas of two ranks each, in one group."""
    part = torch.randn(N, V).chunk(2, -1)[dist.get_rank() % 2]
    given = {"logits": part, "token_ids": torch.arange(N), "vocab_group": dist.group.WORLD}
    return outcome(fastrl.token_stats, given)


def test_ranks_of_two_replicas_raise():
    for text in on_ranks(4, replicas_on_ranks):
        assert "got the same values on several ranks of vocab_group" in text


def centered_on_ranks():
    """The gradient of a centered loss in two passes that one rank multiplies by 0."""
    ids, mask, rank = torch.arange(6), torch.ones(6), dist.get_rank()
    hidden, weight, advantages = torch.randn(6, 8), torch.randn(13, 8), torch.randn(6)
    top = fastrl.TopKLogprobs(torch.tensor([[0, 7]] * 6), -torch.rand(6, 2) - 1)
    correction = fastrl.RolloutCorrection(low=0.7, high=1.4)
    ppo = {"score_centering": True, "rollout_correction": correction}
    more = {"objective": fastrl.Objective.preset("ppo", **ppo), "rollout_top_k": top}
    more["rollout_logprobs"] = -torch.rand(6) - 1
    own, grads = columns((5, 8)), []
    for part, split in ((weight, {}), (weight[own], {"vocab_group": dist.group.WORLD})):
        leaf = part.clone().requires_grad_()
        result = fastrl.linear_policy_loss(hidden, leaf, ids, advantages, mask, **more, **split)
        (result.loss * rank).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0][own], rtol=1e-5, atol=1e-6)


def test_the_ranks_exchange_the_tokens_of_a_sampler_whichever_rows_each_loss_has():
    on_ranks(2, centered_on_ranks)
