# torchrun --standalone --nproc-per-node 2 fsdp.py
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fastrl
from fastrl.integrations.transformers import inside_forward

GROUP, START, LENGTH = 4, 4, 12  # completions of a prompt; their first token; their length


def main():
    device, world = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp",))
    dp = mesh.get_group()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)).to(device)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Each rank would sample its own. With six completions each, two ranks share the second group.
    prompts = torch.randint(50, (3, START)).repeat_interleave(GROUP, 0)
    ids = torch.cat([prompts, torch.randint(50, (12, LENGTH))], 1)
    mask = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (12, 1))
    ids, mask = (x.to(device).tensor_split(world)[dist.get_rank()] for x in (ids, mask))

    rewards = fastrl.masked_mean((ids[:, START:] % 2).float(), mask, dim=1)
    advantages = fastrl.group_advantages(rewards, group_size=GROUP, process_group=dp).advantages
    options = {"objective": "dapo"}
    options["normalizer"] = fastrl.global_normalizer(mask.split(2), process_group=dp, **options)

    def loss(hidden, head, rows, old):  # in the forward the head is whole on every rank
        batch = {"token_ids": ids[rows, START:], "mask": mask[rows], "old_logprobs": old}
        batch |= {"advantages": advantages[rows], **head.arguments(), **options}
        return fastrl.linear_policy_loss(hidden[:, START - 1 : -1], **batch)

    old_logprobs = [None] * len(mask.split(2))  # in the first step those of the model itself
    for step in range(3):
        results = []
        for rows, old in zip(torch.arange(len(ids)).split(2), old_logprobs, strict=True):
            score = partial(loss, rows=rows, old=old)
            results.append(inside_forward(model, score, input_ids=ids[rows]))
            results[-1].loss.backward()
        old_logprobs = [result.logprobs for result in results] if step == 0 else old_logprobs
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        metrics = fastrl.reduce_metrics([r.metrics for r in results], dp, policy_loss="rank-mean")
        if dist.get_rank() == 0:
            print(step, norm, *(metrics[k].item() for k in ("policy_loss", "kl_old", "ratio_max")))


if not dist.is_torchelastic_launched():
    raise SystemExit("start this script as its first line says, with torchrun")
dist.init_process_group()
main()
dist.destroy_process_group()
