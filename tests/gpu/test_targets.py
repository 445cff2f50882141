"""GPU kernels, compiled ahead of time for every target: no spills, no doubles, within budget."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "gfx942")


sys.path.append(str(ROOT / "bench" / "gpu_cost"))  # as when a script there is run


def from_bench(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / "gpu_cost" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sass = from_bench("sass")
targets = from_bench("targets")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports():
    # a process of its own: the tests of this one may run kernels in Triton's interpreter
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "bench" / "gpu_cost" / "targets.py"), "--json", "--quick"]
    command += ["--arch", *ARCHITECTURES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_keeps_what_its_target_says(reports, architecture):
    found = [report for report in reports if report["architecture"] == architecture]
    assert len(found) >= 5
    assert {f"{one['name']}: {failure}" for one in found for failure in one["failures"]} == set()


@needs_triton
def test_kernels_that_stream_have_a_budget_and_a_prediction(reports):
    budgeted = {one["name"] for one in reports if one["milliseconds"]}
    assert {"gae", "gae_apply", "policy_loss", "policy_loss_per_sequence"} <= budgeted


@pytest.mark.skipif(not list((ROOT / "csrc" / "cuda").rglob("*.cu")), reason="there is no .cu")
@pytest.mark.skipif(targets.nvcc() is None, reason="nvcc is not installed")
@needs_triton
def test_cuda_sources_were_compiled(reports):
    compiled = {one["name"] for one in reports if one["name"].startswith("cuda ")}
    assert compiled == {f"cuda {path.stem}" for path, _ in targets.cuda_targets()}
    held = [one["kernel"] for one in reports if one["instructions"] is not None]
    for budget in targets.CUDA:  # a renamed kernel does not lose its budget unseen
        assert any(budget.name in kernel for kernel in held), budget.name


@pytest.mark.skipif(targets.nvcc() is None, reason="nvcc is not installed")
@needs_triton
@pytest.mark.parametrize(
    ("kernel", "capped"),
    [
        ("one_pass_cluster", 0),
        ("one_pass_cluster", 1),
        ("token_stats", 0),
        ("token_stats_backward", 0),
    ],
)
def test_unaligned_rows_cost_at_most_1_3_times_the_instructions(reports, kernel, capped):
    """Whatever is summed: each variant against the aligned one."""
    pattern = rf"{kernel}_kernelINS0_8BFloat16ELb([01])ELb{capped}E(.*)"
    found = {"0": {}, "1": {}}
    for one in reports:
        if one["architecture"] == "sm_90" and (name := re.search(pattern, one["kernel"])):
            found[name[1]][name[2]] = one["instructions"]
    assert found["0"].keys() == found["1"].keys() != set()
    for variant, instructions in found["0"].items():
        assert instructions <= 1.3 * found["1"][variant], variant


LISTING = """
	.section	.text.kernel,"ax",@progbits
.L_x_0:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   FFMA R8, R4, R5, R8 ;
        /*0020*/                   MUFU.EX2 R9, R8 ;
.L_x_1:
        /*0030*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64+0x10] ;
        /*0040*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
        /*0070*/                   EXIT ;
"""


def kernel_of(*changes):
    listing = LISTING
    for old, new in changes:
        assert old in listing
        listing = listing.replace(old, new)
    ((name, labels, code),) = sass._functions(listing)
    return sass._nvidia(name, 32, labels, code)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("FFMA R8, R4", "STL [R1], R4 ; "), "spills"),
        (("LDG.E.128.CONSTANT R4, desc[UR4][R2.64+0x10]", "LDL R4, [R1]"), "spills_in_loops"),
        (("FFMA R8", "DFMA R8"), "double"),
        (("MUFU.EX2", "MUFU.RCP64H"), "double"),
        (("FFMA R8, R4, R5, R8", "F2F.F64.F32 R8, R4"), "double"),
        (("FFMA R8, R4, R5, R8", "UCGABAR_ARV"), "cluster_barriers"),
    ],
)
def test_what_costs_dearly_is_counted(change, what):
    assert getattr(kernel_of(), what) == 0
    assert getattr(kernel_of(change), what) == 1


@pytest.mark.parametrize(
    ("change", "costs", "words"),
    [
        (None, (3.0, 1.0), None),
        (None, (3.1, 1.0), "3.1 instructions per element, budget 3.0"),
        (None, (3.0, 1.1), "1.1 MUFU per element, budget 1.0"),
        (None, (None, None), "None instructions per element, budget 3.0"),
        (("STG.E.128", "STG.E"), (3.0, 1.0), "1 accesses under 16 bytes in a pass"),
        (("FFMA R8", "DADD R8"), (3.0, 1.0), "1 instructions in double"),
        (("FFMA R8, R4, R5, R8", "LDL R8, [R1]"), (3.0, 1.0), "1 spills, 0 of them in loops"),
    ],
)
def test_a_kernel_that_costs_too_much_fails(change, costs, words):
    kernel = kernel_of(*([change] if change else []))
    budget = targets.Target("kernel", instructions=3.0, mufu=1.0, bytes_per_element=4.0)
    report = targets._report("kernel", "sm_90", kernel, kernel.passes, costs, budget)
    assert report.failures[:1] == ([words] if words else [])


@needs_triton
def test_every_launch_and_every_target_says_what_the_compiler_may_fuse(monkeypatch):
    """The default of Triton 3.10 is another than that of the releases before."""
    code = r"""
import json, torch
from triton.runtime.jit import JITFunction
from fastrl import Objective
from fastrl.contract import AggregationArguments, LEVELS, LossArguments, RowArguments, SCALES
found = {}
def run(self, *_, grid, warmup, **options):
    found.setdefault(self.__name__, set()).add(str(options.get("enable_fp_fusion")))
JITFunction.run = run
from fastrl.triton import scale
from fastrl.triton.gae import gae
from fastrl.triton.groups import group_advantages
from fastrl.triton.tokens import policy_loss, sequence_weights
from fastrl.triton.vocabulary import divergence, gathered, logits_policy_loss, rows, token_stats
row, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
gae.gae_fwd(row, row, None, None, None, None, None, 0.9, 0.9)
gae.gae_fwd(torch.ones(1, 5000), torch.ones(1, 5000), None, None, None, None, None, 0.9, 0.9)
scale.scale_(row, row[0, 0])
for scale_by in range(len(SCALES)):
    group_advantages.group_advantages_fwd(torch.ones(6), None, 3, 0, scale_by, 1.0, 1e-6, 0)
how = AggregationArguments(0, 0.0, None, 0.0, False, 0, None)
sequence_weights.sequence_weights(mask, None, 0, None, *how)
objective = Objective(kl_coef=0.1, entropy_coef=0.01).arguments
def arguments(x):
    loss = LossArguments(x, x, None, None, None, x, x, None)
    return loss, objective
for level in range(len(LEVELS)):
    loss, objective = arguments(row)
    policy_loss.policy_loss_fwd(row, row, mask, *loss, *objective._replace(level=level))
ids = torch.zeros(2, 1, dtype=torch.int32)
gathered.gathered_dots_(row[:, :1], row, row, ids)
gathered.gathered_sums_(row, row[:, :1], row, ids)
gathered.scattered_sums_(row, row[:, :1], row, ids)
for rows.processors in (lambda device: 0, lambda device: 132):
    logits, one = torch.zeros(1, 1, 40_000), row[:1, :1]
    of_rows = RowArguments(one.long(), one > 0, -100, None, 1.0, 1.0, 0.0)
    token_stats.token_stats_fwd(logits, *of_rows, True, False)
    token_stats.token_stats_bwd(logits, *of_rows, *[one] * 4, None, None)
    pair = (logits, logits, *of_rows, None, 1.0, 1.0, 0.0)
    divergence.divergence_fwd(*pair, *[one] * 4, 0.5)
    divergence.divergence_bwd(*pair, *[one] * 3, None, None, None, one, one, 0.5, one, one)
    loss, objective = arguments(one)
    logits_policy_loss.logits_policy_loss_fwd(logits, *of_rows, *loss, *objective)
print(json.dumps({name: sorted(values) for name, values in found.items()}))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout)
    for target in targets.triton_targets():
        name = target.kernel.fn.__name__
        assert launched[name] == [str(target.enable_fp_fusion)], name
    assert launched["sums_of_blocks_kernel"] == ["False"]  # has no target, and goes with the others
    assert len(launched) >= 8
