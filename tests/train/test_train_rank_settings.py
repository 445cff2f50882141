"""Settings on several ranks: each is honoured, or refused with its name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.distributed import ranks, supported
from fastrl.train.distributed.process_group import check_joined
from fastrl.train.model.loading import load
from fastrl.train.run.checkpoint import latest
from tests.support.rank_runs import check_same_metrics, check_whole, run_ranks
from tests.support.train_runs import rows, run, start_process, weights

SAME = {
    "ddp": [
        {"optimizer": "adamw_8bit"},
        {"weights": "bfloat16"},
        {"lora_rank": 4, "warm_start_steps": 3, "warm_start_batch": 8},
        {"lora_rank": 4, "dora": True, "freeze_head": True},
        {"gradient_checkpointing": True, "mlp_tile": 8, "share_prompts": True},
    ],
    "fsdp": [
        {"loss": "logits", "freeze_head": True},
        {"gradient_checkpointing": True, "mlp_tile": 8, "share_prompts": True},
        {"precision": "bfloat16", "dynamic_sampling": True},
    ],
}
REFUSED = {
    "ddp": [
        {"sampler": "continuous"},
        {"sampler": "vllm"},
        {"optimizer": "adamw_offloaded"},
        {"weights": "bfloat16", "rounding": "stochastic"},
        {"offload_checkpoints": True, "gradient_checkpointing": True},
    ],
    "fsdp": [{"optimizer": "adamw_8bit"}, {"weights": "bfloat16"}, {"lora_rank": 4}],
}


def cases(settings):
    return [(parallel, changes) for parallel, each in settings.items() for changes in each]


@pytest.mark.parametrize(("parallel", "changes"), cases(SAME), ids=str)
def test_a_setting_does_on_two_ranks_what_it_does_on_one(small, tmp_path, parallel, changes):
    small |= {"reward": "small_rewards:by_record", "minibatches": 2, "steps": 2, **changes}
    whole = run("grpo", small, name="whole").directory
    check_whole(run_ranks(2, "grpo", small | {"name": "a", "parallel": parallel}, tmp_path))
    half = "bfloat16" in changes.values() or "adamw_8bit" in changes.values()
    directory = Path(small["out_dir"]) / "a"
    check_same_metrics(rows(directory), rows(whole), tolerance=0.05 if half else 1e-3)
    if "lora_rank" not in changes:
        one, other = weights(directory), weights(whole)
        assert max(float((one[key] - other[key]).abs().max()) for key in other) < 1e-3


@pytest.mark.parametrize(("parallel", "changes"), cases(REFUSED), ids=str)
def test_what_several_ranks_cannot_honour_is_refused(monkeypatch, parallel, changes):
    config = GrpoConfig(parallel=parallel, **changes)
    supported.check_supported(config)  # on one rank anything goes
    monkeypatch.setattr(ranks, "count", lambda: 2)
    name = next(name for name in changes if name != "weights" or len(changes) == 1)
    with pytest.raises(ValueError, match=f"^{name} must .* several ranks"):
        supported.check_supported(config)


def test_a_separate_value_model_is_not_sharded(monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 2)
    config = PpoConfig(parallel="fsdp", value_model="separate")
    with pytest.raises(ValueError, match="value_model must be shared with parallel=fsdp"):
        supported.check_supported(config)
    supported.check_supported(replace(config, parallel="ddp"))


def test_a_separate_value_model_on_two_ranks(small, tmp_path):
    small |= {"reward": "small_rewards:by_record", "minibatches": 2, "steps": 2}
    small |= {"value_model": "separate", "warm_start_steps": 3, "warm_start_batch": 8}
    whole = run("ppo", small, name="whole").directory
    check_whole(run_ranks(2, "ppo", small | {"name": "a"}, tmp_path))
    check_same_metrics(rows(Path(small["out_dir"]) / "a"), rows(whole))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_tied_embeddings_stay_tied(small, tmp_path, parallel):
    model, tokenizer = load(None, "cpu")
    model.config.tie_word_embeddings = True
    torch.manual_seed(1)
    LlamaForCausalLM(model.config).save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    small |= {"reward": "small_rewards:by_record", "minibatches": 2, "steps": 2, "kl_coef": 0.05}
    small |= {"model": str(tmp_path / "tied"), "learning_rate": 1e-3, "save_every": 1}
    whole = run("grpo", small, name="whole").directory
    split = small | {"name": "a", "parallel": parallel}
    check_whole(run_ranks(2, "grpo", split | {"steps": 1}, tmp_path))
    check_whole(run_ranks(2, "grpo", split | {"resume": True}, tmp_path))
    directory = Path(small["out_dir"]) / "a"
    check_same_metrics([row for row in rows(directory) if row["step"] == 2], rows(whole)[2:])
    saved = AutoModelForCausalLM.from_pretrained(latest(directory / "checkpoints"))
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert type(saved).__name__ == "LlamaForCausalLM"


def test_torchrun_starts_the_ranks(small, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start_process(tmp_path, {**small, "name": "a", "steps": 1}, launcher=torchrun)
    out, _ = process.communicate(timeout=120)
    error = (tmp_path / "stderr.txt").read_text()
    assert process.returncode == 0, error
    assert out.count("held-out reward, greedy:") == 1  # the first rank alone prints
    assert error.count("1/1") >= 1
    again = start_process(tmp_path, {**small, "name": "a", "steps": 1}, launcher=torchrun)
    again.communicate(timeout=120)
    error = (tmp_path / "stderr.txt").read_text()
    assert again.returncode != 0
    assert len(re.findall("^error: name: .* already contains a run", error, re.M)) == 1


def test_a_process_of_torchrun_that_trains_alone_is_refused(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but the ranks are not joined"):
        check_joined()
    with pytest.raises(ValueError, match="the ranks are not joined"):
        run("grpo", small)
    assert not list(Path(small["out_dir"]).glob("*"))
