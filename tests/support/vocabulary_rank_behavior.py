"""How calls with a split vocabulary behave on each rank: collectives, DTensors, errors, deaths."""

import os
from collections import Counter

import torch
import torch.distributed as dist

import fastrl
from fastrl import Objective
from fastrl.ops._linear import walk
from tests.ops.vocabulary_ranks import ROWS, batch, columns, leaves, near


class Collectives:
    """Counts the collectives of a block."""

    def __enter__(self):
        self.count, self._plain = Counter(), {}
        for name in ("all_gather", "all_reduce"):
            self._plain[name] = plain = getattr(dist, name)

            def counted(*arguments, _name=name, _plain=plain, **options):
                self.count[_name] += 1
                return _plain(*arguments, **options)

            setattr(dist, name, counted)
        return self

    def __exit__(self, *_):
        for name, plain in self._plain.items():
            setattr(dist, name, plain)


def collectives_on_ranks(sizes, backend):
    """The collectives of each call, without and with those of its backward."""
    own, counts = columns(sizes), {}
    head, tokens = batch(sum(sizes))
    ids, mask, group = tokens["token_ids"], tokens["mask"], dist.group.WORLD
    tokens = {"token_ids": ids, "mask": mask, "chunk_tokens": 10, "compact": False}
    tokens |= {"bias": head["bias"][own], "backend": backend}

    def count(name, call):
        x = leaves({"hidden": head["hidden"], "weight": head["weight"][own]})
        with Collectives() as collectives:
            result = call(x)
            forward = dict(collectives.count)
            result.backward()
        counts[name] = forward, dict(collectives.count), x["hidden"].grad

    def loss(x, **more):
        return fastrl.linear_policy_loss(
            **x, advantages=torch.ones(ROWS), **tokens, vocab_group=group, objective="dapo", **more
        ).loss

    def logprobs(x, **more):
        return fastrl.linear_token_logprobs(**x, **tokens, vocab_group=group, **more).sum()

    def from_logits(x):
        logits = torch.where(mask[:, None], x["hidden"], 0.0) @ x["weight"].t()
        return fastrl.logits_policy_loss(
            logits, ids, torch.ones(ROWS), mask, vocab_group=group, objective="dapo",
            backend=backend,
        ).loss  # fmt: skip

    order = events(lambda: loss({"hidden": head["hidden"], "weight": head["weight"][own]}))
    count("loss", loss)
    count("loss, partial", lambda x: loss(x, reduce_hidden_gradient=False))
    count("logprobs", logprobs)
    count("logprobs, partial", lambda x: logprobs(x, reduce_hidden_gradient=False))
    count("logits", from_logits)
    total = counts["loss, partial"][2].clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, counts["loss"][2])
    return {name: found[:2] for name, found in counts.items()}, order


def events(call):
    """What a call does in turn: projections of chunks (P), sending (S), waiting for others (W)."""
    happened = []

    def noted(owner, name, letter):
        plain = getattr(owner, name)

        def run(*arguments, **options):
            happened.append(letter)
            return plain(*arguments, **options)

        setattr(owner, name, run)
        return lambda: setattr(owner, name, plain)

    undo = [
        noted(walk.LinearWalk, "project", "P"),
        noted(walk.Exchange, "__init__", "S"),
        noted(walk.Exchange, "result", "W"),
    ]
    call()
    for each in undo:
        each()
    return "".join(happened)


def tensor_parallel_on_ranks(backend):
    """Weights and logits that are DTensors over a mesh dimension `tp`, beside data parallelism."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel, V = mesh["tp"], 37
    head, tokens = batch(V)
    rows = slice(0, 20) if mesh.get_local_rank("dp") == 0 else slice(20, ROWS)
    ids, mask = tokens["token_ids"][rows], tokens["mask"][rows]
    hidden = head.pop("hidden")[rows]

    def call(x, states, **more):
        lora = (x["lora_a"], x["lora_b"], 0.5)
        return fastrl.linear_policy_loss(
            states, x["weight"], ids, tokens["advantages"][rows], mask, bias=x["bias"], lora=lora,
            objective="dapo", backend=backend, **more,
        )  # fmt: skip

    whole, states = leaves(head), leaves({"whole": hidden, "part": hidden, "plain": hidden})
    places = {name: Replicate() if name == "lora_a" else Shard(0) for name in head}
    parts = {
        name: distribute_tensor(x.detach(), tensor_parallel, [places[name]]).requires_grad_()
        for name, x in head.items()
    }
    plain = {name: x.to_local().detach().requires_grad_() for name, x in parts.items()}
    expected = call(whole, states["whole"])
    found = call(parts, states["part"])
    other = call(plain, states["plain"], vocab_group=tensor_parallel.get_group())
    for result in (found, other):
        torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=1e-6, atol=1e-5)
    for result in (expected, found, other):
        result.loss.backward()
    for name, x in parts.items():
        assert x.grad.placements == x.placements
        near(x.grad.full_tensor(), whole[name].grad, torch.float32, name)
        assert torch.equal(x.grad.to_local(), plain[name].grad)
    near(states["part"].grad, states["whole"].grad, torch.float32, "hidden")

    logits = torch.where(mask[:, None], hidden, 0.0) @ head["weight"].t()
    split = distribute_tensor(logits, tensor_parallel, [Shard(1)]).requires_grad_()
    logits.requires_grad_()
    for x in (logits, split):
        fastrl.token_logprobs(x, ids, mask=mask, backend=backend).sum().backward()
    assert isinstance(split.grad, DTensor)
    near(split.grad.full_tensor(), logits.grad, torch.float32, "logits")

    texts = []
    for more in ({"inplace_backward": True}, {"mesh": "unnamed"}):
        given = split
        if more.pop("mesh", None):
            unnamed = DeviceMesh.from_group(tensor_parallel.get_group(), "cpu")
            given = distribute_tensor(logits.detach(), unnamed, [Shard(1)])
        try:
            fastrl.token_logprobs(given, ids, mask=mask, backend=backend, **more)
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")

    other_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wrong = distribute_tensor(head["weight"], other_mesh, [Shard(0)])
    try:
        fastrl.linear_token_logprobs(hidden, wrong, ids, vocab_group=tensor_parallel.get_group())
    except ValueError as error:
        texts.append(f"{type(error).__name__}: {error}")
    return texts


def refusals_on_ranks():
    """The errors of calls that ranks must not make, each the same on all of them."""
    rank, group, texts = dist.get_rank(), dist.group.WORLD, {}
    hidden, ids = torch.randn(4, 8), torch.arange(4)

    def refused(name, call):
        try:
            call()
        except (TypeError, ValueError) as error:
            texts[name] = f"{type(error).__name__}: {error}"

    def logprobs(size=5, ids=ids, **more):
        weight = torch.randn(size, 8)
        return fastrl.linear_token_logprobs(hidden, weight, ids, vocab_group=group, **more)

    refused("other ids", lambda: logprobs(ids=ids + rank))
    refused("other masks", lambda: logprobs(mask=torch.arange(4) != rank))
    swapped = torch.tensor([0, 2, 2, 0] if rank else [2, 0, 0, 2])
    refused("ids in another order", lambda: logprobs(ids=swapped))
    refused("other temperatures", lambda: logprobs(temperature=torch.ones(4) + rank))
    refused("another softcap", lambda: logprobs(logit_softcap=5.0 + rank))
    refused("other chunks", lambda: logprobs(chunk_tokens=2 + rank))
    hidden.requires_grad_(rank == 0)
    refused("a gradient on one rank", logprobs)
    hidden.requires_grad_(False)
    refused("other advantages", lambda: fastrl.linear_policy_loss(
        hidden, torch.randn(5, 8), ids, torch.arange(4) * (1.0 + rank), torch.ones(4),
        objective="dapo", vocab_group=group,
    ))  # fmt: skip
    refused("other losses", lambda: fastrl.logits_policy_loss(
        torch.randn(4, 5), ids, torch.ones(4), torch.ones(4), objective=("dapo", "cispo")[rank],
        vocab_group=group,
    ))  # fmt: skip
    refused("an empty part", lambda: logprobs(5 * rank))
    refused("an empty part of logits", lambda: fastrl.token_logprobs(
        torch.randn(4, 5 * rank), ids, vocab_group=group))  # fmt: skip
    refused("an id outside", lambda: logprobs(ids=ids + 7))
    refused("an id outside, logits", lambda: fastrl.token_stats(
        torch.randn(4, 5), ids + 7, vocab_group=group))  # fmt: skip
    on_meta = hidden.to("meta") if rank else hidden
    refused("another device", lambda: fastrl.linear_token_logprobs(
        on_meta, torch.randn(5, 8), ids, vocab_group=group))  # fmt: skip
    refused("no group", lambda: fastrl.token_logprobs(torch.randn(4, 5), ids, vocab_group="tp"))
    refused("a bias of another part", lambda: logprobs(bias=torch.zeros(6)))
    # masked rows may hold anything, also other things on other ranks
    logprobs(ids=torch.tensor([0, 1, 2, 3 * rank]), mask=torch.tensor([1, 1, 1, 0]))
    ours = Objective(surrogate=lambda new, old, ref, a: -(new - old).exp() * a)
    fastrl.linear_policy_loss(
        hidden, torch.randn(5, 8), ids, torch.tensor([1.0, 0.5, 2.0, 3.0 * rank]),
        torch.tensor([1, 1, 1, 0]), objective=ours, cu_seqlens=torch.tensor([0, 4]),
        vocab_group=group,
    )  # fmt: skip
    # as may sequences without a token, and hidden states may be rounded differently
    per_sequence = torch.tensor([1.0, float("nan")] if rank else [1.0, 2.0])
    fastrl.logits_policy_loss(
        torch.randn(2, 3, 5) + rank, ids[1:].expand(2, 3), per_sequence,
        torch.tensor([[1, 1, 0], [0, 0, 0]]), temperature=per_sequence[:, None] + 1,
        old_logprobs=-torch.ones(2, 3), policy_weights=per_sequence, vocab_group=group,
    )  # fmt: skip
    fastrl.logits_policy_loss(
        torch.randn(3, 5), ids[1:], per_sequence, torch.tensor([1, 1, 0]),
        cu_seqlens=torch.tensor([0, 2, 3]), vocab_group=group,
    )  # fmt: skip
    return texts


def other_rows_on_ranks():
    """Gradients of hidden states where a loss leaves out one row on the one rank, another there."""
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, weight, ids = torch.randn(6, 8), torch.randn(10, 8), torch.arange(6)
    part = weight[5 * rank : 5 * rank + 5]
    found = []
    for head, more in ((weight, {}), (part, {"vocab_group": group})):
        states = hidden.clone().requires_grad_()
        logprobs = fastrl.linear_token_logprobs(states, head, ids, **more)
        slopes = torch.ones(6)
        if more:
            slopes[5 * rank] = 0.0
        (slopes @ logprobs).backward()
        found.append(states.grad)
    return [x[1:5] for x in found]


def likely_on_ranks(backend):
    """A token that leads by 17 nats: its log-probability, entropy and their gradients."""
    rank, token_ids = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    part = torch.tensor([[17.0, 0.0], [-1.0, -2.0]])[rank : rank + 1].requires_grad_()
    more = {"outputs": ("logprobs", "entropy"), "backend": backend}
    stats = fastrl.token_stats(part, token_ids, vocab_group=dist.group.WORLD, **more)
    found = []
    for stat in stats[:2]:
        stat.sum().backward(retain_graph=True)
        found += [stat.detach(), part.grad.flatten()]
        part.grad = None
    return found


def compiled_on_ranks():
    """Calls under torch.compile, which breaks the graph where ranks exchange their sizes."""
    own, group = columns((20, 17)), dist.group.WORLD
    head, tokens = batch(37)
    ids, mask = tokens["token_ids"], tokens["mask"]

    def from_hidden(x):
        more = {"objective": "dapo", "vocab_group": group}
        loss = fastrl.linear_policy_loss(**x, token_ids=ids, advantages=weights, mask=mask, **more)
        return loss.loss * 2.0

    def from_logits(x):
        logits = torch.where(mask[:, None], x["hidden"], 0.0) @ x["weight"].t()
        return fastrl.token_logprobs(logits, ids, mask=mask, vocab_group=group) @ weights

    weights = torch.randn(ROWS)
    for function, graphs in ((from_hidden, 1), (from_logits, 2)):
        results = []
        torch._dynamo.utils.counters.clear()
        for run in (function, torch.compile(function, backend="aot_eager")):
            x = leaves({"hidden": head["hidden"], "weight": head["weight"][own]})
            result = run(x)
            result.backward()
            results.append([result.detach(), *(leaf.grad for leaf in x.values())])
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two)
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert any("exchange the sizes" in reason for reason in breaks), breaks
        # what is around the call is compiled; the call itself, which other ranks share, is not
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def twice_on_ranks(backend):
    """The same call twice, in float16 and, on the reference backend, in float64."""
    own, group, losses = columns((150, 161)), dist.group.WORLD, []
    dtype = torch.float64 if backend == "reference" else torch.float16
    head, tokens = batch(311, dtype)
    for split in (False, True, True):
        weight = head["weight"][own] if split else head["weight"]
        x = leaves({"hidden": head["hidden"], "weight": weight})
        result = fastrl.linear_policy_loss(
            **x, **tokens, objective="dapo", chunk_tokens=8, backend=backend,
            **({"vocab_group": group} if split else {}),
        )  # fmt: skip
        result.loss.backward()
        losses.append([result.loss.detach(), result.logprobs, x["hidden"].grad, x["weight"].grad])
    whole, first, second = losses
    assert all(map(torch.equal, first, second))
    rtol = 1e-14 if dtype == torch.float64 else 2e-3
    whole[3] = whole[3][own]
    for found, expected in zip(first, whole, strict=True):
        size = float(expected.abs().amax())
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * size)


def dying_on_ranks():
    """The error of a rank whose partner dies between two chunks."""
    if dist.get_rank() == 1:
        project, left = walk.LinearWalk.project, iter(range(3))

        def die(*arguments):
            return project(*arguments) if next(left, None) is not None else os._exit(3)

        walk.LinearWalk.project = die
    fastrl.linear_token_logprobs(
        torch.randn(20, 8), torch.randn(15, 8), torch.arange(20), chunk_tokens=4,
        vocab_group=dist.group.WORLD,
    )  # fmt: skip
