"""What keeps single batches or models from packed rows, before training and in the middle of it."""

import pytest
import torch
import transformers

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both, make_trainer
from tests.integrations.trl.runs import make_model, make_tokenizer, save_model

needed("trl")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from fastrl.integrations.transformers.packed import why_not_packed  # noqa: E402
from fastrl.integrations.trl import use_fastrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_noise_on_embeddings_has_the_size_of_the_batch(tiny_path, tmp_path):
    """NEFTune's hook divides by the length of its input, so the batch stays padded."""
    handle, _ = both(tiny_path, "SFT", output_dir=tmp_path, neftune_noise_alpha=5.0)
    assert handle.packed_reason == "it has hooks on Embedding, which would see packed rows"


def test_hooks_on_layers_see_the_batch(tiny_path, tmp_path):
    def scaled(module, inputs, states):
        return states * torch.linspace(0.5, 1.0, len(states))[:, None, None]

    def prepared(trainer):
        trainer.model.model.layers[0].register_forward_hook(scaled)

    handle, _ = both(tiny_path, "SFT", prepared, output_dir=tmp_path)
    assert not handle.packed
    with pytest.raises(ValueError, match="packed must be None or False: it has hooks on Llama"):
        use_fastrl(handle.trainer, packed=True)


def test_packing_goes_on_without_the_hook(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, "SFT", output_dir=tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    with use_fastrl(trainer) as handle:
        hook = trainer.model.model.layers[0].register_forward_hook(lambda *_: None)
        padded = trainer.compute_loss(trainer.model, batch)
        assert not handle.packed
        hook.remove()
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), padded)
        assert handle.packed


@pytest.mark.parametrize("attention", ["eager", "paged|eager"])
def test_another_attention_later(attention, tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, "SFT", output_dir=tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    found = []
    for packed in (False, None):
        trainer.model.set_attn_implementation("sdpa")
        with use_fastrl(trainer, packed=packed):
            trainer.model.set_attn_implementation(attention)
            found.append(trainer.compute_loss(trainer.model, batch))
    torch.testing.assert_close(*found)


def test_a_model_that_joins_later_is_tried(tiny_path, tmp_path):
    trl = needed("trl")
    trainer = make_trainer(tiny_path, "DPO", output_dir=tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    other = make_model("StableLmConfig")
    trl.trainer.utils.add_fused_lm_head(other)
    with use_fastrl(trainer, packed=False):
        trainer.ref_model = other
        expected = trainer.compute_loss(trainer.model, batch)
    trainer.ref_model = None
    with use_fastrl(trainer) as handle:
        trainer.ref_model = other
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
        assert not handle.packed


def without_layout(layer, own):
    """A forward of a layer that passes no other keywords on."""
    names = ("attention_mask", "position_embeddings", "position_ids")
    return lambda states, **inputs: own(states, **{name: inputs[name] for name in names})


def test_a_layer_that_loses_the_layout_stops_the_run(tiny_path, tmp_path):
    """A row would attend to all of its tokens."""
    trainer = make_trainer(tiny_path, "SFT", output_dir=tmp_path)
    layer = trainer.model.model.layers[0]
    with use_fastrl(trainer):
        layer.forward = without_layout(layer, layer.forward)
        with pytest.raises(ValueError, match="packed rows need layers that pass keywords on"):
            trainer.train()
    del layer.forward


@pytest.mark.parametrize("where", ["_global_mapping", "_local_mapping"])
def test_another_sdpa_that_is_registered_later(where, tiny_path, tmp_path, monkeypatch):
    attentions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS

    trainer = make_trainer(tiny_path, "SFT", output_dir=tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, batch)
    with use_fastrl(trainer) as handle:
        monkeypatch.setitem(getattr(attentions, where), "sdpa", sdpa_attention_forward)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected)
    assert handle.packed_reason == "another function has replaced fastrl's as sdpa"


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


def test_hooks_on_all_modules(tiny_path, tmp_path):
    def scaled(module, inputs, states):
        if type(module).__name__ == "LlamaMLP":
            return states * torch.linspace(0.5, 1.0, len(states))[:, None, None]
        return None

    hook = torch.nn.modules.module.register_module_forward_hook(scaled)
    try:
        handle, _ = both(tiny_path, "SFT", output_dir=tmp_path)
    finally:
        hook.remove()
    assert handle.packed_reason == "there are hooks on all modules, which would see packed rows"


def with_a_padding_token(trainer):
    """Give padding an embedding, as pretrained models do where it is another token, too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight[0] = 0.3 * torch.randn(16, generator=generator)


def test_a_label_that_padding_predicts(tiny_path, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def prepared(trainer):
        with_a_padding_token(trainer)
        trainer.data_collator = lambda rows: collate([{"input_ids": x["input_ids"]} for x in rows])

    both(tiny_path, "SFT", prepared, output_dir=tmp_path, completion_only_loss=False)


def test_the_first_token_after_an_empty_prompt(tiny_path, tmp_path):
    trainer = make_trainer(tiny_path, output_dir=tmp_path)
    with_a_padding_token(trainer)
    ids = torch.tensor([[0, 0, 0, 7, 8, 9], [4, 5, 6, 10, 11, 12]])
    mask = (ids != 0).long()
    found = []
    for packed in (False, True):
        with torch.no_grad(), use_fastrl(trainer, packed=packed) as handle:
            found.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 3)[0])
        assert handle.packed == packed
    torch.testing.assert_close(*found)


def test_positions_do_not_depend_on_the_other_rows(tmp_path):
    """A batch with an empty prompt runs padded, at the positions of packed rows."""
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    path = save_model(tmp_path / "model", "GPT2Config", n_layer=1, n_head=2, **off)
    trainer = make_trainer(path, output_dir=tmp_path)
    trainer.model.eval()
    ids = torch.tensor([[0, 5, 6, 10, 11, 12], [0, 0, 0, 7, 8, 9], [4, 5, 6, 7, 8, 9]])
    mask = (ids != 0).long()
    with torch.no_grad(), use_fastrl(trainer, packed=True):
        score = trainer._get_per_token_logps_and_entropies
        beside_an_empty_prompt = score(trainer.model, ids[:2], mask[:2], 3)[0]
        beside_another = score(trainer.model, ids[::2], mask[::2], 3)[0]
    torch.testing.assert_close(beside_an_empty_prompt[0], beside_another[0])


def test_a_loss_function_of_the_users(tiny_path, tmp_path):
    """Which may read the logits of padding."""

    def loss(outputs, labels, num_items_in_batch=None):
        scores = outputs.logits[:, :-1].flatten(0, 1).log_softmax(-1)
        nll = torch.nn.functional.nll_loss(scores, labels[:, 1:].flatten(), reduction="sum")
        return nll / num_items_in_batch + 0.1 * outputs.logits.logsumexp(-1).square().mean()

    handle, _ = both(tiny_path, "SFT", output_dir=tmp_path, compute_loss_func=loss)
    assert "compute_loss_func reads logits" in handle.packed_reason
    handle, _ = both(tiny_path, "SFT", output_dir=tmp_path, label_smoothing_factor=0.1)
    assert "label_smoothing_factor reads logits" in handle.packed_reason


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("inputs_embeds", {"peft_config": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}}),
        ("position_ids", {"padding_free": True, "max_length": None}),
    ],
)
def test_batches_with_other_inputs(name, options, tiny_path, tmp_path):
    if name == "inputs_embeds":
        needed("peft")
    trainer = make_trainer(tiny_path, "SFT", output_dir=tmp_path, **options)
    handle = use_fastrl(trainer)
    trainer.train()
    assert name in handle.packed_reason
    assert handle.packed_reason.startswith("its inputs have ")
    handle.undo()
    with (
        use_fastrl(trainer, packed=True),
        pytest.raises(ValueError, match=f"packed must be None or False: its inputs have .*{name}"),
    ):
        trainer.train()


@pytest.mark.parametrize("weight", [0.5, 3e-4])
def test_adalora_adds_nothing_to_the_fused_loss(weight, tiny_path, tmp_path):
    """PEFT adds its regularization to the loss of the model, which TRL's `GRPOTrainer` ignores."""
    needed("peft")
    adapter = {"peft_type": "ADALORA", "init_r": 2, "target_r": 1, "total_step": 10}
    adapter |= {"target_modules": ["q_proj"], "orth_reg_weight": weight}
    handle, _ = both(tiny_path, output_dir=tmp_path, peft_config=adapter, learning_rate=0.05)
    assert handle.fused
