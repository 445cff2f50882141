"""An LM head that FSDP2 shards over one rank, or that two ranks on one GPU split by vocabulary."""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastrl

SIZES = (600, 401)


def assert_sharded_equals_whole(device: str, collectives: str, backend: str) -> None:
    """Compare log-probabilities, loss and gradients bit by bit, under autocast to bfloat16."""
    dist.init_process_group(collectives, store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, sharded = (nn.Linear(64, sum(SIZES), device=device) for _ in range(2))
        sharded.load_state_dict(whole.state_dict())
        fully_shard(sharded, mesh=init_device_mesh(device, (1,)))
        assert type(sharded.weight).__name__ == "DTensor"
        hidden, ids = _tokens(device, 18)
        outcomes = []
        for head in (whole, sharded):
            with torch.autocast(device, torch.bfloat16):
                found = _outcome(hidden, head.weight, ids, backend, bias=head.bias)
            found = [*found, head.weight.grad, head.bias.grad]
            outcomes.append([x.full_tensor() if hasattr(x, "full_tensor") else x for x in found])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    finally:
        dist.destroy_process_group()


def assert_parts_equal_whole(device: str, backend: str) -> None:
    """Compare log-probabilities, loss and gradients; all ranks must have the same bits."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_rank, (directory, device, backend), nprocs=len(SIZES))


def _rank(rank: int, directory: str, device: str, backend: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=len(SIZES)
    )
    own = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        hidden, ids = _tokens(device, 70)
        weight = (torch.randn(sum(SIZES), 64) / 4).to(device, dtype)
        whole, part = (x.clone().requires_grad_() for x in (weight, weight[own]))
        expected = *_outcome(hidden.to(dtype), whole, ids, backend), whole.grad[own]
        group = {"vocab_group": dist.group.WORLD}
        found = *_outcome(hidden.to(dtype), part, ids, backend, **group), part.grad
        # dL/dlogits is rounded to bfloat16, as are gradients in it
        rounding = 2e-5 if dtype == torch.float32 else 2.0**-6
        for one, exact, budget in zip(
            found, expected, (1e-5, 1e-5, rounding, rounding), strict=True
        ):
            size = exact.double().abs().amax()
            assert (one.double() - exact.double()).abs().amax() <= budget * size
        for shared in found[:-1]:
            other = [torch.empty_like(shared, device="cpu") for _ in SIZES]
            dist.all_gather(other, shared.cpu())
            assert torch.equal(*other)
    dist.destroy_process_group()


def _tokens(device: str, count: int) -> tuple[Tensor, Tensor]:
    hidden, ids = torch.randn(count, 64), torch.randint(sum(SIZES), (count,))
    return hidden.to(device), ids.to(device)


def _outcome(hidden: Tensor, weight: Tensor, ids: Tensor, backend: str, **head) -> list[Tensor]:
    """Return log-probabilities, the loss and the gradient of hidden states; `weight` gets its."""
    states = hidden.clone().requires_grad_()
    advantages = torch.linspace(-1, 1, len(ids), device=ids.device)
    result = fastrl.linear_policy_loss(
        states, weight, ids, advantages, torch.ones_like(ids), objective="dapo", chunk_tokens=30,
        backend=backend, **head,
    )  # fmt: skip
    result.loss.backward()
    return [result.logprobs, result.loss.detach(), states.grad]
