"""Cases of the table on ranks that split the vocabulary, and a batch for single tests of them."""

import functools
import itertools
import math
import operator

import torch
import torch.distributed as dist

import fastrl
from fastrl import Objective
from fastrl.ops._head import kept_products
from fastrl.ops._rows import given, order
from tests.calls.case import parse
from tests.calls.examine import examine
from tests.calls.trial import Trial
from tests.ops.linear.linear_head import near
from tests.ptx import backends

ROWS, WIDTH, RANK = 45, 24, 3
BOUNDS = torch.tensor([0, 10, 10, 31, ROWS])
#: What has columns of the vocabulary, of a head and of a call with logits.
SPLIT = ("logits", "weight", "bias", "lora_b")
#: In one pass over the rows, and in two.
OF_TEACHERS = [
    Objective(teacher_coef=0.5),
    Objective.preset("gspo", teacher_coef=0.5),
    Objective.preset("reinforce", score_centering=True, teacher_coef=0.5),
]


def columns(sizes):
    """The columns of this rank."""
    rank = dist.get_rank()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def leaves(tensors):
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def batch(V, dtype=torch.float32):
    """Rows whose tokens lie on every part, some masked (they hold NaN), some of advantage 0."""
    head = {
        "hidden": torch.randn(ROWS, WIDTH),
        "weight": torch.randn(V, WIDTH) / math.sqrt(WIDTH) * 3,
        "bias": torch.randn(V),
        "lora_a": torch.randn(RANK, WIDTH),
        "lora_b": torch.randn(V, RANK) * 0.1,
    }
    ids, mask, advantages = torch.arange(ROWS) * 97 % V, torch.rand(ROWS) > 0.3, torch.randn(ROWS)
    head["hidden"][~mask] = math.nan
    ids[torch.arange(ROWS) % 11 == 3] = -100
    advantages[::5] = 0.0
    tokens = {"token_ids": ids, "mask": mask, "advantages": advantages}
    return {name: x.to(dtype) for name, x in head.items()}, tokens


def part(name, x, own):
    """The part of a tensor, or of its gradient, that a rank has."""
    return x[..., own] if name == "logits" else x[own] if name in SPLIT else x


def of_head(own, bias=None, lora=None, **options):
    """The part of what a head or a teacher has beside its weight; what is None is left out."""
    if bias is not None:
        options["bias"] = bias[own]
    if lora is not None:
        options["lora"] = (lora[0], lora[1][own], lora[2])
    return options


def of_teacher(teacher, own):
    """The part of a teacher; one that is known by tokens has none."""
    if teacher.logits is not None:
        return teacher._replace(logits=teacher.logits[..., own])
    if teacher.weight is not None:
        parts = of_head(own, bias=teacher.bias, lora=teacher.lora)
        return teacher._replace(weight=teacher.weight[own], **parts)
    return teacher


class SplitTrial(Trial):
    """A call on the columns of this rank; the gradients of all ranks are put together.

    `seen` gets what every rank has: results, and gradients of what is not split.
    """

    def __init__(self, sizes, seen, *arguments):
        super().__init__(*arguments)
        self.sizes, self.seen = sizes, seen

    def invoke(self, function, arguments):
        own = columns(self.sizes)
        split = {name: part(name, x, own) for name, x in arguments.items() if name in SPLIT}
        if "teacher" in arguments:
            split["teacher"] = of_teacher(arguments["teacher"], own)
        if "lora" in arguments:
            a, b, scale = arguments["lora"]
            split["lora"] = a, b[own], scale
        return super().invoke(function, {**arguments, **split, "vocab_group": dist.group.WORLD})

    def differentiate(self, leaves, outputs, upstream):
        done = super().differentiate(leaves, outputs, upstream)
        for name in leaves.keys() & {*SPLIT} if done else ():
            wide = leaves[name].grad.double()  # zeros beside the part: the sum is exact
            dist.all_reduce(wide)
            leaves[name].grad = wide.to(leaves[name].dtype)
        self.seen += [x.grad for name, x in leaves.items() if done and name not in SPLIT]
        return done

    def expect(self, got, want):
        self.seen += [x.detach() for x in got.values() if x is not None]
        super().expect(got, want)


def in_small_chunks(V):
    """Give this process chunks of a few rows, of which ranks with other columns would have more."""
    given._COPY_BYTES = (2 * 2 * 4 * V,) * 2
    order._CPU_CHUNK_BYTES = order._GPU_CHUNK_BYTES = 20 * 4 * V
    kept_products._CHUNK_BYTES = (2048, 2048)


def cases_on_ranks(backend, cases):
    """Compare cases, each of sizes of parts and a line, with the oracle; what every rank has."""
    if backend in ("triton", "cuda"):
        backends.use(backend, operator.setitem, setattr)
    seen = []
    for sizes, line in cases:
        in_small_chunks(max(sizes))
        case = parse(line).changed(vocabulary=sum(sizes))
        found = examine(case, backend, "cpu", functools.partial(SplitTrial, sizes, seen))
        assert not found.refused, case
        assert not found.differences, f"{case}: {'; '.join(map(str, found.differences))}"
    return seen


def teachers_on_ranks(backend, sizes):
    """Losses beside every kind of teacher, on parts as on the whole vocabulary."""
    V, own, group = sum(sizes), columns(sizes), dist.group.WORLD
    in_small_chunks(max(sizes))
    head, tokens = batch(V)
    hidden, weight, bias = torch.randn(ROWS, 10), torch.randn(V, 10), torch.randn(V)
    bias[: sizes[0]] = -math.inf  # it excludes all of a part
    lora = torch.randn(RANK, 10), torch.randn(V, RANK), 0.1
    logits = hidden @ weight.T + bias
    values, ids = logits.log_softmax(-1).topk(min(V, 5), -1)
    kept = fastrl.KeptTokens.from_lists([torch.randperm(V)[: n % 4].tolist() for n in range(ROWS)])
    Teacher, results = fastrl.Teacher, []
    for teacher, sets in (
        (Teacher.from_hidden(hidden, weight, bias=bias, lora=lora, beta=0.0), None),
        (Teacher.from_hidden(hidden, weight, lora=lora), kept),
        (Teacher.from_logits(logits, beta=0.3), None),
        (Teacher.from_logits(logits, beta=0.3), kept),
        (Teacher.from_top_k(ids, values, beta=0.0), None),
        (Teacher.from_top_k(ids, values, beta=0.5, has_tail=False), None),
    ):
        for form, objective in itertools.product(("logits", "linear"), OF_TEACHERS):
            given = {
                **tokens,
                "cu_seqlens": BOUNDS,
                "objective": objective,
                "kept": sets,
                "backend": backend,
            }
            if objective.score_centering:
                given["rollout_top_k"] = fastrl.TopKLogprobs(ids.flip(0), values.flip(0))
            function, outcomes = getattr(fastrl, f"{form}_policy_loss"), []
            tensors = {name: head[name] for name in ("hidden", "weight")}
            if form == "logits":
                tensors = {"logits": head["hidden"] @ head["weight"].T}
            for columns_of, more in ((slice(None), {}), (own, {"vocab_group": group})):
                x = leaves({name: part(name, y, columns_of) for name, y in tensors.items()})
                more |= {"chunk_tokens": 14} if form == "linear" else {}
                more["teacher"] = of_teacher(teacher, columns_of)
                result = function(*x.values(), **given, **more)
                result.loss.backward()
                outcomes.append((result, x))
            (whole, wanted), (split, found) = outcomes
            torch.testing.assert_close(split.loss, whole.loss, rtol=1e-5, atol=1e-6)
            vectors = split.metrics.vector, whole.metrics.vector
            torch.testing.assert_close(*vectors, rtol=1e-5, atol=1e-5)
            for name, leaf in found.items():
                near(leaf.grad, part(name, wanted[name].grad, own), torch.float32, name, 2)
            results += [split.loss.detach(), split.logprobs]
    return results
