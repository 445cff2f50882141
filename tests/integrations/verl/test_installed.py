"""verl itself on fastrl: its losses, its patched models and its own unit tests."""

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fastrl.integrations import verl as ours
from fastrl.integrations.verl import policy_losses
from tests.integrations.compared import close
from tests.integrations.packages import importable
from tests.integrations.verl.cases import (
    CORE,
    COUNTS,
    LOSSES,
    batch,
    gradients,
    installed,
    policy_loss,
    with_prompts,
    worker_batch,
)

pytestmark = pytest.mark.skipif(importable(CORE) is None, reason="needs verl itself")
core = importable(CORE)


def test_the_installed_verl_runs_on_fastrl():
    with ours.use_fastrl() as replaced:
        expected = {f"{CORE}.{item.name}" for item in ours._REPLACEMENTS if item.module == CORE}
        assert expected <= set(replaced.names)
        assert core.get_policy_loss_fn("vanilla") is policy_losses.vanilla
        assert core.get_adv_estimator_fn("grpo") is ours.compute_grpo_outcome_advantage
        left = {name for name, x in core.POLICY_LOSS_REGISTRY.items() if x.__module__ == CORE}
        assert left == {"bypass_mode"}
        left = {name for name, x in core.ADV_ESTIMATOR_REGISTRY.items() if x.__module__ == CORE}
        assert left == {"optimal_token_baseline", "tir_optimal_token_baseline"}
    assert core.get_policy_loss_fn("vanilla") is core.compute_policy_loss_vanilla


@pytest.mark.parametrize("loss_type", ["reinforce", "ppo_clip"])
def test_bypass_mode_runs_on_fastrl(loss_type):
    options = importlib.import_module("verl.trainer.config.algorithm").RolloutCorrectionConfig
    correction = options(
        loss_type=loss_type, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2"
    )
    data = batch("integers", torch.float64)
    data.mask[1, 0] = 1
    config = installed(COUNTS["local"], {"rollout_correction": correction})
    own = policy_loss(core, "bypass_mode", data, config)
    with ours.use_fastrl():
        close(policy_loss(core, "bypass_mode", data, config), own, 1e-7)


@pytest.mark.parametrize("name", [x for x in LOSSES if x not in ("reinforce", "clip_cov")])
def test_verls_own_ppo_loss_with_entropy_and_kl(name):
    losses = pytest.importorskip("verl.workers.utils.losses", exc_type=ImportError)
    data = batch()
    more = {"ref_log_prob": data.old + 0.3 * data.values, "advantages": data.advantages}
    fields = worker_batch(data, **more)
    own = {**LOSSES[name].get("policy_loss", {}), "loss_mode": name}
    config = installed(
        {},
        **{**LOSSES[name], "policy_loss": own},
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl+",
        entropy_coeff=0.01,
        loss_agg_mode="seq-mean-token-mean",
    )

    def run():
        log_prob, entropy = with_prompts(data.log_prob), with_prompts(data.values.abs())
        loss, metrics = losses.ppo_loss(config, {"log_probs": log_prob, "entropy": entropy}, fields)
        loss.backward()
        values = {key: torch.tensor(getattr(x, "values", x)) for key, x in metrics.items()}
        return loss.detach(), log_prob.grad, entropy.grad, values

    expected = run()
    with ours.use_fastrl():
        close(run(), expected)


FORWARDS = {"torch": "torch", "liger": "torch", "triton": "triton"}


@pytest.mark.parametrize("backend", FORWARDS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_forward_of_a_model_that_verl_has_patched(backend, tied):
    transformers = pytest.importorskip("transformers")
    dense = pytest.importorskip("verl.models.transformers.dense_common", exc_type=ImportError)
    pytest.importorskip("verl.utils.experimental.torch_functional", exc_type=ImportError)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=97, **sizes, **heads))
    ids, upstream = torch.randint(97, (2, 11)), torch.randn(2, 22)

    def run(kind):
        model._verl_fused_kernels_backend = "liger" if backend == "liger" else "torch"
        forward = getattr(dense, f"forward_with_{kind}_backend")
        out = forward(model, input_ids=ids, temperature=0.7, return_dict=True, use_cache=False)
        outputs = out.log_probs.flatten(), out.entropy.flatten()
        return *outputs, *gradients(outputs, upstream, list(model.parameters()))

    expected = run("torch")
    with ours.use_fastrl():
        torch.testing.assert_close(run(FORWARDS[backend]), expected, rtol=1e-4, atol=1e-5)
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    assert isinstance(kernel.linear_cross_entropy, types.MethodType)


def test_verls_own_unit_tests_pass_with_ours_in_place():
    folder = Path(core.__file__).parents[3] / "tests" / "trainer" / "ppo"
    if not folder.is_dir():
        pytest.skip("needs verl with its tests, which its wheel includes")
    names = ("core_algos", "loss_aggregation", "value_loss_normalization")
    names = (*names, "dynamic_policy_losses", "reinforce_pp_multiturn")
    files = [folder / f"test_{name}_on_cpu.py" for name in names]
    files.append(folder / "test_rollout_corr_integration.py")
    paths = (str(Path(__file__).parents[3]), *sys.path)
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "fastrl.integrations.verl.plugin",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    code = (
        "import sys, pytest, verl.trainer.ppo.core_algos as core;"
        "assert core.agg_loss.__module__.startswith('fastrl.');"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *map(str, files)],
        env=environment,
        cwd=folder.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
