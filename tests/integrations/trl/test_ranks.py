"""TRL's trainers on several ranks log the same numbers with fastrl and without."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import KINDS
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
    **{f"zero{stage}": "DeepSpeedEngine" for stage in (1, 2, 3)},
}
NONE = {"none": None}
FUSED = {**NONE, "fused": {"fused": True}}
PRIMITIVE = {**NONE, "primitive": {"fused": False}}
BOTH = {**FUSED, **PRIMITIVE}
IN_2 = {"gradient_accumulation_steps": 2}
GRPO = {"beta": 0.1, "num_iterations": 2}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
PAIRS = {**IN_2, "per_device_train_batch_size": 2, "learning_rate": 0.1}
SDFT = {"distillation_mode": "full_logits"}
#: The kind of each trainer with a layout, a model and options; "uses" are those of `run_on_ranks`.
CASES = {
    "GRPO, ddp": (PLAIN, {**IN_2, "uses": BOTH}),
    "GRPO, ddp and torch.compile": (PLAIN, {"compiled": True}),
    "GRPO, ddp, TRL's loss on one rank": (PLAIN, {"unknown_input": True}),
    "GRPO, fsdp1": (PLAIN, {}),
    "GRPO, fsdp2": (PLAIN, {**IN_2, "uses": BOTH}),
    "GRPO, fsdp2 and torch.compile": (PLAIN, {"compiled": True}),
    "GRPO, fsdp2 and LoRA": (PLAIN, {"peft_config": LORA}),
    "GRPO, fsdp2 and a tied head on 4 ranks": (TIED, {"world": 4}),
    **{f"GRPO, zero{stage}": (PLAIN, {**IN_2, "uses": BOTH}) for stage in (1, 2, 3)},
    **{
        f"Distillation, {layout} {name}": (model, {**IN_2, "beta": 0.5})
        for layout in ("ddp", "fsdp1", "fsdp2")
        for name, model in (("plain", PLAIN), ("tied", TIED))
    },
    # the teacher's forward runs in the student's
    **{f"GKD, {layout}": (PLAIN, {**IN_2, "lmbda": 0.0}) for layout in ("ddp", "fsdp1", "fsdp2")},
    # the backward needs the teacher's head again
    **{
        f"SDFT, {layout} {teacher}": (PLAIN, {**SDFT, "teacher_model_kind": teacher})
        for layout in ("ddp", "fsdp2")
        for teacher in ("ema", "live")
    },
    # the reference of DPO is sharded before fastrl sees it
    **{
        f"{kind}, {layout}": (PLAIN, PAIRS)
        for kind in ("SFT", "DPO", "CPO")
        for layout in ("ddp", "fsdp1", "fsdp2", "zero3")
    },
}


@pytest.fixture(scope="module")
def of_process():
    """`run_on_ranks` in a process that has imported TRL, so that ranks start at once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, import_trl) as process:
        yield lambda *given, **options: process.submit(run_on_ranks, *given, **options).result(300)


@pytest.fixture
def on_ranks(of_process, tmp_path):
    """Train a model that is saved first."""

    def trained(layout, uses, model=PLAIN, **options):
        path = save_model(tmp_path / "model", model[0], **model[1])
        return of_process(layout, path, tmp_path, uses, **options)

    return trained


@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_equal(name, on_ranks):
    """Losses of each rank and logs are equal, and all ranks have the same weights."""
    (kind, rest), (model, options) = name.split(", ", 1), CASES[name]
    layout = rest.split()[0].rstrip(",")
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    options = {"kind": kind, **(GRPO if kind == "GRPO" else {}), **options}
    uses = options.pop("uses", FUSED if KINDS[kind].fused else PRIMITIVE)
    found = on_ranks(layout, uses, model, **options)
    theirs = found["none"]
    assert {WRAPPERS[layout], "OptimizedModule"} & set(theirs[0]["wrapped"])
    for use, ranks in found.items():
        assert len({of_rank["parameters"] for of_rank in ranks}) == 1
        assert ranks[0]["fused"] == {"none": None, "fused": True, "primitive": False}[use]
        packed = None if use == "none" else kind != "CPO" and "compile" not in name
        assert {of_rank["packed"] for of_rank in ranks} == {packed}
        for mine, others in zip(ranks, theirs, strict=True):
            assert mine["losses"] == pytest.approx(others["losses"], abs=1e-4)
        check_equal(ranks[0]["steps"], theirs[0]["steps"])
    if kind == "GRPO":
        assert max(step["clip_ratio/region_mean"] for step in theirs[0]["steps"]) > 0


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_a_hook_on_one_rank(layout, on_ranks):
    """Its batches are padded, and all ranks try the sharded reference, which is a collective."""
    found = on_ranks(layout, PRIMITIVE, kind="DPO", hooked=True, max_steps=2)
    theirs, ours = found["none"], found["primitive"]
    assert [of_rank["packed"] for of_rank in ours] == [False, True]
    for mine, others in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(others["losses"], abs=1e-4)


def test_log_probabilities_are_not_rounded(on_ranks):
    """FSDP2 rounds what a model returns to bfloat16: all of TRL's log-probabilities."""
    options = {"bf16": True, "max_steps": 2, "learning_rate": 0.1}
    found = on_ranks("fsdp2", PRIMITIVE, kind="DPO", **options)
    theirs, ours = (torch.tensor(found[use][0]["losses"]) for use in PRIMITIVE)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)
    assert torch.equal(theirs, theirs.bfloat16().float())
    assert not torch.equal(ours, ours.bfloat16().float())
    norms = [[step["grad_norm"] for step in of_use[0]["steps"]] for of_use in found.values()]
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        (GRPO, [True, False]),
        ({"gradient_accumulation_steps": 2, "num_iterations": 1, "beta": 0.0}, [False, False]),
    ],
    ids=["two steps of a generation", "accumulation"],
)
def test_a_copy_of_the_head_has_the_mean_gradient_of_the_ranks(settings, right, on_ranks):
    """TRL's head reads the copy, which FSDP2 wraps apart, without a call: no rank hears another.

    Only the micro-batch after a generation finds the copy gathered.
    """
    lora = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    trained = functools.partial(on_ranks, peft_config=lora, max_steps=2, **settings)
    found = {**trained("fsdp2", FUSED), "ddp": trained("ddp", NONE)["none"]}
    norms = {
        use: [step["grad_norm"] for step in of_use[0]["steps"]] for use, of_use in found.items()
    }
    assert norms["fused"] == pytest.approx(norms["ddp"], rel=1e-5)
    # else docs/replace-the-loss/trl.md is out of date
    near = [a < 1.1 * b for a, b in zip(norms["none"], norms["ddp"], strict=True)]
    assert near == right


FEW = {"top_p": 0.6, "max_completion_length": 20}
#: Two ways to the same numbers from what each rank's sampler recorded: its sets, which must have
#: the tokens that it sampled, and its likeliest tokens, with metrics of all ranks.
RECORDED = {
    "replay_kept_tokens": ({"replay_kept_tokens": True}, "fused", GRPO, "entropy", (0, 2.5)),
    "score_centering": ({"score_centering": 5}, "packed", {}, "fastrl/head_kl", (0.01, 0.52)),
}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", RECORDED)
def test_what_each_sampler_recorded(name, layout, on_ranks):
    use, way, options, metric, (low, high) = RECORDED[name]
    found = on_ranks(layout, {x: {**use, way: x} for x in (True, False)}, **options, **FEW)
    for mine, others in zip(found[True], found[False], strict=True):
        assert mine["losses"] == pytest.approx(others["losses"], abs=1e-4)
    check_equal(found[True][0]["steps"], found[False][0]["steps"])
    assert all(low < step[metric] < high for step in found[True][0]["steps"])
