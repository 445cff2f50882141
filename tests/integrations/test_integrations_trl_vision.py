"""TRL's loss of vision-language models, their images included, with fastrl and without."""

import pytest
import torch

from tests.support.trl_runs import make_trainer, needed

needed("trl")
transformers = needed("transformers")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, IMAGE, ROWS, PROMPT, COMPLETION = 61, 60, 4, 8, 5
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.3,
}


def llava():
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    inputs = {"pixel_values": torch.randn(ROWS, 3, 28, 28), "num_images": [1] * ROWS}
    return transformers.LlavaForConditionalGeneration(config), inputs


def gemma3():
    config = transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 16},
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=59,
        eoi_token_index=58,
    )
    types = torch.zeros(ROWS, PROMPT + COMPLETION, dtype=torch.long)
    types[:, 1:5] = 1
    inputs = {"pixel_values": torch.randn(ROWS, 3, 28, 28), "num_images": [1] * ROWS}
    model = transformers.Gemma3ForConditionalGeneration(config)
    return model, {**inputs, "token_type_ids": types}


def qwen2_vl():
    # an image of 4 x 4 patches of 14 pixels is merged to 4 tokens
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 16,
        "num_heads": 2,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=59,
        vision_start_token_id=58,
        vision_end_token_id=57,
    )
    types = torch.zeros(ROWS, PROMPT + COMPLETION, dtype=torch.long)
    types[:, 1:5] = 1
    inputs = {
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "num_images": [1] * ROWS,
        "mm_token_type_ids": types,
    }
    return transformers.Qwen2VLForConditionalGeneration(config), inputs


KINDS = {"llava": llava, "gemma3": gemma3, "qwen2_vl": qwen2_vl}


def batch(images):
    ids, mask = torch.randint(4, 50, (ROWS, PROMPT + COMPLETION)), None
    ids[:, 1:5] = IMAGE
    mask = torch.ones_like(ids)
    mask[0, -2:] = mask[2, -3:] = 0
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": mask[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask[:, PROMPT:],
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.1]),
        "old_per_token_logps": -3 * torch.rand(ROWS, COMPLETION) - 2,
        "num_items_in_batch": torch.tensor(15),
        **images,
    }


@pytest.mark.parametrize(
    ("fused", "dtype"), [(True, "float32"), (False, "float32"), (True, "autocast")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_equal(kind, fused, dtype, tmp_path):
    found = []
    for use in (False, True):
        torch.manual_seed(5)
        model, images = KINDS[kind]()
        trainer = make_trainer(model, output_dir=tmp_path, bf16=dtype == "autocast")
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        if use:
            assert use_fastrl(trainer, fused=fused).fused == fused
        optimizer, losses = torch.optim.SGD(trainer.model.parameters(), 0.05), []
        for _ in range(3):
            loss = trainer.compute_loss(trainer.model, batch(images))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        # the model sees the images
        other = batch({**images, "pixel_values": -images["pixel_values"]})
        assert trainer.compute_loss(trainer.model, other).item() != pytest.approx(losses[-1])
        parameters = [p.detach() for p in trainer.model.parameters()]
        found.append((losses, parameters, dict(trainer._metrics["train"])))
    (theirs, their_parameters, their_metrics), (ours, our_parameters, our_metrics) = found
    if dtype == "autocast":  # the first loss to rounding, as in the tests of the families
        assert ours[0] == pytest.approx(theirs[0], abs=2e-2)
        return
    assert ours == pytest.approx(theirs, abs=1e-4)
    for a, b in zip(our_parameters, their_parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for name in ("entropy", "clip_ratio/low_mean"):
        assert our_metrics[name] == pytest.approx(their_metrics[name], abs=1e-4)
