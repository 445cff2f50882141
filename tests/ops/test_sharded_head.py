"""An LM head that FSDP2 shards over two processes trains like an unsharded one."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed

import fastrl

RANK = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
import fastrl

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = nn.Linear(8, 37)
hidden, token_ids = torch.randn(2, 5, 8), torch.randint(37, (2, 5))
advantages = torch.tensor([1.0, -0.5])
inputs = [hidden.clone().requires_grad_() for _ in range(2)]

def loss(head, states, row):
    return fastrl.linear_policy_loss(
        states[row : row + 1], head.weight, token_ids[row : row + 1], advantages[row : row + 1],
        torch.ones(1, 5), bias=head.bias,
    ).loss

((loss(whole, inputs[0], 0) + loss(whole, inputs[0], 1)) / 2).backward()
sharded = nn.Linear(8, 37)
sharded.load_state_dict(whole.state_dict())
fully_shard(sharded, mesh=mesh)
assert type(sharded.weight).__name__ == "DTensor"
with torch.no_grad():
    logprobs = [
        fastrl.linear_token_logprobs(hidden, head.weight, token_ids, bias=head.bias)
        for head in (whole, sharded)
    ]
torch.testing.assert_close(*logprobs)
loss(sharded, inputs[1], rank).backward()
for name in ("weight", "bias"):
    found = getattr(sharded, name).grad
    assert found.placements == getattr(sharded, name).placements
    torch.testing.assert_close(found.full_tensor(), getattr(whole, name).grad)
torch.testing.assert_close(inputs[1].grad[rank] / 2, inputs[0].grad[rank])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_gradients_are_averaged_over_the_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    messages = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], messages


def test_hidden_states_in_parts_are_refused():
    hidden = torch.zeros(2, 4)
    hidden.full_tensor = lambda: hidden
    with pytest.raises(TypeError, match="hidden must be a plain tensor, got a DTensor"):
        fastrl.linear_token_logprobs(hidden, torch.zeros(7, 4), torch.tensor([0, 1]))
