"""TRL's loss of vision-language models, their images included, with fastrl and without."""

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import compare, loss_of, make_trainer
from tests.integrations.trl.runs import SIZES, batch_of

needed("trl")
transformers = needed("transformers")
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.slow

IMAGE, ROWS, PROMPT, COMPLETION = 60, 4, 8, 5
#: Where the tokens of the image are.
PLACES = torch.zeros(ROWS, PROMPT + COMPLETION, dtype=torch.long)
PLACES[:, 1:5] = 1
TEXT = {**SIZES, "num_hidden_layers": 2}
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
    inputs = {"pixel_values": torch.randn(ROWS, 3, 28, 28), "num_images": [1] * ROWS}
    inputs["token_type_ids"] = PLACES
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # was 0
    return model, inputs


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
    inputs = {
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "num_images": [1] * ROWS,
        "mm_token_type_ids": PLACES,
    }
    return transformers.Qwen2VLForConditionalGeneration(config), inputs


KINDS = {"llava": llava, "gemma3": gemma3, "qwen2_vl": qwen2_vl}


def batch(images):
    ids = torch.randint(4, 50, PLACES.shape).masked_fill(PLACES.bool(), IMAGE)
    mask = torch.ones_like(ids)
    mask[0, -2:] = mask[2, -3:] = 0
    old = -3 * torch.rand(ROWS, COMPLETION) - 2
    advantages = [1.2, -0.7, 0.4, -1.1]
    return batch_of(
        ids, PROMPT, mask=mask, advantages=advantages, old_per_token_logps=old, **images
    )


#: What is trained, what fastrl does, and how autocast rounds, as in the tests of the families.
CASES = {
    "fused": ({}, {"fused": True}, 1e-4),
    "log-probabilities": ({}, {"fused": False}, 1e-4),
    "autocast": ({"bf16": True}, {"fused": True}, 2e-2),
    "distillation": ({"trainer": "Distillation", "beta": 0.3}, {}, 1e-4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_equal(kind, name):
    """Of a batch that the model sees the images of; under autocast the losses alone."""
    options, use, tolerance = CASES[name]
    (model, images), options = KINDS[kind](), dict(options)
    trainer = options.pop("trainer", "GRPO")
    if trainer == "Distillation":
        options["teacher_model"] = KINDS[kind]()[0]
    trainer, inputs = make_trainer(model, trainer, **options), batch(images)
    others = {**inputs, "pixel_values": -inputs["pixel_values"]}
    of_others, value = (loss_of(trainer, x)[0].item() for x in (others, inputs))
    assert value != pytest.approx(of_others)
    if name == "autocast":
        with use_fastrl(trainer, **use):
            assert loss_of(trainer, inputs)[0].item() == pytest.approx(value, abs=tolerance)
    else:
        compare(trainer, inputs, tolerance=tolerance, use=use)
