"""Hooks on the modules that fastrl does not call do not fire, and a warning says so."""

import warnings

import pytest
import torch

from tests.support.trl_runs import make_model, make_trainer, needed, run, save_model

needed("trl")
from fastrl.integrations.transformers import last_hidden_states  # noqa: E402
from fastrl.integrations.transformers.hooks import has_own_hooks  # noqa: E402
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

REGISTER = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
TWO_STEPS = {"max_steps": 2, "beta": 0.04}


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


def about_hooks(function):
    """Return the warnings about hooks during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(found.message) for found in caught if "hooks on" in str(found.message)]


@pytest.mark.parametrize("register", REGISTER)
def test_hooks_on_the_head_do_not_fire_and_give_one_warning(register, tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, **TWO_STEPS)
    called = []
    parts = {"model": trainer.model, "head": trainer.model.lm_head}
    parts["layer"] = trainer.model.model.layers[0]

    def record(name):
        return lambda *_: called.append(name)

    for name, module in parts.items():
        getattr(module, register)(record(name))

    def loss():
        use_fastrl(trainer)
        trainer.current_gradient_accumulation_steps = 1
        ids, mask = torch.tensor([[5, 6, 7, 8]] * 2), torch.ones(2, 4, dtype=torch.long)
        for _ in range(2):
            trainer.compute_loss(
                trainer.model,
                {
                    "prompt_ids": ids[:, :2],
                    "prompt_mask": mask[:, :2],
                    "completion_ids": ids[:, 2:],
                    "completion_mask": mask[:, 2:],
                    "advantages": torch.tensor([1.0, -1.0]),
                    "ref_per_token_logps": torch.full((2, 2), -4.0),
                    "num_items_in_batch": torch.tensor(4),
                },
            ).backward()

    (message,) = about_hooks(loss)
    assert message.startswith("hooks on the LM head (Linear) do not fire")
    # the model returns a dict, for which torch calls no hooks of the backward
    of_model = set() if "backward" in register else {"model"}
    assert set(called) == {"layer", *of_model}
    assert len(called) == 2 * len(set(called))
    called.clear()
    trainer.model(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    assert set(called) == {"layer", "head", *of_model}


@pytest.mark.parametrize("fused", [None, False])
def test_a_hook_that_a_callback_registers_gives_a_warning(fused, tiny_path, tmp_path):
    transformers = needed("transformers")

    class Watching(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            model.lm_head.register_forward_hook(lambda *_: None)

    trainer = make_trainer(tiny_path, output_dir=tmp_path, **TWO_STEPS)
    trainer.add_callback(Watching())
    (message,) = about_hooks(lambda: run(trainer, lambda t: use_fastrl(t, fused=fused)))
    assert message.startswith("hooks on the LM head (Linear) do not fire")


RUNS = {
    "plain": {},
    "mixed precision": {"bf16": True},
    "a head in float32": {"cast_lm_head_to_fp32": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("adapted", [False, True])
def test_hooks_of_the_trainers_give_no_warning(name, adapted, tiny_path, tmp_path):
    options = {**TWO_STEPS, **RUNS[name]}
    if adapted:
        peft = needed("peft")
        options["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj"])
    trainer = make_trainer(tiny_path, output_dir=tmp_path, **options)
    assert about_hooks(lambda: run(trainer, use_fastrl)) == []


def test_hooks_of_data_parallelism_give_no_warning(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, **TWO_STEPS)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)
        assert not has_own_hooks(wrapped)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.fsdp.fully_shard(make_model(), mesh=mesh)
        assert sharded._forward_pre_hooks
        assert not has_own_hooks(sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_last_hidden_states_fires_the_hooks_of_the_backbone_alone():
    peft = needed("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(make_model(), config)
    called = []
    causal = model.get_base_model()
    for module in (model, model.base_model, causal, causal.lm_head, causal.model.norm):
        assert not has_own_hooks(module)
        module.register_forward_hook(lambda module, *_: called.append(type(module).__name__))
        assert has_own_hooks(module)
    last_hidden_states(model, input_ids=torch.tensor([[3, 4]]))
    assert called == ["LlamaRMSNorm"]
