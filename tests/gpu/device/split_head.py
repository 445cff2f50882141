"""An LM head that two gloo ranks split by vocabulary, both on one GPU, against the whole one."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import fastrl

SIZES = (600, 401)
#: of hidden states and weight
DTYPES = (torch.float32, torch.bfloat16)


def assert_parts_equal_whole(device: str, backend: str) -> None:
    """Compare log-probabilities, loss and gradients; all ranks must have the same bits."""
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_rank, (directory, device, backend), nprocs=len(SIZES))


def _rank(rank: int, directory: str, device: str, backend: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=len(SIZES)
    )
    own = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    for dtype in DTYPES:
        torch.manual_seed(0)
        hidden, weight = torch.randn(70, 64), torch.randn(sum(SIZES), 64) / 4
        hidden, weight = (x.to(device, dtype) for x in (hidden, weight))
        ids = torch.randint(sum(SIZES), (70,)).to(device)
        whole = _loss(hidden, weight, ids, backend)
        part = _loss(hidden, weight[own], ids, backend, vocab_group=dist.group.WORLD)
        expected = (*whole[:-1], whole[-1][own])
        # dL/dlogits is rounded to bfloat16, as are gradients in it
        rounding = 2e-5 if dtype == torch.float32 else 2.0**-6
        for found, exact, budget in zip(
            part, expected, (1e-5, 1e-5, rounding, rounding), strict=True
        ):
            size = exact.double().abs().amax()
            assert (found.double() - exact.double()).abs().amax() <= budget * size
        for shared in part[:-1]:
            other = [torch.empty_like(shared, device="cpu") for _ in SIZES]
            dist.all_gather(other, shared.cpu())
            assert torch.equal(*other)
    dist.destroy_process_group()


def _loss(
    hidden: Tensor, weight: Tensor, ids: Tensor, backend: str, **split: object
) -> tuple[Tensor, ...]:
    """Return log-probabilities, the loss and the gradients of hidden states and weight."""
    states, head = (x.clone().requires_grad_() for x in (hidden, weight))
    advantages = torch.linspace(-1, 1, len(ids), device=ids.device)
    result = fastrl.linear_policy_loss(
        states, head, ids, advantages, torch.ones_like(ids), objective="dapo", chunk_tokens=30,
        backend=backend, **split,
    )  # fmt: skip
    result.loss.backward()
    return result.logprobs, result.loss.detach(), states.grad, head.grad
