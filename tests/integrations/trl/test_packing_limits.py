"""What keeps single batches or models from packed rows, before training and in the middle of it."""

import re

import pytest
import torch
import transformers

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both, compare, first_of, make_trainer, scores
from tests.integrations.trl.runs import batch_of, make_model, make_tokenizer

trl = needed("trl")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from fastrl.integrations.transformers.packed import why_not_packed  # noqa: E402
from fastrl.integrations.trl import use_fastrl  # noqa: E402


def scaled(module, inputs, states):
    """A hook that depends on the rows of a batch."""
    return states * torch.linspace(0.5, 1.0, len(states))[:, None, None]


def scaled_layer(trainer):
    trainer.model.model.layers[0].register_forward_hook(scaled)


def penalized(outputs, labels, num_items_in_batch=None):
    """A loss that reads the logits of padding."""
    scores = outputs.logits[:, :-1].flatten(0, 1).log_softmax(-1)
    nll = torch.nn.functional.nll_loss(scores, labels[:, 1:].flatten(), reduction="sum")
    return nll / num_items_in_batch + 0.1 * outputs.logits.logsumexp(-1).square().mean()


PROMPTS = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}
#: Options of a trainer, and what is done to it.
PADDED = {
    "eager": ({"model_init_kwargs": {"attn_implementation": "eager"}}, None),
    # its hook divides by the length of its input
    "it has hooks on Embedding, which would see packed": ({"neftune_noise_alpha": 5.0}, None),
    "it has hooks on Llama": ({}, scaled_layer),
    "compute_loss_func reads logits": ({"compute_loss_func": penalized}, None),
    "label_smoothing_factor reads logits": ({"label_smoothing_factor": 0.1}, None),
    "its inputs have .*inputs_embeds": ({"peft_config": PROMPTS, "learning_rate": 0.1}, None),
    "its inputs have .*position_ids": ({"padding_free": True, "max_length": None}, None),
}


@pytest.mark.parametrize("reason", PADDED)
def test_what_needs_the_padded_batch_has_it(reason, tiny_path):
    options, prepared = PADDED[reason]
    handle, _ = both(tiny_path, "SFT", prepared, max_steps=2, **options)
    assert not handle.packed
    assert re.search(reason, handle.packed_reason)
    sentence = f"packed must be None or False: .*{reason}"
    with pytest.raises(ValueError, match=sentence), use_fastrl(handle.trainer, packed=True):
        handle.trainer.train()


def test_hooks_on_all_modules(tiny_path):
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *given: scaled(module, *given) if "MLP" in type(module).__name__ else None
    )
    try:
        handle, _ = both(tiny_path, "SFT")
    finally:
        hook.remove()
    assert handle.packed_reason == "there are hooks on all modules, which would see packed rows"


@pytest.fixture
def sft(tiny_path):
    """A trainer, a batch and TRL's loss of it."""
    trainer = make_trainer(tiny_path, "SFT")
    batch = first_of(trainer)
    return trainer, batch, trainer.compute_loss(trainer.model, batch)


def test_packing_goes_on_without_the_hook(sft):
    trainer, batch, expected = sft
    with use_fastrl(trainer) as handle:
        hook = trainer.model.model.layers[0].register_forward_hook(lambda *_: None)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
        assert not handle.packed
        hook.remove()
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
        assert handle.packed


@pytest.mark.parametrize("attention", ["eager", "paged|eager"])
def test_another_attention_later(attention, sft):
    trainer, batch, _ = sft
    found = []
    for packed in (False, None):
        trainer.model.set_attn_implementation("sdpa")
        with use_fastrl(trainer, packed=packed):
            trainer.model.set_attn_implementation(attention)
            found.append(trainer.compute_loss(trainer.model, batch))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("where", ["_global_mapping", "_local_mapping"])
def test_another_sdpa_that_is_registered_later(where, sft, monkeypatch):
    (trainer, batch, expected), attentions = (
        sft,
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS,
    )
    with use_fastrl(trainer) as handle:
        monkeypatch.setitem(getattr(attentions, where), "sdpa", sdpa_attention_forward)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    assert handle.packed_reason == "another function has replaced fastrl's as sdpa"


def test_a_layer_that_loses_the_layout_stops_the_run(sft, monkeypatch):
    """A row would attend to all of its tokens."""
    trainer, *_ = sft
    layer = trainer.model.model.layers[0]
    own, names = layer.forward, ("attention_mask", "position_embeddings", "position_ids")
    with use_fastrl(trainer):
        kept = lambda states, **inputs: own(states, **{name: inputs[name] for name in names})  # noqa: E731
        monkeypatch.setattr(layer, "forward", kept)
        with pytest.raises(ValueError, match="packed rows need layers that pass keywords on"):
            trainer.train()


def test_a_model_that_joins_later_is_tried(tiny_path):
    trainer = make_trainer(tiny_path, "DPO")
    batch, other = first_of(trainer), make_model("StableLmConfig")
    trl.trainer.utils.add_fused_lm_head(other)
    with use_fastrl(trainer, packed=False):
        trainer.ref_model = other
        expected = trainer.compute_loss(trainer.model, batch)
    trainer.ref_model = None
    with use_fastrl(trainer) as handle:
        trainer.ref_model = other
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
        assert not handle.packed


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_states_that_are_not_finite_do_not_hide_others_from_the_trial(value):
    model = make_model().model
    own, states = model.layers[0].forward, model.embed_tokens.weight

    def mixed(x, **inputs):
        return own(x + torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)), **inputs)

    model.layers[0].forward = mixed
    assert "affect each other" in why_not_packed(model)
    with torch.no_grad():
        states[states.shape[0] // 2 :] = value
    assert why_not_packed(model) is not None


def with_a_padding_token(trainer):
    """Give padding an embedding, as pretrained models do where it is another token, too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight[0] = 0.3 * torch.randn(16, generator=generator)


def test_a_label_that_padding_predicts(tiny_path):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def prepared(trainer):
        with_a_padding_token(trainer)
        trainer.data_collator = lambda rows: collate([{"input_ids": x["input_ids"]} for x in rows])

    both(tiny_path, "SFT", prepared, completion_only_loss=False)


def test_the_first_token_after_an_empty_prompt(tiny_path):
    trainer = make_trainer(tiny_path)
    with_a_padding_token(trainer)
    ids = torch.tensor([[0, 0, 0, 7, 8, 9], [4, 5, 6, 10, 11, 12]])
    found = []
    for packed in (False, True):
        with use_fastrl(trainer, packed=packed) as handle:
            found.append(scores(trainer, ids, (ids != 0).long()))
        assert handle.packed == packed
    torch.testing.assert_close(*found)


def test_rows_of_padding_alone(tiny_path):
    """A completion without tokens, and a prompt of one."""
    ids = torch.randint(4, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 3:] = mask[1, :2] = mask[2, 5:] = 0
    batch = batch_of(ids, 3, mask=mask, advantages=[1.0, -1.0, 0.5, 0.1])
    compare(make_trainer(tiny_path), batch, use={"packed": True})


def test_positions_do_not_depend_on_the_other_rows(gpt2_path):
    """A batch with an empty prompt runs padded, at the positions of packed rows."""
    trainer = make_trainer(gpt2_path)
    trainer.model.eval()
    ids = torch.tensor([[0, 5, 6, 10, 11, 12], [0, 0, 0, 7, 8, 9], [4, 5, 6, 7, 8, 9]])
    mask = (ids != 0).long()
    with use_fastrl(trainer, packed=True):
        beside_an_empty_prompt, beside_another = (
            scores(trainer, ids[rows], mask[rows]) for rows in (slice(2), slice(None, None, 2))
        )
    torch.testing.assert_close(beside_an_empty_prompt[0], beside_another[0])


def test_positions_of_a_short_prompt_begin_at_0(gpt2_path):
    """TRL pads on the left, and GPT-2 then reads the prompt at other positions than alone."""
    trainer = make_trainer(gpt2_path)
    model = trainer.model.eval()
    ids = torch.tensor([[0, 0, 0, 7, 8, 9, 10], [4, 5, 6, 7, 11, 12, 13]])
    mask = (ids != 0).long()
    alone, distances = [], []
    for row, real in zip(ids, mask.bool(), strict=True):
        logits = model(input_ids=row[real][None]).logits[0] / trainer.temperature
        logprobs = logits[:-1].log_softmax(-1)
        alone.append(logprobs.gather(-1, row[real][1:, None])[-3:, 0])
    for packed in (False, True):
        with use_fastrl(trainer, packed=packed):
            logprobs = scores(trainer, ids, mask)
        distances.append(float((logprobs - torch.stack(alone)).abs().max()))
    assert distances[0] > 0.1
    assert distances[1] < 1e-5


@pytest.mark.parametrize("weight", [0.5, 3e-4])
def test_adalora_adds_nothing_to_the_fused_loss(weight, tiny_path):
    """PEFT adds its regularization to the loss of the model, which TRL's `GRPOTrainer` ignores."""
    adapter = {"peft_type": "ADALORA", "init_r": 2, "target_r": 1, "total_step": 10}
    adapter |= {"target_modules": ["q_proj"], "orth_reg_weight": weight}
    handle, _ = both(tiny_path, peft_config=adapter, learning_rate=0.05)
    assert handle.fused
