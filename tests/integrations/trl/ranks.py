"""Runs of TRL's trainers on several gloo ranks on the CPU, with fastrl and without."""

import contextlib
import hashlib
import os
import socket

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.integrations.trl.kinds import make_trainer, used
from tests.integrations.trl.runs import run


def import_trl():
    """Import what ranks need, in the process that they are forked from."""
    import peft  # noqa: F401
    from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, SFTTrainer  # noqa: F401
    from trl.experimental.cpo import CPOTrainer  # noqa: F401
    from trl.experimental.gkd import GKDTrainer  # noqa: F401
    from trl.experimental.sdft import SDFTTrainer  # noqa: F401

    from fastrl.integrations.trl import use_fastrl  # noqa: F401

    torch.set_num_threads(1)  # a thread would not be there after a fork


def run_on_ranks(layout, model, path, uses, *, world=2, **options):
    """Train on ``world`` ranks, forked from this process; for each use, what each rank found.

    Args:
        layout: ``"ddp"``, ``"fsdp1"``, ``"fsdp2"``, ``"zero1"``, ``"zero2"`` or ``"zero3"``.
        model: A directory as `save_model` makes it.
        path: Where the ranks may write.
        uses: The arguments of `use_fastrl` of each use by its name, or None for TRL alone.
        world: How many ranks.
        **options: Of `make_trainer`, its ``kind`` included, or ``compiled=True`` where fastrl is
            used, ``unknown_input=True`` for the batches of the last rank, or ``hooked=True`` for a
            hook on a layer of the first.
    """
    arguments = (environments(world), layout, model, path, uses, options)
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=world, start_method="fork")
    found = [torch.load(path / f"found.{rank}") for rank in range(world)]
    return {use: [of_rank[use] for of_rank in found] for use in uses}


def environments(world):
    """The environment of each of ``world`` ranks on this machine's CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _rank(rank, places, layout, model, path, uses, options):
    os.environ |= places[rank]
    choose_cpu(layout)
    found = {use: _train(layout, model, path, dict(options), uses[use]) for use in uses}
    torch.save(found, path / f"found.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def choose_cpu(layout):
    """Let accelerate choose FSDP or DeepSpeed where there is no accelerator, only gloo."""
    if layout == "ddp":
        return
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def options_of(layout):
    """The options of a trainer that choose a layout."""
    if layout == "ddp":
        return {"use_cpu": True}
    if layout.startswith("fsdp"):
        sharding = {
            "version": int(layout.removeprefix("fsdp")),
            "cpu_ram_efficient_loading": False,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
        }
        if layout == "fsdp1":
            sharding |= {"reshard_after_forward": "FULL_SHARD", "sync_module_states": False}
        return {"use_cpu": False, "fsdp": True, "fsdp_config": sharding}
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": int(layout.removeprefix("zero")),
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
        },
    }
    return {"use_cpu": False, "deepspeed": settings}


def _train(layout, model, path, options, use):
    from accelerate.state import AcceleratorState, GradientState

    if options.pop("compiled", False) and use is not None:
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    unknown_input, hooked = options.pop("unknown_input", False), options.pop("hooked", False)
    options = {"output_dir": str(path / "directory"), **options_of(layout), **options}
    trainer = make_trainer(model, **options)
    if unknown_input and os.environ["RANK"] == str(trainer.accelerator.num_processes - 1):
        _add_unknown_input(trainer)
    if hooked and os.environ["RANK"] == "0":
        trainer.model.model.layers[0].register_forward_hook(lambda *_: None)
    steps, losses, handle = run(trainer, contextlib.nullcontext if use is None else used(**use))
    wrapped = trainer.model_wrapped
    found = {
        "steps": steps,
        "losses": losses,
        "fused": getattr(handle, "fused", None),
        "packed": getattr(handle, "packed", None),
        "wrapped": [kind.__name__ for kind in type(wrapped).__mro__],
        "parameters": _checksum(
            wrapped if layout == "fsdp1" else trainer.accelerator.unwrap_model(wrapped)
        ),
    }
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    return found


def _add_unknown_input(trainer):
    own = trainer._generate_and_score_completions

    def generated(inputs):
        batch = own(inputs)
        return {**batch, "unknown": torch.zeros(len(batch["completion_ids"]))}

    trainer._generate_and_score_completions = generated


def _checksum(model):
    """A digest of all parameters, gathered if they are sharded."""
    parameters = list(model.parameters())
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        if any(hasattr(p, "ds_id") for p in parameters):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        if isinstance(model, FullyShardedDataParallel):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(model))
            parameters = list(model.parameters())
        for parameter in parameters:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().float().clone().numpy().tobytes())
    return digest.hexdigest()
