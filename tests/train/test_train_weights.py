"""What is trained and kept: weights in bfloat16, runs with adapters, frozen heads, references."""

import copy
import shutil

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file

from fastrl.train import grpo
from fastrl.train.config import GrpoConfig
from fastrl.train.model import loading
from fastrl.train.model.loading import load
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.reference import Reference
from fastrl.train.policy import rollout_logprobs
from fastrl.train.run.checkpoint import latest
from tests.support.adapters import (
    BF16,
    DORA,
    KINDS,
    LORA,
    RECORDS,
    logits,
    move_adapter,
    rollout_of,
)
from tests.support.train_runs import rows, run, weights


@pytest.mark.parametrize("new", [True, False])
def test_bfloat16_weights_keep_float32_positions(base, tmp_path, new):
    model, tokenizer = load(None if new else str(base), "cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = load(str(tmp_path / "saved"), "cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(model))


EVERYTHING = {"gradient_checkpointing": True, "mlp_tile": 8, "tokens_per_micro_batch": 32}
RUNS = {
    "lora": {**LORA, **EVERYTHING},
    "dora_bfloat16": {**DORA, **BF16},
    "lora_of_head": KINDS["lora_of_head"],
    "warm_start": {**DORA, "warm_start_steps": 3, "warm_start_batch": 6},
    "masters": {**BF16, **EVERYTHING},
    "eight_bit": {**BF16, "rounding": "stochastic", "optimizer": "adamw_8bit"},
    "frozen_head": {"freeze_head": True},
}


@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        ("grpo", "lora"),
        ("ppo", "lora"),
        ("grpo", "dora_bfloat16"),
        ("ppo", "lora_of_head"),
        ("grpo", "warm_start"),
        ("grpo", "masters"),
        ("ppo", "eight_bit"),
        ("ppo", "frozen_head"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(small, base, loop, kind):
    if kind == "eight_bit":
        pytest.importorskip("torchao")
    new = kind in ("warm_start", "frozen_head")  # the small new model is kept with the run
    small |= {"kl_coef": 0.05, "save_every": 100, "eval_every": 100, "prompts_per_step": 4}
    small |= {"minibatches": 2, **RUNS[kind]}
    small |= {} if new else {"model": str(base)}
    whole = run(loop, small, name="whole", steps=4).directory
    parts = run(loop, small, name="parts", steps=2).directory
    run(loop, small, name="parts", steps=4, resume=True)
    logged = rows(parts)
    del logged[2]["held_out_reward"]  # measured because the first part ended there
    assert logged == rows(whole)
    last = [latest(directory / "checkpoints") for directory in (whole, parts)]
    file = "adapter_model.safetensors" if "lora_rank" in small else "model.safetensors"
    one, other = (load_file(checkpoint / file) for checkpoint in last)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    one, other = weights(whole), weights(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    begun = load_file(base / "model.safetensors") if not new else None
    if begun is not None:
        assert any(not torch.equal(begun[name], one[name].to(begun[name])) for name in begun)
    assert (whole / "base").exists() == (kind == "warm_start")
    assert (whole / "reference").exists() == ("lora_rank" not in small)


def test_a_run_whose_directory_was_moved(small, tmp_path):
    small |= {**LORA, "steps": 1, "name": "run"}
    directory = run("grpo", small).directory
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(directory, tmp_path / "elsewhere" / "run")
    summary = run("grpo", small, out_dir=str(tmp_path / "elsewhere"), steps=2, resume=True)
    assert summary.step == 2
    load(str(latest(summary.directory / "checkpoints")), "cpu")
    shutil.rmtree(moved / "base")
    with pytest.raises(ValueError, match=r"resume: .*base is missing"):
        run("grpo", small, out_dir=str(tmp_path / "elsewhere"), steps=3, resume=True)


@pytest.mark.parametrize(("folder", "settings"), [("base", LORA), ("reference", {"kl_coef": 0.1})])
def test_damaged_weights_beside_the_checkpoints_are_named(small, folder, settings):
    small |= {**settings, "steps": 1, "name": "run"}
    file = run("grpo", small).directory / folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"resume: .*{folder} is damaged: model.safetensors"):
        run("grpo", small, steps=2, resume=True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_head_is_not_trained(small, base, tmp_path, tied):
    model, tokenizer = load(str(base), "cpu")
    if tied:
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = True
        base = tmp_path / "tied"
        model = type(model)(config)
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
    directory = run("grpo", small, model=str(base), freeze_head=True, steps=2).directory
    before, after = model.state_dict(), weights(directory)
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    assert {name: torch.equal(before[name], after[name]) for name in before} == {
        name: name in ends for name in before
    }


def test_nothing_left_to_train_is_an_error(small, monkeypatch):
    everything = lambda model, config: list(model.parameters())  # noqa: E731
    monkeypatch.setattr(loading, "frozen_head", everything)
    with pytest.raises(ValueError, match="freeze_head must leave a weight to train"):
        run("ppo", small, freeze_head=True)


@pytest.mark.parametrize("settings", [{}, BF16])
def test_a_copied_reference_does_not_follow_the_model(base, tmp_path, settings):
    config = GrpoConfig(gradient_checkpointing=True, mlp_tile=8, kl_coef=0.1, **settings)
    dtype = getattr(torch, config.weights)
    model, tokenizer = load(str(base), "cpu", dtype=dtype)
    save_memory(model, config)
    rollout, every = rollout_of(tokenizer), torch.arange(len(RECORDS))
    expected = rollout_logprobs(model, rollout, every, config)
    new = Reference(model, config, tmp_path, resumed=False)
    move_adapter(model)
    again = Reference(model, config, tmp_path, resumed=True)
    for reference in (new, again):
        with reference.policy() as policy:
            assert {p.dtype for p in policy.parameters()} == {dtype}
            assert not any(p.requires_grad for p in policy.parameters())
            assert torch.equal(rollout_logprobs(policy, rollout, every, config), expected)
    assert not torch.allclose(rollout_logprobs(model, rollout, every, config), expected, atol=0.01)


def test_the_reference_is_what_comes_after_the_warm_start(small, monkeypatch):
    """With an adapter as without one: the KL is 0 in the first step."""
    seen = []
    original = grpo.policy_loss

    def spied(*arguments, **options):
        result = original(*arguments, **options)
        seen.append(float(result.metrics["kl"]))
        return result

    monkeypatch.setattr(grpo, "policy_loss", spied)
    for settings in ({}, LORA, DORA):
        seen.clear()
        run(
            "grpo",
            small,
            warm_start_steps=3,
            warm_start_batch=6,
            kl_coef=0.1,
            minibatches=1,
            steps=1,
            **settings,
        )
        assert seen
        assert max(map(abs, seen)) < 1e-9
