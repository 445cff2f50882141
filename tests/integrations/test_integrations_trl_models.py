"""One loss of a TRL trainer with fastrl and without: heads, adapters, wrappers."""

from collections import defaultdict

import pytest
import torch

from tests.support.trl_runs import VOCABULARY, make_trainer, needed, save_model

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


def batch(**more):
    """Four sequences, one of them without a valid token, some far off policy."""
    ids, mask = torch.randint(4, VOCABULARY, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[0, 0] = mask[1, 7:] = mask[2, 3:] = 0
    logprobs = -3 * torch.rand(4, 6) - 3
    return {
        "prompt_ids": ids[:, :3],
        "prompt_mask": mask[:, :3],
        "completion_ids": ids[:, 3:],
        "completion_mask": mask[:, 3:],
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.1]),
        "old_per_token_logps": logprobs,
        "ref_per_token_logps": logprobs + 0.3 * torch.randn(4, 6),
        "num_items_in_batch": torch.tensor(31),
        **more,
    }


def loss_of(trainer, inputs, model=None):
    """Return loss, metrics and gradients."""
    trainer._metrics["train"] = defaultdict(list)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.zero_grad()
    trainer.model.train()
    loss = trainer.compute_loss(model or trainer.model, dict(inputs))
    loss.backward()
    named = trainer.model.named_parameters()
    grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return loss.item(), dict(trainer._metrics["train"]), grads


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


HEADS = {
    "a tied head": ("Qwen3Config", {"tie_word_embeddings": True}),
    "a softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0}),
    "a scale": ("CohereConfig", {"logit_scale": 0.25}),
    "a divisor": ("GraniteConfig", {"logits_scaling": 4.0}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, fused, tmp_path):
    kind, changes = HEADS[head]
    path = save_model(tmp_path / "model", kind, **changes)
    compare(make_trainer(path, output_dir=tmp_path, beta=0.04), batch(), fused=fused)


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


@pytest.mark.parametrize(
    "options", [{"loss_type": "dapo"}, {"loss_type": "bnpo"}, {"entropy_coef": 0.3}], ids=str
)
def test_tokens_written_by_tools(options, tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, **options)
    tool_mask = torch.ones(4, 6, dtype=torch.long)
    tool_mask[0, 2:4] = 0
    compare(trainer, batch(tool_mask=tool_mask))


def test_advantages_of_tokens(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, loss_type="dapo")
    compare(trainer, batch(advantages=torch.randn(4, 6)))


def test_on_policy_without_old_logprobs(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, loss_type="dapo", beta=0.04)
    compare(trainer, batch(old_per_token_logps=None))


def test_a_head_in_float32_under_a_bfloat16_backbone(tiny_path, tmp_path):
    trainer = make_trainer(
        tiny_path,
        output_dir=tmp_path,
        beta=0.04,
        cast_lm_head_to_fp32=True,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.norm.weight.dtype == torch.bfloat16
    compare(trainer, batch(), tolerance=2e-2)


def test_mixed_precision(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, beta=0.04, bf16=True)
    compare(trainer, batch(), tolerance=5e-2)


def test_data_parallel_gradients_are_reduced(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path, loss_type="dapo", beta=0.04)
    inputs, reduced = batch(), []

    def hook(_, bucket):
        reduced.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(trainer.model)
        wrapped.register_comm_hook(None, hook)
        for fused in (True, False):
            with use_fastrl(trainer, fused=fused):
                reduced.clear()
                _, _, grads = loss_of(trainer, inputs, wrapped)
                assert sum(reduced) == sum(p.numel() for p in trainer.model.parameters())
            _, _, theirs = loss_of(trainer, inputs)
            for name, grad in grads.items():
                torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()
