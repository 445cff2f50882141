"""An LM head that FSDP2 shards over a single rank, in this process, against a plain one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastrl


def assert_sharded_equals_whole(device: str, collectives: str, backend: str) -> None:
    """Compare log-probabilities, loss and gradients bit by bit, under autocast to bfloat16."""
    dist.init_process_group(collectives, store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = nn.Linear(64, 1001, device=device)
        sharded = nn.Linear(64, 1001, device=device)
        sharded.load_state_dict(whole.state_dict())
        fully_shard(sharded, mesh=init_device_mesh(device, (1,)))
        assert type(sharded.weight).__name__ == "DTensor"
        hidden, ids = torch.randn(2, 9, 64), torch.randint(1001, (2, 9))
        hidden, ids = hidden.to(device), ids.to(device)
        outcomes = []
        for head in (whole, sharded):
            states = hidden.clone().requires_grad_()
            with torch.autocast(device, torch.bfloat16):
                logprobs = fastrl.linear_token_logprobs(
                    states.detach(), head.weight, ids, bias=head.bias, backend=backend
                )
                loss = fastrl.linear_policy_loss(
                    states, head.weight, ids, torch.ones(2, device=device), torch.ones_like(ids),
                    bias=head.bias, backend=backend,
                ).loss  # fmt: skip
            loss.backward()
            grads = [head.weight.grad, head.bias.grad]
            grads = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]
            outcomes.append([logprobs.detach(), loss.detach(), states.grad, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    finally:
        dist.destroy_process_group()
