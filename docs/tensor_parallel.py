# torchrun --standalone --nproc-per-node 2 tensor_parallel.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastrl

VOCABULARY, HIDDEN, ROWS, LENGTH = 51, 32, 8, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 128), nn.Linear(128, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids):  # the hidden states, not the logits
        x = self.embedding(ids)
        return x + self.down(nn.functional.gelu(self.up(x)))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    tp = mesh.get_group()
    torch.manual_seed(0)  # ranks of tensor parallelism have the same weights and the same tokens
    model = Model().to(device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    ids = torch.randint(VOCABULARY, (ROWS, LENGTH)).to(device)
    mask = (torch.arange(LENGTH - 1) < torch.randint(1, LENGTH, (ROWS, 1))).to(device)
    rewards = fastrl.masked_mean((ids[:, 1:] % 2).float(), mask, dim=1)
    batch = {"token_ids": ids[:, 1:], "mask": mask, "old_logprobs": None, "objective": "dapo"}
    batch["advantages"] = fastrl.group_advantages(rewards, group_size=4).advantages
    for step in range(3):
        head = model.head.weight.to_local()  # 26 rows on rank 0, 25 on rank 1
        result = fastrl.linear_policy_loss(model(ids)[:, :-1], head, vocab_group=tp, **batch)
        result.loss.backward()
        batch["old_logprobs"] = result.logprobs if step == 0 else batch["old_logprobs"]
        norms = [whole(p.grad).norm().item() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:  # results and metrics are the same on all ranks
            print(step, result.loss.item(), result.metrics["kl_old"].item(), *norms)


if not dist.is_torchelastic_launched():
    raise SystemExit("start this script as its first line says, with torchrun")
dist.init_process_group()
main()
dist.destroy_process_group()
