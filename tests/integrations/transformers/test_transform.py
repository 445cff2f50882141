"""The scale and softcap of a model are read from it, and compared with its own logits."""

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.runs import VOCABULARY, make_model

transformers = needed("transformers")
from fastrl.integrations.transformers import (  # noqa: E402
    inside_forward,
    last_hidden_states,
    lm_head,
)
from fastrl.integrations.transformers.transform import prove  # noqa: E402


def calls_of(module):
    """Count the calls of a module's forward."""
    own, calls = module.forward, []

    def counted(*arguments, **options):
        calls.append(1)
        return own(*arguments, **options)

    module.forward = counted
    return calls


def with_logits(model, change):
    """Let a model's forward change its logits."""
    own = model.forward

    def forward(*arguments, **options):
        outputs = own(*arguments, **options)
        outputs.logits = change(outputs.logits)
        return outputs

    model.forward = forward
    return model


def test_a_model_is_compared_once_and_its_backbone_is_not_run():
    model = make_model()
    of_model, of_backbone = calls_of(model), calls_of(model.model)
    for _ in range(3):
        lm_head(model)
    assert (len(of_model), of_backbone) == (2, [])  # once more to make the logits large
    prove(model)
    assert len(of_model) == 2


@pytest.mark.parametrize(
    ("scaled", "expected"), [(lambda x: x / 4, 0.25), (lambda x: 4 * x, 4.0), (lambda x: x, 1.0)]
)
def test_the_meaning_of_a_scale_is_what_the_logits_show(scaled, expected):
    # logits_scaling divides in Granite, multiplies in HyperCLOVA X, and may be unused
    model = make_model()
    model.config.logits_scaling = 4.0
    assert lm_head(with_logits(model, scaled)).logit_scale == expected


@pytest.mark.parametrize("name", ["logit_scale", "output_multiplier", "lm_head_multiplier"])
def test_a_scale_that_no_forward_uses_is_not_applied(name):
    model = make_model()
    setattr(model.config, name, 4.0)
    assert lm_head(model).logit_scale == 1.0
    model = make_model()
    setattr(model.config, name, 4.0)
    assert lm_head(with_logits(model, lambda x: 4 * x)).logit_scale == 4.0


@pytest.mark.parametrize("value", [None, "inv_sqrt_d_model", float("inf"), True])
def test_a_scale_that_is_no_number_is_ignored(value):
    model = make_model()
    model.config.logit_scale = value
    assert lm_head(model).logit_scale == 1.0


def test_a_softcap_is_found_though_the_models_logits_are_small():
    small = {"initializer_range": 1e-3}
    assert lm_head(make_model("Gemma2Config", final_logit_softcapping=30.0, **small))[4] == 30.0
    # one that the configuration names and the model does not apply
    model = make_model(**small)
    model.config.final_logit_softcapping = 30.0
    assert lm_head(model).logit_softcap is None


CHANGES = {
    "a shift": lambda x: x + torch.arange(x.shape[-1]) / 8,
    "a scale of two percent": lambda x: (1.02 * x.float()).to(x.dtype),
    "an unknown softcap": lambda x: 100 * (x / 100).tanh(),
    "a penalty": lambda x: torch.where(x > 0, 0.9 * x, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_other_logits_are_refused(name, dtype):
    model = with_logits(make_model().to(dtype), CHANGES[name])
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(ValueError, match=r"the logits of LlamaForCausalLM differ .* by \d"):
            lm_head(model)
    with pytest.raises(ValueError, match="the logits of LlamaForCausalLM differ"):
        inside_forward(model, lambda hidden, head: hidden, input_ids=torch.tensor([[5, 6]]))


def test_logits_of_a_part_of_the_vocabulary_are_refused():
    model = with_logits(make_model(), lambda x: x[..., :-3])
    with pytest.raises(ValueError, match="must have the shape of its LM head's"):
        lm_head(model)


def test_a_head_that_is_not_called_is_refused():
    model = make_model()
    other = torch.nn.Linear(16, 61)
    model.get_output_embeddings = lambda: other
    with pytest.raises(ValueError, match="calls the head on something else, or not at all"):
        lm_head(model)


def test_a_head_that_is_called_on_other_states_is_refused():
    model = make_model("ElectraConfig", embedding_size=8, is_decoder=True)
    with pytest.raises(ValueError, match=r"must compute its logits .*`fastrl.logits_policy_loss`"):
        lm_head(model)


INKLING = {
    "num_hidden_layers": 2,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 8,
    "d_rel": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "logits_mup_width_multiplier": 6.0,
}
MINICPM3 = {"dim_model_base": 5, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8}
MINICPM3 |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "changes", "divisor", "size"),
    [
        ("InklingTextConfig", INKLING, 6, VOCABULARY),
        ("InklingTextConfig", {**INKLING, "unpadded_vocab_size": 58}, 6, 58),
        ("MiniCPM3Config", MINICPM3, 3.2, VOCABULARY),
    ],
)
def test_hidden_states_that_are_divided_before_the_head(kind, changes, divisor, size, dtype):
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers without {kind}")
    model = make_model(kind, **changes).to(dtype).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    head, states = lm_head(model), last_hidden_states(model, input_ids=ids)
    logits = states.double() @ head.weight.double().T * head.logit_scale
    assert (head.logit_scale, logits.shape[-1]) == (pytest.approx(1 / divisor), size)
    expected, near = model(input_ids=ids).logits.double(), 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits, expected, rtol=near, atol=near * expected.abs().max().item())


def conditional_gemma3():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = make_model("Gemma3TextConfig", final_logit_softcapping=3.0).config.to_dict()
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def recurrent_gemma():
    changes = {"logits_soft_cap": 3.0, "lru_width": 16, "attention_window_size": 8}
    model = make_model("RecurrentGemmaConfig", num_hidden_layers=3, **changes)
    model.lm_head.weight.data.mul_(20)  # its embeddings are too small for a cap to matter
    return model


# the bounds are those of docs/replace-the-loss/trl.md
@pytest.mark.parametrize(
    ("model", "bound"),
    [
        (recurrent_gemma, 10),
        (conditional_gemma3, 0.5),
        (lambda: make_model("InklingTextConfig", **INKLING), 2),
        (lambda: make_model("InklingTextConfig", **INKLING, unpadded_vocab_size=58), 2),
        (lambda: make_model("MptConfig", n_heads=2, n_layers=1, logit_scale=0.37), 2),
    ],
    ids=["RecurrentGemma", "Gemma3", "Inkling", "padded Inkling", "MPT"],
)
def test_trls_head_ignores_what_some_models_do_to_their_logits(model, bound):
    fused = needed("trl.trainer.utils")
    model, ids = model().eval(), torch.randint(3, 50, (2, 9))
    expected = fastrl.token_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:])
    states = last_hidden_states(model, input_ids=ids)[:, :-1]
    found = fastrl.linear_token_logprobs(states, token_ids=ids[:, 1:], **lm_head(model).arguments())
    assert (found - expected).abs().max() < 1e-5
    fused.add_fused_lm_head(model)  # if this is right one day, docs/replace-the-loss/trl.md is not
    theirs = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    assert (theirs - expected).abs().max() > bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "autocast"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Gemma2Config", {"final_logit_softcapping": 30.0}),
        ("CohereConfig", {"logit_scale": 0.0625}),
        ("GraniteConfig", {"logits_scaling": 7.0}),
    ],
)
def test_logits_of_any_precision_are_equal_to_rounding(kind, changes, dtype):
    model = make_model(kind, **changes)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        lm_head(model if dtype == "autocast" else model.to(dtype))


def test_modes_random_numbers_gradients_and_hooks_are_left_alone():
    model = make_model()
    model.train()
    model.model.layers[0].eval()
    called = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append(1))
        module.register_forward_pre_hook(lambda *_: called.append(1))
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    lm_head(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert called == []
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(input_ids=torch.tensor([[5, 6]]))
    assert called


def test_a_model_without_memory_is_not_compared():
    with torch.device("meta"):
        model = make_model("GraniteConfig", logits_scaling=4.0)
    head = lm_head(model)
    assert (head.logit_scale, head.weight.device.type) == (0.25, "meta")


def test_a_model_whose_forward_raises_keeps_its_modules():
    model = make_model()

    def broken(*_, **__):
        raise RuntimeError("broken")

    model.forward = broken
    model.train()
    with pytest.raises(RuntimeError, match="broken"):
        lm_head(model)
    assert model.forward is broken
    assert "forward" not in model.lm_head.__dict__
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("low", [-100.0, -1e4, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_on_unused_tokens_hides_nothing(low, dtype):
    def biased():
        model = make_model()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(61))
        model.lm_head.bias.data[55:] = low
        return model.to(dtype)

    lm_head(biased())
    model = biased()
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(3 * hidden.tanh())
    with pytest.raises(ValueError, match="the logits of LlamaForCausalLM differ"):
        lm_head(model)


def test_a_value_that_changes_is_compared_again():
    model = make_model("GraniteConfig", logits_scaling=4.0)
    assert lm_head(model).logit_scale == 0.25
    model.config.logits_scaling = 8.0
    expected = model(input_ids=torch.tensor([[5, 6]])).logits
    head = lm_head(model)
    states = model.model(input_ids=torch.tensor([[5, 6]])).last_hidden_state
    torch.testing.assert_close(states @ head.weight.T * head.logit_scale, expected)

    model = make_model("Gemma2Config", final_logit_softcapping=None)
    assert lm_head(model).logit_softcap is None
    model.config.final_logit_softcapping = 2.0
    assert lm_head(model).logit_softcap == 2.0


def test_a_head_of_zeros_is_compared_again_when_it_has_learned():
    model = make_model("HyperCLOVAXConfig", logits_scaling=4.0)
    weight = model.lm_head.weight.detach().clone()
    torch.nn.init.zeros_(model.lm_head.weight)
    lm_head(model)
    model.lm_head.weight.data.copy_(weight)
    assert lm_head(model).logit_scale == 4.0


@pytest.mark.parametrize("rows", [slice(3, 4), slice(None)])
def test_nan_in_the_head_is_nothing_to_refuse(rows):
    model = make_model()
    model.lm_head.weight.data[rows] = float("nan")
    for _ in range(2):
        assert lm_head(model).logit_scale == 1.0


def test_a_first_call_that_is_compiled_is_refused():
    model = make_model()

    def scale(x):
        return x * lm_head(model).logit_scale

    with pytest.raises(Exception, match="must be called once before it is compiled"):
        torch.compile(scale, backend="eager", fullgraph=True)(torch.ones(2))


def test_one_rank_alone_can_call_it_under_ddp():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(make_model())
        calls = calls_of(wrapped)
        lm_head(wrapped)
        assert calls == []
    finally:
        torch.distributed.destroy_process_group()
