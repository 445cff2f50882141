"""`use_fastrl(trainer, packed=True)`: TRL's numbers, from rows without padding."""

import logging
import warnings

import pytest
import torch
import transformers

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import KINDS, both, compare, first_of, make_trainer
from tests.integrations.trl.runs import batch_of, make_model

needed("trl")
from fastrl.integrations.transformers import packed as packed_rows  # noqa: E402
from fastrl.integrations.trl import packed_backbones, use_fastrl  # noqa: E402

PACKED = [kind for kind in KINDS if kind not in ("CPO", "ORPO", "OnlineDPO")]


@pytest.mark.parametrize("tokens", [None, 24])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_give_trls_numbers(kind, tokens, tiny_path):
    """Of all trainers but those whose losses depend on values at padding."""
    handle, _ = both(tiny_path, kind, use={"packed": True, "packed_tokens": tokens})
    assert handle.packed
    assert handle.packed_reason is None


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2, "gradient_checkpointing": True},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
        {"peft_config": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}},
    ],
    ids=["checkpointing", "parts of a generation", "the reference without an adapter"],
)
@pytest.mark.parametrize("fused", [None, False])
def test_options(options, fused, tiny_path):
    use = {"packed": True, "packed_tokens": 24, "fused": fused}
    both(tiny_path, use=use, beta=0.1, **options)


def test_a_group_computes_its_prompt_once(tiny_path, monkeypatch):
    """Eight completions of two prompts: 8 (6 + 4) tokens in the padded batch."""
    own, counted = transformers.LlamaModel.forward, []

    def forward(self, input_ids, **inputs):
        counted.append(input_ids.numel())
        return own(self, input_ids=input_ids, **inputs)

    prompts = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    completions = torch.arange(4, 36).view(8, 4)  # no two begin alike
    ids = torch.cat([prompts.repeat_interleave(4, 0), completions], 1)
    trainer = make_trainer(tiny_path)
    use_fastrl(trainer, packed=True).undo()  # which tries the model
    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    compare(trainer, batch_of(ids, 6, advantages=[1.0, -1.0] * 4), use={"packed": True})
    assert counted[0] == 8 * (6 + 4)
    assert counted[-1] == 2 * 6 + 8 * 4


@pytest.mark.parametrize(
    ("use", "options", "sentence"),
    [
        ({}, {"steps_per_generation": 1}, "GRPOTrainer runs on packed rows without padding"),
        (
            {},
            {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
            "over 4 batches, and only those in one batch share it: per_device_train_batch_size=8, "
            "gradient_accumulation_steps=1 and steps_per_generation=2 make one batch of each step",
        ),
        ({"packed": False}, {}, "GRPOTrainer runs on padded batches: packed is False"),
    ],
)
def test_a_line_of_the_log_says_what_was_chosen(
    use, options, sentence, tiny_path, caplog, monkeypatch
):
    for name in ("transformers", "fastrl"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    trainer = make_trainer(tiny_path, **options)
    caplog.clear()
    use_fastrl(trainer, **use)
    (line,) = [record.message for record in caplog.records if "runs on" in record.message]
    assert sentence in line


@pytest.mark.parametrize("packed", [None, True])
def test_a_sharded_model_is_tried_in_its_first_call(packed, tiny_path, monkeypatch):
    """And is padded from then on, or stops the run, if its rows have other values."""
    monkeypatch.setattr(packed_backbones, "is_whole", lambda part: False)
    monkeypatch.setattr(packed_backbones, "why_not_packed", lambda part, run: "its values differ")
    trainer = make_trainer(tiny_path, "SFT")
    batch = first_of(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    with use_fastrl(trainer, packed=packed) as handle:
        assert handle.packed
        if packed:
            with pytest.raises(ValueError, match="packed must be None or False: its values differ"):
                trainer.compute_loss(trainer.model, batch)
            return
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
        assert not handle.packed
        assert handle.packed_reason == "its values differ"


def test_sdpa_is_transformers_own_for_other_calls():
    """Registration of the attention by sequence leaves calls of other models as they are."""
    model = make_model()
    ids = torch.tensor([[4, 5, 6, 7]])
    expected = model(input_ids=ids).logits
    attention = transformers.AttentionInterface()["sdpa"]
    assert attention is packed_rows._attend
    eager = make_model(attn_implementation="eager")
    torch.testing.assert_close(eager(input_ids=ids).logits, expected)


def test_a_warning_that_is_an_error_leaves_the_trainer(tiny_path):
    trainer = make_trainer(tiny_path)
    trainer.model.lm_head.register_forward_hook(lambda *_: None)
    before = dict(trainer.__dict__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="hooks on the LM head"):
            use_fastrl(trainer)
    assert trainer.__dict__ == before
