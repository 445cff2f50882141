"""`use_fastrl(trainer, packed=True)`: TRL's numbers, from rows without padding."""

import logging
import warnings

import pytest
import torch
import transformers

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import KINDS, both, make_trainer
from tests.integrations.trl.runs import batch_of, make_model, save_model

needed("trl")
from fastrl.integrations.transformers import packed as packed_rows  # noqa: E402
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

#: Trainers whose losses depend on values at padding.
PADDED = ("CPO", "ORPO", "OnlineDPO")
GPT2 = {"n_layer": 1, "n_head": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
#: Numbers of tokens that backbones compute, in the order of the calls.
COUNTED = []


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    own = transformers.LlamaModel.forward

    def forward(self, input_ids=None, **inputs):
        COUNTED.append(0 if input_ids is None else input_ids.numel())
        return own(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    COUNTED.clear()


@pytest.mark.parametrize("tokens", [None, 24])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PADDED])
def test_packed_rows_give_trls_numbers(kind, tokens, tiny_path, tmp_path):
    use = {"packed": True, "packed_tokens": tokens}
    handle, _ = both(tiny_path, kind, use=use, output_dir=tmp_path)
    assert handle.packed
    assert handle.packed_reason is None


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1, "num_iterations": 2, "gradient_checkpointing": True},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
        {"peft_config": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}},
    ],
    ids=["checkpointing", "parts of a generation", "the reference without an adapter"],
)
@pytest.mark.parametrize("fused", [None, False])
def test_options(options, fused, tiny_path, tmp_path):
    use = {"packed": True, "packed_tokens": 24, "fused": fused}
    both(tiny_path, use=use, output_dir=tmp_path, **{"beta": 0.1, **options})


def test_a_group_computes_its_prompt_once(tiny_path, tmp_path):
    """Eight completions of two prompts: 8 (6 + 4) tokens in the padded batch."""
    prompts = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    completions = torch.arange(4, 36).view(8, 4)  # no two begin alike
    ids = torch.cat([prompts.repeat_interleave(4, 0), completions], 1)
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    batch = batch_of(ids, 6, advantages=[1.0, -1.0] * 4)
    expected = trainer.compute_loss(trainer.model, dict(batch))
    with use_fastrl(trainer, packed=True):
        COUNTED.clear()
        loss = trainer.compute_loss(trainer.model, dict(batch))
    assert COUNTED == [2 * 6 + 8 * 4]
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("kind", PADDED)
def test_losses_of_padding_are_refused(kind, tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, kind, output_dir=tmp_path)
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match="packed must be None or False: TRL reads values of pad"):
        use_fastrl(trainer, packed=True)
    assert trainer.__dict__ == before
    with use_fastrl(trainer) as handle:
        assert not handle.packed
        assert handle.packed_reason.startswith("TRL reads values of padding")


def test_a_model_that_cannot_be_packed_runs_padded(tiny_path, tmp_path):
    options = {"model_init_kwargs": {"attn_implementation": "eager"}, "output_dir": tmp_path}
    with pytest.raises(ValueError, match=r"packed must be None or False: .*eager"):
        use_fastrl(make_trainer(tiny_path, **options), packed=True)
    handle, _ = both(tiny_path, **options, max_steps=1)
    assert not handle.packed
    assert "eager" in handle.packed_reason


def test_positions_of_a_short_prompt_begin_at_0(tmp_path):
    """TRL pads on the left, and GPT-2 then reads the prompt at other positions than alone."""
    path = save_model(tmp_path / "model", "GPT2Config", n_positions=32, **GPT2)
    trainer = make_trainer(path, output_dir=tmp_path)
    model = trainer.model.eval()
    ids = torch.tensor([[0, 0, 0, 7, 8, 9, 10], [4, 5, 6, 7, 11, 12, 13]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    alone = []
    for row, real in zip(ids, mask.bool(), strict=True):
        logits = model(input_ids=row[real][None]).logits[0] / trainer.temperature
        logprobs = logits[:-1].log_softmax(-1)
        alone.append(logprobs.gather(-1, row[real][1:, None])[-3:, 0])
    arguments = (model, ids, mask, 3)
    distances = []
    for use in ({"packed": False}, {"packed": True}):
        with use_fastrl(trainer, **use), torch.no_grad():
            logprobs, *_ = trainer._get_per_token_logps_and_entropies(*arguments)
        distances.append(float((logprobs - torch.stack(alone)).abs().max()))
    assert distances[0] > 0.1
    assert distances[1] < 1e-5


@pytest.mark.parametrize(
    ("use", "error", "sentence"),
    [
        ({"packed": 1.0}, TypeError, "packed must be None or a bool, got float"),
        ({"packed_tokens": 8.0}, TypeError, "packed_tokens must be None or an int, got float"),
        ({"packed_tokens": True}, TypeError, "packed_tokens must be None or an int, got bool"),
        ({"packed_tokens": 0}, ValueError, "packed_tokens must be at least 1, got 0"),
        ({"packed": False, "packed_tokens": 8}, ValueError, "must be None with packed=False"),
    ],
)
def test_arguments(use, error, sentence, tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    with pytest.raises(error, match=sentence):
        use_fastrl(trainer, **use)


def test_packed_tokens_on_several_ranks_are_refused(tiny_path, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="packed_tokens must be None on 2 processes, got 8"):
        use_fastrl(trainer, packed_tokens=8)


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
    use, options, sentence, tiny_path, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("fastrl"), "propagate", True)
    trainer = make_trainer(tiny_path, output_dir=tmp_path, **options)
    caplog.clear()
    use_fastrl(trainer, **use)
    lines = [record.message for record in caplog.records if "runs on" in record.message]
    assert len(lines) == 1
    assert sentence in lines[0]


@pytest.mark.parametrize("packed", [None, True])
def test_a_sharded_model_is_tried_in_its_first_call(packed, tiny_path, tmp_path, monkeypatch):
    """And is padded from then on, or stops the run, if its rows have other values."""
    from fastrl.integrations.trl import packed_backbones

    monkeypatch.setattr(packed_backbones, "is_whole", lambda part: False)
    monkeypatch.setattr(packed_backbones, "why_not_packed", lambda part, run: "its values differ")
    trainer = make_trainer(tiny_path, "SFT", output_dir=tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
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


def test_a_new_model_with_padding_only_rows(tiny_path, tmp_path):
    """A completion without tokens, and a prompt of one."""
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    ids = torch.randint(4, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 3:] = mask[1, :2] = mask[2, 5:] = 0
    batch = batch_of(ids, 3, mask=mask, advantages=[1.0, -1.0, 0.5, 0.1])
    expected = trainer.compute_loss(trainer.model, dict(batch))
    with use_fastrl(trainer, packed=True):
        torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), expected)


def test_sdpa_is_transformers_own_for_other_calls():
    """Registration of the attention by sequence leaves calls of other models as they are."""
    model = make_model()
    ids = torch.tensor([[4, 5, 6, 7]])
    expected = model(input_ids=ids).logits
    attention = transformers.AttentionInterface()["sdpa"]
    assert attention is packed_rows._attend
    eager = make_model(attn_implementation="eager")
    torch.testing.assert_close(eager(input_ids=ids).logits, expected)


def test_a_warning_that_is_an_error_leaves_the_trainer(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    trainer.model.lm_head.register_forward_hook(lambda *_: None)
    before = dict(trainer.__dict__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="hooks on the LM head"):
            use_fastrl(trainer)
    assert trainer.__dict__ == before
