"""What ranks compute together equals what one process computes from all that they hold."""

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fastrl
from fastrl import Objective
from fastrl.contract import AGGREGATIONS
from fastrl.ops._process_groups import total
from tests.ops.ranks.gloo_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the loopback device is named as on Linux"),
]
WORLDS = (2, 3, "mesh")

#: How many rows each rank has; the last may have none.
SHARES = {2: [(7, 9), (16, 0)], 3: [(5, 2, 9), (10, 6, 0)]}
ROWS, T = 16, 6


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    """The results of every call by rank, from one start of the processes."""
    if request.param == "mesh":  # a data rank is not the rank in the world
        return on_ranks(4, every_call, (2, 2))[1::2]
    return on_ranks(request.param, every_call)


def every_call(mesh=None):
    calls = (advantages, refusals, whitened, sums, losses)
    group = dist.group.WORLD if mesh is None else init_device_mesh("cpu", mesh).get_group(0)
    return {call.__name__: list(call(group)) for call in calls}


def of_rank(x, share, rank):
    """This rank's rows of a tensor."""
    return x.split(share)[rank]


def shares(group):
    """Each way to split the rows over the ranks, with the index of this one."""
    rank = 0 if group is None else dist.get_rank(group)
    splits = [(ROWS,)] if group is None else SHARES[dist.get_world_size(group)]
    return [(share, rank) for share in splits]


def rewards(dtype=torch.float32):
    """Groups of four; one has equal rewards, one a NaN, one an infinity in float64 alone."""
    x = (torch.arange(ROWS) * 7 % 5 / 3).to(dtype)
    x[4:8], x[9] = 0.1, math.nan
    x[13] = math.inf if dtype == torch.float64 else x[13]
    return x


ADVANTAGES = [
    ({"baseline": baseline, "scale": scale}, dtype)
    for baseline in ("mean", "leave_one_out")
    for scale in ("batch", "group", "none")
    for dtype in (torch.float32, torch.float64)
]


def advantages(group):
    ids = torch.arange(ROWS) * 5 % 4  # members of a group are on all ranks
    for share, rank in shares(group):
        for options, dtype in ADVANTAGES:
            mine, given = of_rank(rewards(dtype), share, rank), {**options, "process_group": group}
            yield fastrl.group_advantages(mine, group_size=4, **given)
            yield fastrl.group_advantages(mine, group_ids=of_rank(ids, share, rank), **given)
            known = of_rank(rewards().isfinite(), share, rank)
            # one rank alone has a mask
            mask = known if rank == 0 or not known.all() else None
            yield fastrl.group_advantages(mine, mask=mask, group_size=4, **given)
    rows = rewards().view(8, 2).split([2, 6] if group is None or len(share) == 2 else [1, 2, 5])
    mine = rewards().view(8, 2) if group is None else rows[rank]
    yield fastrl.group_advantages(mine, scale="batch", process_group=group)
    nothing = torch.zeros(0)
    yield fastrl.group_advantages(nothing, group_size=3, process_group=group)


def test_group_advantages_equal_those_of_all_rewards_to_the_bit(ranks):
    splits, alone = SHARES[len(ranks)], list(advantages(None))
    calls = len(ADVANTAGES) * 3
    wanted = alone[:calls] * len(splits) + alone[calls:]
    assert len(ranks[0]["advantages"]) == len(wanted)
    for index, expected in enumerate(wanted):
        found = zip(*(rank["advantages"][index] for rank in ranks), strict=True)
        for name, parts, whole in zip(expected._fields, found, expected, strict=True):
            assert torch.equal(torch.cat(parts).nan_to_num(-7), whole.nan_to_num(-7)), name


def refusals(group):
    """The errors of calls that all ranks refuse, whichever of them is wrong."""
    first = dist.get_rank(group) == 0
    x = torch.ones(3)
    for options in (
        {"group_size": 3 if first else 1},
        {"group_size": 3} if first else {"group_ids": torch.zeros(3, dtype=torch.int64)},
        {"group_size": 4},
        {"group_size": 1},
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            fastrl.group_advantages(x, process_group=group, **options)
        yield str(refused.value)


def test_all_ranks_refuse_groups_that_do_not_fit(ranks):
    world = len(ranks)
    ones, ids = ", group_size=1" * (world - 1), ", group_ids" * (world - 1)
    alike = "all ranks of process_group must give the same group_size, or group_ids; got "
    for rank in ranks:
        sizes, kinds, *divisible = rank["refusals"]
        assert sizes == f"{alike}group_size=3{ones}"
        assert kinds == f"{alike}group_size=3{ids}"
        message = f"group_size must divide the number of rewards of all ranks {3 * world}, got 4"
        one = "groups must have at least 2 rewards unless singleton is given, got group_size=1"
        assert divisible == [message, one]


def entries(kind):
    """Values and mask `[ROWS, T]`; the first entry of each row has the same value."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, T, generator=generator) * 3
    mask = torch.rand(ROWS, T, generator=generator) < 0.7
    if kind == "offset":
        x = x + 1e4
    x[:, 0], mask[:, 0] = 1.5 if kind != "offset" else 1e4, True
    if kind == "first-masked":
        mask[:7] = False
    elif kind == "masked":
        mask[:] = False
    elif kind == "one":
        mask[:] = False
        mask[8, 0] = True
    elif kind == "float64":
        x = x.double()
    return x.masked_fill(~mask, math.nan), mask


ENTRIES = ("plain", "offset", "first-masked", "masked", "one", "float64")


def whitened(group):
    for share, rank in shares(group):
        for kind, shift_mean in itertools.product(ENTRIES, (True, False)):
            x, mask = (of_rank(x, share, rank) for x in entries(kind))
            yield fastrl.whiten(x, mask, shift_mean=shift_mean, process_group=group)


def test_whitened_entries_equal_those_of_all_ranks(ranks):
    calls = list(itertools.product(ENTRIES, (True, False)))
    for index, expected in enumerate(list(whitened(None)) * len(SHARES[len(ranks)])):
        kind, _ = calls[index % len(calls)]
        parts = [rank["whitened"][index] for rank in ranks]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-6, atol=1e-6)
        if kind in ("plain", "offset", "float64"):  # equal entries, so equal mean and deviation
            assert len(torch.cat(parts)[:, 0].unique()) == 1


def sums(group):
    """Sums that depend on the order in which ranks are added."""
    rank = dist.get_rank(group)
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    yield total(x * 10.0 ** (8 * rank), group)
    yield total(torch.tensor(rank + 0.5), group)


def test_sums_have_the_same_bits_on_every_rank(ranks):
    for rank in ranks:
        assert all(map(torch.equal, rank["sums"], ranks[0]["sums"]))
    assert ranks[0]["sums"][1] == len(ranks) ** 2 / 2


SEPARATE = {"kl_coef": 0.1, "kl_aggregation": "token-mean"}
BOTH = {**SEPARATE, "entropy_coef": 0.02, "entropy_aggregation": "seq-mean-token-sum"}
OBJECTIVES = [
    *({"aggregation": name} for name in AGGREGATIONS if name != "token-sum"),
    {"aggregation": "seq-mean-token-mean", "count_empty": True},
    {"aggregation": "prompt-mean", **SEPARATE},
    {"aggregation": "seq-mean-token-mean", **BOTH},
    {**BOTH, "kl_aggregation": "prompt-mean", "entropy_aggregation": "token-mean"},
]
LOSS_SHARES = {2: (6, 10), 3: (4, 2, 10)}  # groups of two are whole


def losses(group):
    """Gradients of micro-batches, the normalizer and the metrics; one process has one batch."""
    generator = torch.Generator().manual_seed(5)
    old, ref, score = torch.randn(3, ROWS, T, generator=generator, dtype=torch.float64)
    lengths = torch.randint(T + 1, (ROWS,), generator=generator)
    lengths[4:6] = 0  # a rank, or a micro-batch, or a group, without tokens
    mask = torch.arange(T) < lengths[:, None]
    share = (ROWS,) if group is None else LOSS_SHARES[dist.get_world_size(group)]
    rank = 0 if group is None else dist.get_rank(group)
    rows = torch.arange(ROWS).split(share)[rank]
    micro_batches = rows.split(ROWS if group is None else 2)
    ids = torch.arange(ROWS) // 2
    for fields, gradients in itertools.product(OBJECTIVES, ("mean", "sum")):
        objective, logprobs = Objective(**fields), (old * 0.9).requires_grad_()
        prompts = "prompt-mean" in fields.values()
        normalizer = fastrl.global_normalizer(
            [mask[part] for part in micro_batches],
            objective=objective,
            group_ids=[ids[part] for part in micro_batches] if prompts else None,
            process_group=group,
            gradients=gradients,
        )
        metrics = []
        for part in micro_batches:
            given = {"objective": objective, "old_logprobs": old[part]}
            if objective.kl_coef:
                given["ref_logprobs"] = ref[part]
            if objective.entropy_coef:
                given["entropy"] = logprobs[part].square()
            if prompts:
                given["group_ids"] = ids[part]
            if group is not None:
                given["normalizer"] = normalizer
            result = fastrl.policy_loss(logprobs[part], score[part], mask[part], **given)
            result.loss.backward()
            metrics.append(result.metrics)
        how = "rank-mean" if gradients == "mean" else "sum"
        together = fastrl.reduce_metrics(metrics, group, policy_loss=how)
        yield logprobs.grad, normalizer, together.vector


def test_the_gradients_of_ranks_and_micro_batches_are_those_of_the_whole_batch(ranks):
    """As the optimizer sees them: averaged over the ranks as by DDP and FSDP, or summed."""
    for index, expected in enumerate(losses(None)):
        gradients, normalizers, vectors = zip(*(r["losses"][index] for r in ranks), strict=True)
        averaged = index % 2 == 0
        over = len(ranks) if averaged else 1
        torch.testing.assert_close(sum(gradients) / over, expected[0], rtol=1e-12, atol=1e-15)
        for found, normalizer in zip(vectors, normalizers, strict=True):
            assert torch.equal(found, vectors[0])
            assert normalizer == normalizers[0]
            torch.testing.assert_close(found, expected[2], rtol=1e-12, atol=1e-15)
        counts, whole = (
            x if isinstance(x, dict) else {"": x} for x in (normalizers[0], expected[1])
        )
        assert {name: float(x) * over for name, x in counts.items()} == pytest.approx(
            {name: float(x) for name, x in whole.items()}, rel=1e-15
        )


def test_a_process_group_without_effect_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    x, group = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), dist.group.WORLD
    try:
        with pytest.raises(ValueError, match=r"process_group has no effect with rewards .* group:"):
            fastrl.group_advantages(x, process_group=group)
        together = fastrl.group_advantages(x, scale="batch", process_group=group)
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, together, fastrl.group_advantages(x, scale="batch")))
