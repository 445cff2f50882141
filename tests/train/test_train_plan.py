"""`--plan`: the predicted memory of a run, from its settings and the model's configuration."""

import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastrl.integrations.transformers import last_hidden_states
from fastrl.integrations.transformers.by_sequence import Span, make_layout
from fastrl.train import adapters, grpo
from fastrl.train.command_line import main
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.model_shape import Sequences, Shape, activations
from fastrl.train.plan import GIB, Minibatch, plan, report, to_fit
from fastrl.train.policy import batches
from fastrl.train.recomputation import save_memory
from fastrl.train.rollout import Rollout

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 160, "head_dim": 24}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
HALF = {"weights": "bfloat16", "precision": "bfloat16"}
LARGE = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
LARGE |= {"num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8}


def save(path, kind="qwen3", **changes):
    transformers.AutoConfig.for_model(kind, **{**SIZES, **changes}).save_pretrained(path)
    return str(path)


def saved_bytes(config, layers, tokens):
    """What autograd keeps in a forward: the different storages of the saved activations."""
    sizes = transformers.AutoConfig.from_pretrained(config.model)
    sizes.num_hidden_layers = layers
    if hasattr(sizes, "layer_types"):
        sizes.layer_types = sizes.layer_types[:1] * layers
    dtype = getattr(torch, config.weights)
    model = transformers.AutoModelForCausalLM.from_config(sizes, dtype=dtype)
    if config.lora_rank:
        model = adapters.attach(model, config, "base")
    save_memory(model, config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # so that its address is not used again
        return tensor

    spans = [Span(0, tokens // 2), Span(tokens // 2, tokens)]
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"),
    ):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        layout = make_layout(spans, torch.device("cpu"))
        last_hidden_states(model, input_ids=ids, sequences=layout)
    return sum(storage.nbytes() for storage in kept.values())


SETTINGS = [
    {},
    {"precision": "bfloat16"},
    {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj"]},
    {"lora_rank": 2, **HALF},
    {"mlp_tile": 512, "gradient_checkpointing": True},
]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_bytes_of_a_layer_are_what_autograd_keeps(tmp_path, kind, settings):
    config = GrpoConfig(model=save(tmp_path, kind), **settings)
    tokens = 2400
    measured = saved_bytes(config, 3, tokens) - saved_bytes(config, 2, tokens)
    run = config.precision, config.gradient_checkpointing, config.mlp_tile
    found = activations(Shape(config), run, Sequences(64, tokens // 2 - 64, 1), tokens)
    assert found.kept / 2 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted(tmp_path, tied):
    config = GrpoConfig(model=save(tmp_path, tie_word_embeddings=tied), lora_rank=4)
    real = transformers.AutoModelForCausalLM.from_config(Shape(config)._of_model)
    weights = sum(p.numel() for p in real.parameters())
    adapted = adapters.attach(real, config, "base")
    shape, full = Shape(config), Shape(replace(config, lora_rank=None))
    assert shape.weights == full.weights == full.trained == weights
    assert shape.embeddings == (1 if tied else 2) * 97 * 64
    assert shape.adapter == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert Shape(replace(full._config, freeze_head=True)).trained == weights - full.embeddings


ON = {"gradient_checkpointing": True, "mlp_tile": 512}
ROWS = {**ON, "tokens_per_micro_batch": 1024}
BITS = {**ON, "optimizer": "adamw_8bit", "freeze_head": True}
Q8 = {"vocab_size": 8000, "num_hidden_layers": 8}
Q151 = {"vocab_size": 151936, "tie_word_embeddings": True}
L32 = {"kind": "llama", "vocab_size": 32000, "tie_word_embeddings": True}
# by bench/studies/train_memory.py: MB, prompts, completions of each, their tokens, sizes, settings
MEASURED = {
    "rows-of-1k": (93, (2, 8, 64, 448), Q8, ROWS),
    "8-bit-freeze-head": (84, (1, 4, 64, 448), Q8, BITS),
    "large-vocabulary-4k": (515, (1, 8, 64, 448), Q151, ROWS),
    "long-prompts": (208, (1, 16, 1000, 200), L32, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_prediction_is_within_a_tenth_of_what_was_measured(tmp_path, name):
    measured, shape, changes, settings = MEASURED[name]
    sizes = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 4}
    path = save(tmp_path, **{**sizes, "tie_word_embeddings": False, **changes})
    names = ("prompts_per_step", "group_size", "max_prompt_tokens", "max_new_tokens")
    run = dict(zip(names, shape, strict=True))
    config = GrpoConfig(model=path, minibatches=1, **run, **settings)
    found = plan(config, Shape(config), device="cpu")
    beyond = found.learning - found.weights - found.optimizer
    assert beyond / 1e6 == pytest.approx(measured, rel=0.1)


def test_more_tokens_in_a_row_never_take_less(tmp_path):
    """A chunk of logits is as large as any row of so many tokens makes it."""
    path = save(tmp_path, vocab_size=151936, tie_word_embeddings=True)
    config = GrpoConfig(model=path, lora_rank=4, max_new_tokens=448)
    rows = [replace(config, tokens_per_micro_batch=n) for n in (1984, 1987, 2048)]
    learning = [plan(row, Shape(config), device="cpu").learning for row in rows]
    assert learning == sorted(learning)


def test_score_centering_takes_the_most_likely_tokens_of_a_step(tmp_path):
    """Ids and log-probabilities of 4 bytes each; a row copies its own, and ids to 8."""
    run = {"prompts_per_step": 10, "group_size": 4, "max_new_tokens": 100, "minibatches": 1}
    run |= {"model": save(tmp_path), "loss": "logits", "max_prompt_tokens": 8}
    configs = [GrpoConfig(**run, score_centering=k) for k in (None, 5, 97, 5000)]
    without, some, most, more = (plan(each, Shape(each), device="gpu") for each in configs)
    assert some.top_logprobs == 10 * 4 * 100 * 5 * 8
    assert some.generation - without.generation == some.top_logprobs
    copied = some.loss_workspace - without.loss_workspace
    assert copied == 16 * 5 * Minibatch.of(configs[0]).scored
    assert some.learning - without.learning in (some.top_logprobs, some.top_logprobs + copied)
    assert without.top_logprobs == 0
    assert most == more


@pytest.mark.parametrize("attention", ["by_sequence", "flash_attention_2"])
@pytest.mark.parametrize("limit", [16384, 1500])
def test_a_minibatch_is_packed_as_in_the_loops(attention, limit):
    """Its rows have the most tokens that packing would put there, and as many scored ones."""
    run = {"prompts_per_step": 5, "group_size": 3, "minibatches": 2, "max_prompt_tokens": 400}
    run |= {"max_new_tokens": 300, "tokens_per_micro_batch": limit, "attention": attention}
    mask = torch.ones(9, 300, dtype=torch.bool)  # three groups
    rollout = Rollout([[1] * 400] * 3, torch.arange(3).repeat_interleave(3), *[mask] * 4)
    rows = list(batches(rollout, torch.arange(9), mask, GrpoConfig(**run)))
    found = Minibatch.of(GrpoConfig(**run))
    assert found.several == (len(rows) > 1)
    largest = max(row.input_ids.shape[1] for row in rows)
    assert largest == found.row if len(rows) == 1 else largest <= found.row == limit
    assert max(len(row.token_ids) for row in rows) <= found.scored
    if len(rows) == 1:
        assert found.scored == 9 * 300
        spans = found.sequences.spans(found.row)
        assert make_layout(spans, torch.device("cpu")).blocks == rows[0].layout.blocks


def test_what_to_switch_on(tmp_path):
    run = {"max_prompt_tokens": 4096, "max_new_tokens": 28673, "lora_rank": 16, "loss": "logits"}
    config = GrpoConfig(model=save(tmp_path, **LARGE), **run, **HALF)
    shape = Shape(config)
    changes, best = to_fit(config, shape, device="gpu", limit=12 * GIB)
    assert best == plan(replace(config, **changes), shape, device="gpu")
    assert best.peak <= 12 * GIB
    assert best.host_memory == 12 * 32768 * 4096 * 2  # the input of each layer
    assert {"gradient_checkpointing", "offload_checkpoints", "loss"} <= changes.keys()
    assert to_fit(config, shape, device="gpu", limit=10_000 * GIB)[0] == {}


@pytest.mark.parametrize("loop", [GrpoConfig, PpoConfig])
def test_the_warm_start_below_an_adapter_trains_all_weights(tmp_path, loop):
    own = {"model": save(tmp_path), "prompts": ("a.jsonl", "b.jsonl"), "warm_start_steps": 2}
    lora = {"lora_rank": 2, "lora_targets": ("q_proj",), "kl_coef": 0.1}
    lora |= {"prompts_per_step": 1, "minibatches": 1}  # the warm start has 16 prompts
    adapted = loop(**own, **lora)
    full = loop(**own, kl_coef=0.0, prompts_per_step=16, minibatches=1)
    found = plan(adapted, Shape(adapted), device="cpu")
    of_all = plan(full, Shape(full), device="cpu")
    assert found.warm_start == of_all.learning > found.learning
    assert found.peak == max(found.warm_start, found.generation)
    assert of_all.warm_start == 0
    unwarmed = replace(adapted, warm_start_steps=0)
    assert plan(unwarmed, Shape(unwarmed), device="cpu").warm_start == 0


def test_the_command_line_prints_the_plan_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["grpo", "--plan", "0.001", "--model", save(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="0"):
        main(GrpoConfig, grpo.train)
    assert "does not fit 0.001 GiB with" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert report(PpoConfig(device="cpu", plan=4.0)).endswith("fits 4 GiB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "./nothing"}, "model must be a causal LM with a config"),
        ({"model": "moe"}, "attention and an MLP, got qwen3_moe with exp"),
        ({"attention": "eager"}, "plan: attention must be by_sequence"),
        ({"lora_rank": 2, "lora_targets": ["proj"]}, "lora_targets must be names of layers"),
    ],
)
def test_what_cannot_be_planned_is_named(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    save("moe", "qwen3_moe", num_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=message):
        report(GrpoConfig(**{"plan": 1.0, **settings}))
