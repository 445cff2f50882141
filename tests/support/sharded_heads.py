"""Losses and gradients of models that are sharded over gloo ranks, beside those of one process."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import fastrl
from fastrl.integrations.transformers import inside_forward
from tests.support.trl_runs import VOCABULARY, make_model

WORLD = 2
ROUNDED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
)


def _model(kind="LlamaConfig", **changes):
    return make_model(kind, num_hidden_layers=2, **changes)


def _lora():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(_model(), config)


def _base(model):
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _fsdp2(model, mesh, *units, **options):
    for layer in _base(model).model.layers:
        fully_shard(layer, mesh=mesh, **options)
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


#: name -> (the model, how it is sharded, whether it computes in bfloat16)
CASES = {
    "FSDP2": (_model, lambda m, mesh: _fsdp2(m, mesh), False),
    "FSDP2, resharded after the forward": (
        _model,
        lambda m, mesh: _fsdp2(m, mesh, reshard_after_forward=True),
        False,
    ),
    "FSDP2, the head by itself": (
        _model,
        lambda m, mesh: _fsdp2(m, mesh, m.lm_head, reshard_after_forward=True),
        False,
    ),
    "FSDP2, norm and head together": (
        _model,
        lambda m, mesh: _fsdp2(m, mesh, [m.model.norm, m.lm_head]),
        False,
    ),
    "FSDP2, a tied head": (
        lambda: _model("Qwen3Config", tie_word_embeddings=True),
        lambda m, mesh: _fsdp2(m, mesh),
        False,
    ),
    "FSDP2, a softcap": (
        lambda: _model("Gemma2Config", final_logit_softcapping=3.0),
        lambda m, mesh: _fsdp2(m, mesh),
        False,
    ),
    "FSDP2, bfloat16": (_model, lambda m, mesh: _fsdp2(m, mesh, mp_policy=ROUNDED), True),
    "FSDP2, bfloat16, the head by itself": (
        _model,
        lambda m, mesh: _fsdp2(m, mesh, m.lm_head, mp_policy=ROUNDED),
        True,
    ),
    "FSDP2, LoRA on the head": (_lora, lambda m, mesh: _fsdp2(m, mesh), False),
    "FSDP2, LoRA on the head, each layer by itself": (
        _lora,
        lambda m, mesh: _fsdp2(m, mesh, *_leaves(_base(m).lm_head)),
        False,
    ),
    "FSDP1": (_model, lambda m, mesh: _fsdp1(m, mesh), False),
    "FSDP1, the head by itself": (_model, lambda m, mesh: _fsdp1_of_head(m, mesh), False),
    "DDP": (_model, lambda m, mesh: torch.nn.parallel.DistributedDataParallel(m), False),
}


def _leaves(head):
    return [part for part in head.modules() if isinstance(part, torch.nn.Linear)]


def _fsdp1_of_head(model, mesh):
    model.lm_head = _fsdp1(model.lm_head, mesh)
    return _fsdp1(model, mesh)


def _fsdp1(module, mesh):
    return FullyShardedDataParallel(
        module, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True
    )


def _batches(rank, parts):
    """The rank's micro-batches."""
    generator = torch.Generator().manual_seed(11 + rank)
    for _ in range(parts):
        ids = torch.randint(4, VOCABULARY, (2, 7), generator=generator)
        mask = torch.ones(2, 6)
        mask[rank, 4:] = 0
        yield ids, mask, torch.randn(2, generator=generator)


def _scored(form, ids, mask, advantages):
    """A function of hidden states and head; the mean over both ranks has the same denominator."""

    def fused(hidden, head):
        result = fastrl.linear_policy_loss(
            hidden[:, :-1],
            token_ids=ids[:, 1:],
            advantages=advantages,
            mask=mask,
            normalizer=10.0,
            **head.arguments(),
        )
        return {"loss": result.loss, "logprobs": result.logprobs}

    def primitive(hidden, head):
        logprobs = fastrl.linear_token_logprobs(
            hidden[:, :-1], token_ids=ids[:, 1:], mask=mask, **head.arguments()
        )
        loss = -(advantages[:, None] * (logprobs - logprobs.detach()).exp() * mask).sum() / 10.0
        return {"loss": loss, "logprobs": logprobs}

    return {"fused": fused, "primitive": primitive}[form]


def _step(model, form, rank, parts, *, synchronize=None):
    losses, logprobs = [], []
    for part, batch in enumerate(_batches(rank, parts)):
        if synchronize is not None:
            synchronize(part == parts - 1)
        out = inside_forward(model, _scored(form, *batch), input_ids=batch[0])
        assert out["loss"].dtype == out["logprobs"].dtype == torch.float32
        losses.append(out["loss"].item())
        logprobs.append(out["logprobs"].detach())
        out["loss"].backward()
    return losses, logprobs


def expected(name, form, parts):
    """Losses of each rank and the mean of the gradients, in one process."""
    model = CASES[name][0]()
    losses = [_step(model, form, rank, parts)[0] for rank in range(WORLD)]
    grads = {n: p.grad / WORLD for n, p in model.named_parameters() if p.grad is not None}
    return losses, grads


def _whole(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {
        n.removeprefix("module."): getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def _clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def rank_main(rank, store, path):
    """All cases on this rank; what it found is saved to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, WORLD), rank=rank, world_size=WORLD
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    found = {}
    for name, (make, shard, _) in CASES.items():
        for form in ("fused", "primitive"):
            for parts in (1, 2):
                model = shard(make(), mesh)
                synchronize = getattr(model, "set_requires_gradient_sync", None)
                losses, _ = _step(model, form, rank, parts, synchronize=synchronize)
                grads = {_clean(n): g for n, g in _whole(model).items()}
                found[name, form, parts] = losses, grads
    torch.save(found, f"{path}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
