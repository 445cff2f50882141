"""What else holds on to a trainer: hooks, which partly do not fire, with a warning; and undoing."""

import warnings

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import batch_of, make_model, on, run

needed("trl")
from fastrl.integrations.transformers import last_hidden_states  # noqa: E402
from fastrl.integrations.transformers.hooks import has_own_hooks  # noqa: E402
from fastrl.integrations.trl import use_fastrl  # noqa: E402

TWO_STEPS = {"max_steps": 2, "beta": 0.04}


def about_hooks(function):
    """Return the warnings about hooks during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(found.message) for found in caught if "hooks on" in str(found.message)]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_on_the_head_do_not_fire_and_give_one_warning(register, tiny_path):
    trainer = make_trainer(tiny_path, **TWO_STEPS)
    called = []
    parts = {"model": trainer.model, "head": trainer.model.lm_head}
    parts["layer"] = trainer.model.model.layers[0]
    for name, module in parts.items():
        getattr(module, register)(lambda *_, name=name: called.append(name))

    def loss():
        use_fastrl(trainer)
        trainer.current_gradient_accumulation_steps = 1
        ids, ref = torch.tensor([[5, 6, 7, 8]] * 2), torch.full((2, 2), -4.0)
        for _ in range(2):
            batch = batch_of(ids, 2, advantages=[1.0, -1.0], ref_per_token_logps=ref)
            trainer.compute_loss(trainer.model, batch).backward()

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
def test_a_hook_that_a_callback_registers_gives_a_warning(fused, tiny_path):
    def watch(state, model, **_):
        model.lm_head.register_forward_hook(lambda *_: None)

    trainer = make_trainer(tiny_path, **TWO_STEPS)
    trainer.add_callback(on("on_train_begin", watch))
    (message,) = about_hooks(lambda: run(trainer, lambda t: use_fastrl(t, fused=fused)))
    assert message.startswith("hooks on the LM head (Linear) do not fire")


@pytest.mark.parametrize(
    "options",
    [{"bf16": True, "gradient_checkpointing": True}, {"cast_lm_head_to_fp32": True}],
    ids=str,
)
@pytest.mark.parametrize("adapted", [False, True])
def test_hooks_of_the_trainers_give_no_warning(options, adapted, tiny_path):
    lora = {"r": 2, "target_modules": ["q_proj"]} if adapted else None
    trainer = make_trainer(tiny_path, peft_config=lora, **TWO_STEPS, **options)
    assert about_hooks(lambda: run(trainer, use_fastrl)) == []


def test_hooks_of_data_parallelism_are_not_the_users():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert not has_own_hooks(torch.nn.parallel.DistributedDataParallel(make_model()))
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


def test_scores_until_undone(tiny_path):
    """Hooks on the model get what TRL gives them."""
    trainer = make_trainer(tiny_path)
    ids, mask = torch.tensor([[0, 5, 6, 7, 8], [9, 10, 11, 12, 0]]), torch.ones(2, 5).long()
    mask[0, 0] = mask[1, 4] = 0
    names = {"_compute_loss", "_get_per_token_logps_and_entropies"}
    outputs = []

    @torch.no_grad()
    def scores():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 3, batch_size=1, compute_entropy=True
        )

    trainer.model.register_forward_hook(lambda *arguments: outputs.append(arguments[-1]))
    with use_fastrl(trainer) as handle:
        assert names <= trainer.__dict__.keys()
        ours = scores()
    assert not names & trainer.__dict__.keys()
    handle.undo()
    theirs = scores()
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert ours[2] is theirs[2] is None
    assert ours[0][1, 2] == ours[1][1, 2] == 0
    for a, b in zip(outputs[:2], outputs[2:], strict=True):
        for name in ("loss", "log_probs", "entropy", "label_mask"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=1e-5)


def test_no_output_outlives_a_call(tiny_path):
    _, _, handle = run(make_trainer(tiny_path, **TWO_STEPS), use_fastrl)
    assert handle._outputs is None
