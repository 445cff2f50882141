"""TRL's trainers on several ranks logs the same numbers with fastrl and without."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.answering import make_answering
from tests.integrations.trl.distilling import make_distillation, make_gkd, make_self_distillation
from tests.integrations.trl.ranks import import_trl, run_on_ranks
from tests.integrations.trl.runs import check_equal, save_model

needed("trl")

pytestmark = [pytest.mark.slow]

TIED = ("Qwen3Config", {"tie_word_embeddings": True, "num_hidden_layers": 2})
PLAIN = ("LlamaConfig", {"num_hidden_layers": 2})
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "FSDPModule",
}
FUSED = {"uses": ("none", "fused")}
CASES = {
    "ddp": ("ddp", PLAIN, {"gradient_accumulation_steps": 2}),
    "ddp and torch.compile": ("ddp", PLAIN, {**FUSED, "compiled": True}),
    "ddp, TRL's loss on one rank": ("ddp", PLAIN, {**FUSED, "unknown_input": True}),
    "fsdp1": ("fsdp1", PLAIN, FUSED),
    "fsdp2": ("fsdp2", PLAIN, {"gradient_accumulation_steps": 2}),
    "fsdp2 and torch.compile": ("fsdp2", PLAIN, {**FUSED, "compiled": True}),
    "fsdp2 and LoRA": ("fsdp2", PLAIN, {**FUSED, "lora": {}}),
    "fsdp2 and a tied head on 4 ranks": ("fsdp2", TIED, {**FUSED, "world": 4}),
}


@pytest.fixture(scope="module")
def on_ranks():
    """`run_on_ranks` in a process that has imported TRL, so that ranks start at once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, import_trl) as process:
        yield lambda *given, **options: process.submit(run_on_ranks, *given, **options).result(300)


def check_ranks(found, wrapper):
    theirs = found["none"]
    assert {wrapper, "OptimizedModule"} & set(theirs[0]["wrapped"])
    for use, ranks in found.items():
        assert len({of_rank["parameters"] for of_rank in ranks}) == 1
        assert ranks[0]["fused"] == {"none": None, "fused": True, "primitive": False}[use]
        for mine, others in zip(ranks, theirs, strict=True):
            assert mine["losses"] == pytest.approx(others["losses"], abs=1e-4)
        check_equal(ranks[0]["steps"], theirs[0]["steps"])


def check_clipped(found):
    assert max(step["clip_ratio/region_mean"] for step in found["none"][0]["steps"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_equal(name, on_ranks, tmp_path):
    layout, (kind, changes), options = CASES[name]
    model = save_model(tmp_path / "model", kind, **changes)
    found = on_ranks(layout, model, tmp_path, **options)
    check_ranks(found, WRAPPERS[layout])
    check_clipped(found)


@pytest.mark.parametrize("kind", [PLAIN, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("layout", WRAPPERS)
def test_distillation(layout, kind, on_ranks, tmp_path):
    model = save_model(tmp_path / "model", kind[0], **kind[1])
    options = {"beta": 0.5, "gradient_accumulation_steps": 2, **FUSED}
    found = on_ranks(layout, model, tmp_path, make=make_distillation, **options)
    check_ranks(found, WRAPPERS[layout])


@pytest.mark.parametrize("layout", WRAPPERS)
def test_gkd(layout, on_ranks, tmp_path):
    """The teacher's forward runs in the student's."""
    model = save_model(tmp_path / "model", PLAIN[0], **PLAIN[1])
    options = {"lmbda": 0.0, "gradient_accumulation_steps": 2, **FUSED}
    check_ranks(on_ranks(layout, model, tmp_path, make=make_gkd, **options), WRAPPERS[layout])


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["ema", "live"])
def test_self_distillation(layout, kind, on_ranks, tmp_path):
    """The backward needs the teacher's head again."""
    model = save_model(tmp_path / "model", PLAIN[0], **PLAIN[1])
    options = {
        "teacher_model_kind": kind,
        "distillation_mode": "full_logits",
        "uses": ("none", "primitive"),
    }
    found = on_ranks(layout, model, tmp_path, make=make_self_distillation, **options)
    check_ranks(found, WRAPPERS[layout])


@pytest.mark.parametrize("layout", [*WRAPPERS, "zero3"])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "CPO"])
def test_losses_of_trl(kind, layout, on_ranks, tmp_path):
    """The reference of DPO is sharded before fastrl sees it."""
    if layout == "zero3":
        pytest.importorskip("deepspeed")
    model = save_model(tmp_path / "model", **PLAIN[1])
    make = functools.partial(make_answering, kind=kind)
    options = {"uses": ("none", "primitive"), "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 2, "learning_rate": 0.1}
    found = on_ranks(layout, model, tmp_path, make=make, **options)
    check_ranks(found, WRAPPERS.get(layout, "DeepSpeedEngine"))


def test_log_probabilities_are_not_rounded(on_ranks, tmp_path):
    """FSDP2 rounds what a model returns to bfloat16: all of TRL's log-probabilities."""
    model = save_model(tmp_path / "model", **PLAIN[1])
    options = {"uses": ("none", "primitive"), "bf16": True, "max_steps": 2, "learning_rate": 0.1}
    make = functools.partial(make_answering, kind="DPO")
    found = on_ranks("fsdp2", model, tmp_path, make=make, **options)
    theirs, ours = (torch.tensor(found[use][0]["losses"]) for use in ("none", "primitive"))
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)
    assert torch.equal(theirs, theirs.bfloat16().float())
    assert not torch.equal(ours, ours.bfloat16().float())
    norms = [[step["grad_norm"] for step in of_use[0]["steps"]] for of_use in found.values()]
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, [True, False]),
        ({"gradient_accumulation_steps": 2, "num_iterations": 1, "beta": 0.0}, [False, False]),
    ],
    ids=["two steps of a generation", "accumulation"],
)
def test_a_copy_of_the_head_has_the_mean_gradient_of_the_ranks(settings, right, on_ranks, tmp_path):
    """TRL's head reads the copy, which FSDP2 wraps apart, without a call: no rank hears another.

    Only the micro-batch after a generation finds the copy gathered.
    """
    model = save_model(tmp_path / "model", **PLAIN[1])
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    trained = functools.partial(on_ranks, model=model, path=tmp_path, lora=lora, max_steps=2)
    found = trained("fsdp2", **FUSED, **settings)
    found["ddp"] = trained("ddp", uses=("none",), **settings)["none"]
    norms = {
        use: [step["grad_norm"] for step in of_use[0]["steps"]] for use, of_use in found.items()
    }
    assert norms["fused"] == pytest.approx(norms["ddp"], rel=1e-5)
    # else docs/replace-the-loss/trl.md is out of date
    near = [a < 1.1 * b for a, b in zip(norms["none"], norms["ddp"], strict=True)]
    assert near == right


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_steps_with_deepspeed_are_equal(stage, on_ranks, tmp_path):
    pytest.importorskip("deepspeed")
    model = save_model(tmp_path / "model", **PLAIN[1])
    found = on_ranks(f"zero{stage}", model, tmp_path, gradient_accumulation_steps=2)
    check_ranks(found, "DeepSpeedEngine")
    check_clipped(found)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_each_rank_replays_the_tokens_it_kept(layout, on_ranks, tmp_path):
    """Both losses are over sets, which are checked to have the tokens that the rank sampled."""
    model = save_model(tmp_path / "model", **PLAIN[1])
    options = {"replay": True, "top_p": 0.6, "max_completion_length": 20}
    found = on_ranks(layout, model, tmp_path, uses=("fused", "primitive"), **options)
    for mine, others in zip(found["fused"], found["primitive"], strict=True):
        assert mine["losses"] == pytest.approx(others["losses"], abs=1e-4)
    check_equal(found["fused"][0]["steps"], found["primitive"][0]["steps"])
    assert max(step["entropy"] for step in found["fused"][0]["steps"]) < 2.5
