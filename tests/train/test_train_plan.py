"""`--plan`: the predicted memory of a run, from its settings and the model's configuration."""

import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.integrations.transformers import last_hidden_states
from fastrl.train import grpo
from fastrl.train.attention import Span, make_layout
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.model import adapters
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model_shape import Shape, model_shape
from fastrl.train.plan import GIB, layer_bytes, plan, report, to_fit

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 65536,
}
KINDS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}


def save(path, kind="qwen3", **changes):
    KINDS[kind](**{**SIZES, "num_hidden_layers": 2, **changes}).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The configuration of Qwen3-8B."""
    return save(
        tmp_path_factory.mktemp("8b"),
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )


def saved_bytes(kind, layers, config, tokens):
    """What autograd keeps in a forward: the different storages of the saved activations."""
    torch.manual_seed(0)
    sizes = KINDS[kind](**SIZES, num_hidden_layers=layers)
    dtype = getattr(torch, config.weights)
    model = transformers.AutoModelForCausalLM.from_config(sizes, dtype=dtype)
    if config.lora_rank:
        model = adapters.attach(model, config, "base")
    save_memory(model, config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() >= tokens:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that its address is not used again
        return tensor

    half = config.precision == "bfloat16"
    spans = [Span(0, tokens // 2), Span(tokens // 2, tokens)]
    layout = make_layout(spans, torch.device("cpu"))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        last_hidden_states(model, input_ids=ids, sequences=layout)
    return sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weights": "bfloat16"},
        {"precision": "bfloat16"},
        {"lora_rank": 2},
        {"lora_rank": 2, "weights": "bfloat16"},
        {"lora_rank": 2, "weights": "bfloat16", "precision": "bfloat16"},
        {"mlp_tile": 100},
        {"mlp_tile": 100, "weights": "bfloat16"},
    ],
    ids=str,
)
def test_the_bytes_of_a_layer_are_what_autograd_keeps(tmp_path, kind, settings):
    config = GrpoConfig(model=save(tmp_path, kind), **settings)
    tokens = 2400  # two long sequences, which enter the attention without copies
    measured = saved_bytes(kind, 3, config, tokens) - saved_bytes(kind, 2, config, tokens)
    shape = model_shape(config)  # of two layers
    copied = "precision" in settings and "weights" not in settings
    copies = 2 * (shape.weights - shape.embeddings) / 2 if copied else 0
    expected = tokens * layer_bytes(config, shape) + copies  # and autocast's weights of a layer
    assert measured == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted(tmp_path, tied):
    config = GrpoConfig(model=save(tmp_path, tie_word_embeddings=tied))
    sizes = transformers.Qwen3Config.from_pretrained(tmp_path)
    real = transformers.AutoModelForCausalLM.from_config(sizes)
    shape = model_shape(config)
    assert shape.weights == sum(p.numel() for p in real.parameters())
    assert shape.trained == shape.weights
    assert shape.embeddings == (1 if tied else 2) * 97 * 64
    frozen = model_shape(replace(config, freeze_head=True))
    assert frozen.trained == shape.weights - shape.embeddings


def test_an_adapter_is_counted(tmp_path):
    peft = pytest.importorskip("peft")
    config = GrpoConfig(model=save(tmp_path), lora_rank=4, dora=True)
    sizes = transformers.Qwen3Config.from_pretrained(tmp_path)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
    real = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(sizes), lora)
    trained = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert model_shape(config).trained == model_shape(config).adapter == trained


def test_a_long_sequence_of_an_8b_model_with_lora_fits_80_gib(large):
    config = GrpoConfig(
        model=large,
        weights="bfloat16",
        precision="bfloat16",
        lora_rank=16,
        gradient_checkpointing=True,
        mlp_tile=2048,
        prompts_per_step=1,
        minibatches=1,
        max_prompt_tokens=4096,
        max_new_tokens=131072 - 4096,
    )
    shape = model_shape(config)
    assert 8.1e9 < shape.weights < 8.3e9
    found = plan(config, shape, tokens=131072, device="gpu")
    assert found.peak < 80 * GIB
    assert found.kept == 36 * 131072 * 4096 * 2  # the input of each layer
    without = plan(
        replace(config, gradient_checkpointing=False), shape, tokens=131072, device="gpu"
    )
    assert without.peak > 300 * GIB
    offloaded = replace(config, offload_checkpoints=True)
    moved = plan(offloaded, shape, tokens=131072, device="gpu")
    assert moved.peak < found.peak - 30 * GIB
    assert moved.host == found.kept


SHAPE = Shape(
    layers=28,
    hidden=1024,
    inner=3072,
    queries=2048,
    keys=1024,
    vocabulary=151936,
    normed_heads=True,
    weights=596_000_000,
    embeddings=155_600_000,
    tied=True,
    trained=596_000_000,
    adapter=0,
)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"gradient_checkpointing": True}, "kept"),
        ({"gradient_checkpointing": True, "mlp_tile": 1024}, "kept"),
        ({"tokens_per_micro_batch": 4096}, "kept"),
        ({"tokens_per_generation": 4096}, "cache"),
        ({"weights": "bfloat16"}, "weights"),
        ({"weights": "bfloat16", "optimizer": "adamw_8bit"}, "optimizer"),
        ({"optimizer": "adamw_offloaded"}, "optimizer"),
        ({"precision": "bfloat16"}, "kept"),
    ],
    ids=str,
)
def test_each_switch_saves_its_part(changes, part):
    base = GrpoConfig(tokens_per_generation=2**20)
    before = plan(base, SHAPE, tokens=4096, device="gpu")
    after = plan(replace(base, **changes), SHAPE, tokens=4096, device="gpu")
    assert getattr(after, part) < getattr(before, part)


def test_the_logits_are_what_loss_linear_saves():
    logits = plan(GrpoConfig(loss="logits"), SHAPE, tokens=4096, device="gpu")
    linear = plan(GrpoConfig(), SHAPE, tokens=4096, device="gpu")
    assert logits.loss - linear.loss > 16384 * 151936 * 4


def test_what_to_switch_on():
    config = GrpoConfig(loss="logits")
    changes, best = to_fit(config, SHAPE, tokens=8192, device="gpu", limit=24 * GIB)
    assert best.peak <= 24 * GIB
    assert best == plan(replace(config, **changes), SHAPE, tokens=8192, device="gpu")
    assert changes["loss"] == "linear"
    nothing, _ = to_fit(config, SHAPE, tokens=8192, device="gpu", limit=10_000 * GIB)
    assert nothing == {}
    changes, best = to_fit(config, SHAPE, tokens=8192, device="gpu", limit=1 * GIB)
    assert best.peak > GIB
    assert {"gradient_checkpointing", "offload_checkpoints", "loss"} <= changes.keys()


@pytest.mark.parametrize("config", [GrpoConfig(device="cpu"), PpoConfig(device="cpu")])
def test_the_report_names_every_part(config):
    text = report(config, 4.0)
    assert "0.6 million trained" in text
    for part in ("weights", "gradients", "optimizer", "activations", "cache", "loss", "peak"):
        assert part in text
    assert text.endswith("fits 4 GiB")


def test_the_command_line_prints_the_plan_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["grpo", "--plan", "0.001", "--model", save(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="0"):
        main(GrpoConfig, grpo.train)
    assert "does not fit 0.001 GiB with" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_models_that_cannot_be_planned_are_named(tmp_path):
    with pytest.raises(ValueError, match="model must be a causal LM with a configuration"):
        model_shape(GrpoConfig(model=str(tmp_path / "nothing")))
    experts = transformers.Qwen3MoeConfig(
        **SIZES, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2
    )
    experts.save_pretrained(tmp_path / "moe")
    with pytest.raises(ValueError, match="layers of attention and an MLP, got qwen3_moe with exp"):
        model_shape(GrpoConfig(model=str(tmp_path / "moe")))


@pytest.mark.parametrize(
    ("settings", "limit", "message"),
    [
        ({}, -1.0, "plan must be above 0 GiB, got -1"),
        ({}, float("nan"), "plan must be above 0 GiB"),
        ({"attention": "eager"}, 1.0, "plan: attention must be by_sequence"),
        ({"lora_rank": 2, "lora_targets": ["proj"]}, 1.0, "lora_targets must be names of linear"),
    ],
)
def test_what_cannot_be_planned_is_named(tmp_path, settings, limit, message):
    with pytest.raises(ValueError, match=message):
        report(GrpoConfig(model=save(tmp_path), **settings), limit)


def test_a_reference_is_a_second_copy_of_the_weights():
    plain, with_kl = (
        plan(GrpoConfig(kl_coef=kl), SHAPE, tokens=1024, device="gpu") for kl in (0.0, 0.1)
    )
    assert with_kl.weights - plain.weights == 4 * SHAPE.weights
