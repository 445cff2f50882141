"""One loss of a TRL trainer with fastrl and without: adapters, batches, precisions."""

from collections import defaultdict

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.runs import VOCABULARY, batch_of, make_trainer, run

needed("trl")
from fastrl.integrations.trl import loss, token_outputs, use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def batch(**more):
    """Four sequences, one of them without a valid token, some far off policy."""
    ids, mask = torch.randint(4, VOCABULARY, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[0, 0] = mask[1, 7:] = mask[2, 3:] = 0
    logprobs = -3 * torch.rand(4, 6) - 3
    options = {
        "advantages": [1.2, -0.7, 0.4, -1.1],
        "old_per_token_logps": logprobs,
        "ref_per_token_logps": logprobs + 0.3 * torch.randn(4, 6),
        "num_items_in_batch": torch.tensor(31),
        **more,
    }
    return batch_of(ids, 3, mask=mask, **options)


def loss_of(trainer, inputs):
    """Return loss, metrics and gradients."""
    trainer._metrics["train"] = defaultdict(list)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.zero_grad()
    trainer.model.train()
    found = trainer.compute_loss(trainer.model, dict(inputs))
    found.backward()
    named = trainer.model.named_parameters()
    grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return found.item(), dict(trainer._metrics["train"]), grads


def compare(trainer, inputs, *, fused=True, tolerance=1e-4):
    theirs = loss_of(trainer, inputs)
    with use_fastrl(trainer, fused=fused):
        ours = loss_of(trainer, inputs)
    assert ours[0] == pytest.approx(theirs[0], abs=tolerance)
    assert ours[1].pop(METRIC, [0]) == [0]
    assert ours[1].keys() == theirs[1].keys()
    for name, values in ours[1].items():
        assert values == pytest.approx(theirs[1][name], abs=tolerance, nan_ok=True), name
    assert ours[2].keys() == theirs[2].keys()
    for name, grad in ours[2].items():
        torch.testing.assert_close(grad, theirs[2][name], rtol=1e-3, atol=tolerance)
    return ours


ADAPTERS = {
    "LoRA on the backbone": {"target_modules": ["q_proj", "v_proj"]},
    "a copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("fused", [True, False])
def test_adapters(adapter, fused, tiny_path, tmp_path):
    peft = needed("peft")
    config = peft.LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **ADAPTERS[adapter])
    trainer = make_trainer(tiny_path, output_dir=tmp_path, beta=0.04, peft_config=config)
    inputs = batch()
    _, _, grads = compare(trainer, inputs, fused=fused)
    assert any("lora" in name for name in grads)

    # the reference is the same model with its adapter off
    arguments = (inputs["completion_ids"], inputs["completion_mask"], 5)
    found = []
    for use in (False, True):
        if use:
            use_fastrl(trainer)
        with torch.no_grad(), trainer.model.disable_adapter():
            found.append(trainer._get_per_token_logps_and_entropies(trainer.model, *arguments)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (4, 1)])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "sapo"])
def test_the_vllm_correction_applies_to_the_policy_term(shape, loss_type, tiny_path, tmp_path):
    trainer = make_trainer(
        tiny_path, output_dir=tmp_path, loss_type=loss_type, beta=0.04, epsilon_high=1.2
    )
    trainer.use_vllm = True  # after construction; the batch holds what vLLM would have added
    ratio = torch.rand(shape) + 0.5
    assert trainer.vllm_importance_sampling_correction
    compare(trainer, batch(importance_sampling_ratio=ratio, sampling_per_token_logps=None))


def tool_mask():
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[0, 2:4] = 0
    return mask


BATCHES = {
    "tools, dapo": ({"loss_type": "dapo"}, {"tool_mask": tool_mask()}),
    "tools, bnpo": ({"loss_type": "bnpo"}, {"tool_mask": tool_mask()}),
    "tools, entropy bonus": ({"entropy_coef": 0.3}, {"tool_mask": tool_mask()}),
    "advantages of tokens": (
        {"loss_type": "dapo"},
        {"advantages": torch.linspace(-2, 2, 24).view(4, 6)},
    ),
    "on policy": ({"loss_type": "dapo", "beta": 0.04}, {"old_per_token_logps": None}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, tiny_path, tmp_path):
    options, changes = BATCHES[name]
    compare(make_trainer(tiny_path, output_dir=tmp_path, **options), batch(**changes))


#: options, the autocast under which the head is called, and how bfloat16 rounds
PRECISIONS = {
    "float32": ({}, None, 1e-4),
    "mixed": ({"bf16": True}, torch.bfloat16, 5e-2),
    "mixed, a head in float32": ({"bf16": True, "cast_lm_head_to_fp32": True}, None, 5e-2),
    "bfloat16, a head in float32": (
        {"cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"}},
        None,
        2e-2,
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions(name, tiny_path, tmp_path, monkeypatch):
    """On a GPU the head's GEMMs follow the autocast; a CPU multiplies in float32 all the same."""
    options, autocast, tolerance = PRECISIONS[name]
    seen = []

    def watched(function):
        def called(*arguments, **given):
            cast = torch.is_autocast_enabled("cpu")
            seen.append(torch.get_autocast_dtype("cpu") if cast else None)
            return function(*arguments, **given)

        return called

    for module, called in (
        (loss.fastrl, "linear_policy_loss"),
        (token_outputs, "linear_token_stats"),
    ):
        monkeypatch.setattr(module, called, watched(getattr(module, called)))
    trainer = make_trainer(tiny_path, output_dir=tmp_path, max_steps=1, beta=0.04, **options)
    if "model_init_kwargs" in options:
        assert trainer.model.lm_head.weight.dtype == torch.float32
        assert trainer.model.model.norm.weight.dtype == torch.bfloat16
    compare(trainer, batch(), tolerance=tolerance)
    run(trainer, use_fastrl)
    assert len(seen) >= 3  # that loss, the reference's log-probabilities, and the loss of a step
    assert set(seen) == {autocast}
