"""TRL's GRPOTrainer on several ranks logs the same numbers with fastrl and without."""

import pytest

from tests.support.trl_rank_runs import run_on_ranks
from tests.support.trl_runs import needed, save_model

needed("trl")
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

TIMES = {"step_time", "epoch"}
TIED = ("Qwen3Config", {"tie_word_embeddings": True, "num_hidden_layers": 2})
PLAIN = ("LlamaConfig", {"num_hidden_layers": 2})
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "FSDPModule",
}
CASES = {
    "ddp": ("ddp", PLAIN, {"gradient_accumulation_steps": 2}),
    "ddp and torch.compile": ("ddp", PLAIN, {"uses": ("none", "fused"), "compiled": True}),
    "ddp, TRL's loss on one rank": (
        "ddp",
        PLAIN,
        {"uses": ("none", "fused"), "unknown_input": True},
    ),
    "fsdp1": ("fsdp1", PLAIN, {"uses": ("none", "fused")}),
    "fsdp2": ("fsdp2", PLAIN, {"gradient_accumulation_steps": 2}),
    "fsdp2 and torch.compile": ("fsdp2", PLAIN, {"uses": ("none", "fused"), "compiled": True}),
    "fsdp2 and a tied head": ("fsdp2", TIED, {"uses": ("none", "fused")}),
    "fsdp2 and LoRA": ("fsdp2", PLAIN, {"uses": ("none", "fused"), "lora": {}}),
    "fsdp2 on 4 ranks": ("fsdp2", PLAIN, {"uses": ("none", "fused"), "world": 4}),
}


def check_equal(found, wrapper):
    theirs = found["none"][0]
    assert {wrapper, "OptimizedModule"} & set(theirs["wrapped"])
    for use, ranks in found.items():
        assert len({of_rank["parameters"] for of_rank in ranks}) == 1
        assert ranks[0]["fused"] == {"none": None, "fused": True, "primitive": False}[use]
        for mine, others in zip(ranks, found["none"], strict=True):
            assert mine["losses"] == pytest.approx(others["losses"], abs=1e-4)
        steps = ranks[0]["steps"]
        assert len(steps) == len(theirs["steps"]) == 5
        for step, (a, b) in enumerate(zip(steps, theirs["steps"], strict=True)):
            assert a.keys() - {METRIC} == b.keys()
            for name in b.keys() - TIMES:
                assert a[name] == pytest.approx(b[name], abs=1e-4), (use, step, name)
    assert max(step["clip_ratio/region_mean"] for step in theirs["steps"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_equal(name, tmp_path):
    layout, (kind, changes), options = CASES[name]
    model = save_model(tmp_path / "model", kind, **changes)
    wrapper = WRAPPERS[layout]
    check_equal(run_on_ranks(layout, model, tmp_path, **options), wrapper)


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, [True, False]),
        ({"gradient_accumulation_steps": 2, "num_iterations": 1, "beta": 0.0}, [False, False]),
    ],
    ids=["two steps of a generation", "accumulation"],
)
def test_a_trainable_copy_of_the_head_has_the_mean_gradient_of_the_ranks(settings, right, tmp_path):
    """TRL's head reads the copy, which FSDP2 wraps apart, without a call: no rank hears another.

    Only the micro-batch after a generation finds the copy gathered.
    """
    model = save_model(tmp_path / "model", **PLAIN[1])
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    options = {"lora": lora, "max_steps": 2, **settings}
    found = run_on_ranks("fsdp2", model, tmp_path, uses=("none", "fused"), **options)
    found["ddp"] = run_on_ranks("ddp", model, tmp_path, uses=("none",), **options)["none"]
    norms = {
        use: [step["grad_norm"] for step in of_use[0]["steps"]] for use, of_use in found.items()
    }
    assert norms["fused"] == pytest.approx(norms["ddp"], rel=1e-5)
    # else docs/replace-the-loss.md is out of date
    near = [a < 1.1 * b for a, b in zip(norms["none"], norms["ddp"], strict=True)]
    assert near == right


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_five_steps_with_deepspeed_are_equal(stage, tmp_path):
    pytest.importorskip("deepspeed")
    model = save_model(tmp_path / "model", **PLAIN[1])
    found = run_on_ranks(f"zero{stage}", model, tmp_path, gradient_accumulation_steps=2)
    check_equal(found, "DeepSpeedEngine")
