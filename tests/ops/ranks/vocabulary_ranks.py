"""What each rank of a split vocabulary computes, beside the whole one in the same process."""

import dataclasses
import math
import operator
import random

import torch
import torch.distributed as dist

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.ops._head import kept_products
from fastrl.ops._rows import given, order
from fastrl.ops._rows.statistics import OF_ROW
from tests.ops.linear.linear_head import linear, near
from tests.ptx import backends

ROWS, WIDTH, RANK = 45, 24, 3
BOUNDS = torch.tensor([0, 10, 10, 31, ROWS])
#: sizes of the parts -> banned columns: none, all of a part, parts of two
SPLITS = {
    (32, 32): (0, 0),
    (1, 310): (0, 1),
    (104, 104, 103): (50, 150),
    (80, 1, 150, 80): (81, 231),
}
DTYPES = (torch.float32, torch.bfloat16)
#: name -> options of everything that turns logits into log-probabilities
SCALINGS = {
    "plain": {},
    "scale, softcap, temperature": {"logit_scale": 0.5, "logit_softcap": 5.0, "temperature": 0.7},
    # 1 is also an id that tokens of other parts have when they count from their part
    "temperature per row": {
        "temperature": torch.linspace(0.5, 2, ROWS),
        "logit_scale": 1.3,
        "ignore_index": 1,
    },
    "kept tokens": {"temperature": 0.7, "kept": True},
    "a teacher": {"temperature": 0.7, "teacher": "hidden"},
    "a teacher's logits": {"teacher": "logits"},
    "kept tokens, a teacher": {"temperature": 0.7, "kept": True, "teacher": "hidden"},
    "kept tokens, a teacher's logits": {"kept": True, "teacher": "logits"},
    "a teacher's tokens": {"teacher": "tokens"},
    "a teacher's tokens alone": {"teacher": "tokens alone", "temperature": 0.7},
}
#: name -> (objective, options of the linear loss)
LOSSES = {
    "clipped, KL": (Objective.preset("grpo", kl_coef=0.1), {}),
    "entropy": (Objective(entropy_coef=0.05), {"chunk_tokens": 14}),
    "rows without metrics": (Objective.preset("dapo"), {"metrics": False, "chunk_tokens": 5}),
    "all rows": (Objective.preset("grpo", kl_coef=0.1), {"compact": False, "chunk_tokens": 9}),
    "sequences": (Objective.preset("gspo", clip_low=0.2, clip_high=0.2), {"chunk_tokens": 14}),
    "centered": (Objective.preset("reinforce", score_centering=True), {"chunk_tokens": 14}),
    "centered by weights": (
        Objective.preset("grpo", score_centering=True, rollout_correction=RolloutCorrection()),
        {"chunk_tokens": 9},
    ),
    "a function": (Objective(surrogate=lambda new, old, ref, a: -(new - old).exp() * a), {}),
}


def columns(sizes):
    """The columns of this rank."""
    rank = dist.get_rank()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def part(name, x, own):
    """The part of a tensor, or of its gradient, that this rank has."""
    return x[:, own] if name == "logits" else x[own] if name in ("weight", "bias", "lora_b") else x


def leaves(tensors):
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def batch(V, dtype=torch.float32, banned=slice(0, 0)):
    """Rows whose tokens lie on every part, some masked (they hold NaN), some of advantage 0.

    ``banned`` columns have logits of -inf.
    """
    head = {
        "hidden": torch.randn(ROWS, WIDTH),
        "weight": torch.randn(V, WIDTH) / math.sqrt(WIDTH) * 3,
        "bias": torch.randn(V),
        "lora_a": torch.randn(RANK, WIDTH),
        "lora_b": torch.randn(V, RANK) * 0.1,
    }
    head["bias"][banned] = -math.inf
    allowed = [i for i in range(V) if not banned.start <= i < banned.stop]
    ids = torch.tensor(allowed)[torch.arange(ROWS) * 97 % len(allowed)]
    mask = torch.rand(ROWS) > 0.3
    head["hidden"][~mask] = math.nan
    ids[torch.arange(ROWS) % 11 == 3] = -100
    advantages = torch.randn(ROWS)
    advantages[::5] = 0.0
    tokens = {"token_ids": ids, "mask": mask, "advantages": advantages}
    return {name: x.to(dtype) for name, x in head.items()}, tokens


def kept_of(token_ids, sizes):
    """Few tokens of most rows, often of some parts alone, and often without a row's own.

    Every third row has the first and the last token of each part.
    """
    V, ends = sum(sizes), torch.tensor(sizes).cumsum(0).tolist()
    edges = {edge for end in ends for edge in (end - 1, end % V)}
    sets = [torch.randperm(V)[: torch.randint(6, ())].tolist() for _ in token_ids]
    sets[::3] = [list({*one, *edges}) for one in sets[::3]]
    return fastrl.KeptTokens.from_lists(sets)


def teacher_of(kind, V, banned):
    """A teacher, as a function of the columns that it has."""
    hidden, weight, bias = torch.randn(ROWS, 10), torch.randn(V, 10), torch.randn(V)
    bias[slice(*banned)] = -math.inf
    logits = hidden @ weight.T + bias
    values, ids = logits.log_softmax(-1).topk(min(V, 5), -1)
    lora_a, lora_b, scale = torch.randn(RANK, 10), torch.randn(V, RANK), torch.linspace(1, 2, ROWS)
    Teacher = fastrl.Teacher
    return {
        "hidden": lambda own: Teacher.from_hidden(
            hidden, weight[own], bias=bias[own], lora=(lora_a, lora_b[own], 0.1), temperature=scale
        ),
        "logits": lambda own: Teacher.from_logits(logits[:, own], beta=0.3),
        "tokens": lambda own: Teacher.from_top_k(ids, values, beta=0.0),
        "tokens alone": lambda own: Teacher.from_top_k(ids, values, beta=0.5, has_tail=False),
    }[kind]


def sampler_of(V):
    """Tokens of all parts, fewer of some rows."""
    values, ids = (2 * torch.randn(ROWS, V)).log_softmax(-1).topk(min(V, 6), -1)
    ids[::4, 1:] = -1
    return fastrl.TopKLogprobs(ids, values)


def in_small_chunks(V):
    """Give this process chunks of a few rows, of which ranks with other columns would have more."""
    given._COPY_BYTES = (16 * 2 * 4 * V,) * 2
    order._CPU_CHUNK_BYTES = order._GPU_CHUNK_BYTES = 20 * 4 * V
    kept_products._CHUNK_BYTES = (2048, 2048)


def drawn_on_ranks(world, seed, draws, backend):
    """Calls of random forms with random options, on parts of random sizes."""
    draw = random.Random(seed)
    for _ in range(draws):
        form = draw.choice((logits_on_ranks, linear_on_ranks))
        sizes = [int(draw.choice((1, 3, 40, 300)) * draw.uniform(1, 2)) for _ in range(world)]
        chosen = {"scalings": [draw.choice([*SCALINGS])], "losses": [draw.choice([*LOSSES])]}
        form(sizes, backend, draw.choice(DTYPES), (0, 0), **chosen)


def logits_on_ranks(sizes, backend, dtype, banned, scalings=tuple(SCALINGS), losses=tuple(LOSSES)):
    """Compare what comes from logits with the whole vocabulary; the results of this rank."""
    if backend in ("triton", "cuda"):
        backends.use(backend, operator.setitem, setattr)
    in_small_chunks(max(sizes))
    _, tokens = batch(sum(sizes), banned=slice(*banned))
    logits = (3 * torch.randn(ROWS, sum(sizes))).to(dtype)
    logits[~tokens["mask"]] = math.nan
    logits[:, slice(*banned)] = -math.inf

    def statistics(x, *arguments, **options):
        return fastrl.token_stats(x["logits"], *arguments, **options)

    def loss(x, *arguments, **options):
        inplace = "vocab_group" in options
        return fastrl.logits_policy_loss(x["logits"] * 1.0, *arguments, inplace=inplace, **options)

    chosen = {name: (LOSSES[name][0], {}) for name in losses}
    logits = {"logits": logits}
    return compared(logits, tokens, sizes, backend, banned, statistics, loss, scalings, chosen)


def linear_on_ranks(sizes, backend, dtype, banned, scalings=tuple(SCALINGS), losses=tuple(LOSSES)):
    """The same from hidden states."""
    in_small_chunks(max(sizes))
    head, tokens = batch(sum(sizes), dtype, banned=slice(*banned))

    def statistics(x, *arguments, **options):
        return linear(x, fastrl.linear_token_stats, *arguments, chunk_tokens=13, **options)

    def loss(x, *arguments, **options):
        return linear(x, fastrl.linear_policy_loss, *arguments, **options)

    chosen = {name: LOSSES[name] for name in losses}
    return compared(head, tokens, sizes, backend, banned, statistics, loss, scalings, chosen)


def compared(tensors, tokens, sizes, backend, banned, statistics, loss, scalings, losses):
    """Compare statistics, losses and gradients; all results that every rank has."""
    own, results = columns(sizes), []
    parts = {name: part(name, x, own) for name, x in tensors.items()}
    mask, old, upstream = tokens["mask"], torch.randn(ROWS) - 3, torch.randn(3, ROWS)

    def both(call, what):
        """The results for the whole vocabulary and for the part, whose gradients agree."""
        outcomes = []
        for given, more in ((tensors, {}), (parts, {"vocab_group": dist.group.WORLD})):
            x = leaves(given)
            result, total = call(x, **more)
            total.backward()
            outcomes.append((result, {name: leaf.grad for name, leaf in x.items()}))
        (expected, whole), (found, grads) = outcomes
        for name, grad in grads.items():
            # rounded before and after it is multiplied by the upstream factor
            exact, dtype = part(name, whole[name], own), tensors[name].dtype
            near(grad, exact, dtype, f"{what}, d {name}", roundings=2)
        results.append([grads[name] for name in ("hidden", "lora_a") if name in grads])
        return expected, found

    for scaling in scalings:
        options = {**SCALINGS[scaling], "mask": mask}
        ids = tokens["token_ids"]
        ids = torch.where(ids == -100, options.get("ignore_index", -100), ids)
        if "kept" in options:
            options["kept"] = kept_of(ids, sizes)
        teacher = None
        if "teacher" in options:
            teacher = teacher_of(options.pop("teacher"), sum(sizes), banned)

        def beside(more, teacher=teacher):
            if teacher is None:
                return {}
            return {"teacher": teacher(own if "vocab_group" in more else slice(None))}

        def asked(x, ids=ids, options=options, beside=beside, **more):
            of_teacher = beside(more)
            names = fastrl.TokenStats._fields if of_teacher else OF_ROW
            given = {**options, "outputs": names, "backend": backend}
            stats = statistics(x, ids, **given, **of_teacher, **more)
            total = sum(w @ y for w, y in zip(upstream, stats[:3], strict=True))
            return stats, total + (upstream[0] @ stats.divergence if of_teacher else 0)

        expected, found = both(asked, scaling)
        for name, x in found._asdict().items():
            if x is None:
                continue
            atol = 2e-6 if name == "entropy" else 1e-6  # the rounding of what cancels there
            torch.testing.assert_close(x, getattr(expected, name), rtol=1e-6, atol=atol)
        results[-1] += [x.detach() for x in found if x is not None]

        for name, (objective, how) in losses.items():
            if teacher is not None:
                objective = dataclasses.replace(objective, teacher_coef=0.5)
            function = name == "a function" and backend != "reference"
            given = {**options, **how, "old_logprobs": old, "cu_seqlens": BOUNDS}
            given |= {"objective": objective, "backend": "auto" if function else backend}
            if objective.kl_coef:
                given["ref_logprobs"] = old + 0.1
            if objective.score_centering:
                given["rollout_top_k"], sampled = sampler_of(sum(sizes)), given.pop("old_logprobs")
                if objective.rollout_correction:
                    given["rollout_logprobs"] = sampled

            def lost(x, ids=ids, given=given, beside=beside, **more):
                result = loss(x, ids, tokens["advantages"], **given, **beside(more), **more)
                return result, result.loss * 1.5

            expected, found = both(lost, f"{scaling}, {name}")
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
            if expected.metrics:
                vectors = found.metrics.vector, expected.metrics.vector
                torch.testing.assert_close(*vectors, rtol=1e-5, atol=1e-5)
            results[-1] += [found.loss.detach(), found.logprobs]
    return results
