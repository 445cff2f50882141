"""LM heads that are DTensors: FSDP2's parameters, and parts of the vocabulary."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastrl
from tests.ops.linear.linear_head import near
from tests.ops.ranks.gloo_ranks import on_ranks
from tests.ops.ranks.vocabulary_ranks import ROWS, batch, leaves

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


def fsdp_on_ranks():
    """An LM head that FSDP2 shards trains like one that is not sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole, sharded = nn.Linear(8, 37), nn.Linear(8, 37)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=mesh)
    assert type(sharded.weight).__name__ == "DTensor"
    hidden, token_ids = torch.randn(2, 5, 8), torch.randint(37, (2, 5))
    advantages = torch.tensor([1.0, -0.5])

    def loss(head, states, row):
        rows = slice(row, row + 1)
        given = states[rows], head.weight, token_ids[rows], advantages[rows], torch.ones(1, 5)
        return fastrl.linear_policy_loss(*given, bias=head.bias).loss

    with torch.no_grad():
        logprobs = [
            fastrl.linear_token_logprobs(hidden, head.weight, token_ids, bias=head.bias)
            for head in (whole, sharded)
        ]
    torch.testing.assert_close(*logprobs)
    expected, found = (hidden.clone().requires_grad_() for _ in range(2))
    ((loss(whole, expected, 0) + loss(whole, expected, 1)) / 2).backward()
    loss(sharded, found, rank).backward()
    for name in ("weight", "bias"):
        parameter = getattr(sharded, name)
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), getattr(whole, name).grad)
    torch.testing.assert_close(found.grad[rank] / 2, expected.grad[rank])


def test_gradients_are_averaged_over_the_ranks():
    on_ranks(2, fsdp_on_ranks)


def tensor_parallel_on_ranks(backend):
    """Weights and logits that are DTensors over a mesh dimension `tp`, beside data parallelism."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel, V = mesh["tp"], 37
    group = tensor_parallel.get_group()
    head, tokens = batch(V)
    rows = slice(0, 20) if mesh.get_local_rank("dp") == 0 else slice(20, ROWS)
    ids, mask = tokens["token_ids"][rows], tokens["mask"][rows]
    hidden = head.pop("hidden")[rows]

    def call(x, states, **more):
        lora = (x["lora_a"], x["lora_b"], 0.5)
        given = states, x["weight"], ids, tokens["advantages"][rows], mask
        more |= {"bias": x["bias"], "lora": lora, "objective": "dapo", "backend": backend}
        return fastrl.linear_policy_loss(*given, **more)

    whole, states = leaves(head), leaves({"whole": hidden, "part": hidden, "plain": hidden})
    places = {name: Replicate() if name == "lora_a" else Shard(0) for name in head}
    parts = {
        name: distribute_tensor(x.detach(), tensor_parallel, [places[name]]).requires_grad_()
        for name, x in head.items()
    }
    plain = {name: x.to_local().detach().requires_grad_() for name, x in parts.items()}
    expected = call(whole, states["whole"])
    found = call(parts, states["part"])
    other = call(plain, states["plain"], vocab_group=group)
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
    teacher = fastrl.Teacher.from_logits(-logits)
    expected = fastrl.token_divergence(logits, teacher, mask=mask, backend=backend)
    sharded = fastrl.Teacher.from_logits(-split.detach())
    found = fastrl.token_divergence(split, sharded, mask=mask, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)

    with pytest.raises(ValueError, match="inplace_backward=True needs a plain tensor, got a DT"):
        fastrl.token_logprobs(split, ids, mask=mask, backend=backend, inplace_backward=True)
    unnamed = DeviceMesh.from_group(group, "cpu")
    given = distribute_tensor(logits.detach(), unnamed, [Shard(1)])
    with pytest.raises(TypeError, match="logits must be a plain tensor, got a DTensor: pass"):
        fastrl.token_logprobs(given, ids, mask=mask, backend=backend)
    wrong = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wrong = distribute_tensor(head["weight"], wrong, [Shard(0)])
    message = r"weight must be a plain tensor or a DTensor with Shard\(0\) over the ranks"
    with pytest.raises(ValueError, match=message):
        fastrl.linear_token_logprobs(hidden, wrong, ids, vocab_group=group)


def test_a_head_that_is_tensor_parallel_beside_data_parallelism(backend):
    on_ranks(4, tensor_parallel_on_ranks, backend)
