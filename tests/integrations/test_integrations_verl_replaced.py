"""fastrl in verl's modules and registries: verl's code runs on it until `undo()`."""

import functools
import importlib
import importlib.util
import sys
import types

import pytest
import torch

from fastrl.integrations import verl as ours
from fastrl.integrations.verl import policy_losses as verl_policy_losses
from tests.support import verl_formulas
from tests.support.importable import importable, without_modules
from tests.support.verl_cases import (
    CORE,
    FIELDS,
    GLOBAL,
    LOCAL,
    POLICY_LOSSES,
    TOKENS,
    batch,
    close,
    installed,
    transcribed,
    value_and_gradient,
)


@pytest.fixture
def without_verl(monkeypatch):
    without_modules(monkeypatch, "verl")
    monkeypatch.setitem(sys.modules, "verl", None)


@pytest.fixture
def package(monkeypatch, without_verl):
    """A package with verl's modules, made of the transcription."""
    modules = {
        name: types.ModuleType(name) for name in ("verl", TOKENS, CORE, "verl.workers.losses")
    }
    for name in ("verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        modules[name] = types.ModuleType(name)
    modules["verl"].__version__ = "0.9.7"
    for name, value in vars(verl_formulas).items():
        if isinstance(value, types.FunctionType):
            home = TOKENS if name.endswith(("from_logits", "chunking")) else CORE
            copy = types.FunctionType(
                value.__code__, vars(verl_formulas), name, value.__defaults__, value.__closure__
            )
            copy.__module__ = home
            setattr(modules[home], name, copy)
    core = modules[CORE]
    core.POLICY_LOSS_REGISTRY = {
        name: getattr(core, f"compute_policy_loss_{name}") for name in POLICY_LOSSES
    }
    core.ADV_ESTIMATOR_REGISTRY = {"gae": core.compute_gae_advantage_return}
    modules["verl.workers.losses"].agg_loss = core.agg_loss
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(core=core, losses=modules["verl.workers.losses"])


def test_functions_are_replaced_everywhere_and_restored(package):
    own = dict(package.core.POLICY_LOSS_REGISTRY), package.core.agg_loss
    with ours.use_fastrl() as replaced:
        assert package.core.agg_loss is package.losses.agg_loss is ours.agg_loss
        assert package.core.POLICY_LOSS_REGISTRY["gspo"] is verl_policy_losses.gspo
        assert package.core.ADV_ESTIMATOR_REGISTRY["gae"] is ours.compute_gae_advantage_return
        assert f"{CORE}.kl_penalty" in replaced.names
    assert own[0] == package.core.POLICY_LOSS_REGISTRY
    assert package.core.agg_loss is package.losses.agg_loss is own[1]
    with ours.use_fastrl():
        replaced.undo()  # does nothing, as the second use has another handle
        assert package.core.agg_loss is ours.agg_loss
    assert package.core.agg_loss is own[1]


def test_the_plugin_acts_if_verl_imports_it(package, monkeypatch):
    name = "fastrl.integrations.verl.plugin"
    monkeypatch.delitem(sys.modules, name, raising=False)
    plugin = importlib.import_module(name)
    assert package.core.agg_loss is ours.agg_loss
    with pytest.raises(RuntimeError, match=rf"through the plug-in {name}: leave out use_fastrl"):
        ours.use_fastrl()
    plugin.replaced.undo()
    with ours.use_fastrl(), pytest.raises(RuntimeError, match="undo the first use_fastrl"):
        ours.use_fastrl()


class Verl:
    """Imports a module that was made before."""

    def __init__(self, module):
        self.module = module

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "verl" else None

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.executed = True


def test_the_plugin_acts_after_verl_if_it_was_first(package, monkeypatch):
    name = "fastrl.integrations.verl.plugin"
    finder, own = Verl(sys.modules["verl"]), package.core.kl_penalty
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "verl")
    monkeypatch.delitem(sys.modules, name, raising=False)
    plugin = importlib.import_module(name)
    assert plugin.replaced is None
    assert not hasattr(finder.module, "executed")
    del package.core.kl_penalty
    for _ in range(2):  # the import fails each time, instead of going on without fastrl
        with pytest.raises(NotImplementedError, match=r"has no .*\.kl_penalty"):
            importlib.import_module("verl")
    package.core.kl_penalty = own
    verl = importlib.import_module("verl")
    assert package.core.agg_loss is ours.agg_loss
    importlib.reload(verl)  # is watched no longer
    assert f"{CORE}.agg_loss" in plugin.replaced.names
    plugin.replaced.undo()
    assert package.core.kl_penalty is own


def always_by_sequences(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="seq-mean-token-mean",
    config=None,
    rollout_is_weights=None,
):
    """GSPO of verl 0.9.0, which ignores `loss_agg_mode`."""
    rest = {"config": config, "rollout_is_weights": rollout_is_weights}
    function, mode = verl_formulas.compute_policy_loss_gspo, "seq-mean-token-mean"
    return function(old_log_prob, log_prob, advantages, response_mask, mode, **rest)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_gspo_aggregates_as_the_verl_that_is_installed(package, mode, ignores, wrapped):
    core, data = package.core, batch()
    theirs = always_by_sequences if ignores else core.compute_policy_loss_gspo
    theirs = types.FunctionType(
        theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__
    )
    if wrapped:
        inner = theirs

        @functools.wraps(inner)
        def theirs(*arguments, **options):
            return inner(*arguments, **options)

    theirs.__module__ = CORE
    core.compute_policy_loss_gspo = core.POLICY_LOSS_REGISTRY["gspo"] = theirs

    def run(function):
        config = transcribed(global_batch_info=GLOBAL, **FIELDS["gspo"])
        arguments = (data.advantages, data.mask, mode)
        return value_and_gradient(
            lambda x: function(data.old, x, *arguments, config=config)[0], data.log_prob
        )

    with ours.use_fastrl():
        assert core.POLICY_LOSS_REGISTRY["gspo"] is verl_policy_losses.gspo
        found = run(verl_policy_losses.gspo)
    for a, b in zip(found[:2], run(theirs)[:2], strict=True):
        close(a, b)
    direct, expected = (
        run(f) for f in (verl_policy_losses.gspo, verl_formulas.compute_policy_loss_gspo)
    )
    close(direct[0], expected[0])


def test_an_older_verl_without_a_loss(package):
    del package.core.compute_policy_loss_cispo, package.core.POLICY_LOSS_REGISTRY["cispo"]
    with ours.use_fastrl() as replaced:
        assert f"{CORE}.compute_policy_loss_cispo" not in replaced.names


def changed(old_log_prob, log_prob):
    raise AssertionError


def test_an_unknown_verl_is_refused_and_not_changed(package):
    core = package.core
    own = core.agg_loss
    changed.__module__ = CORE
    core.compute_policy_loss_gspo = changed
    with pytest.raises(NotImplementedError, match=r"gspo of verl 0.9.7 takes \(old_log_prob, log_"):
        ours.use_fastrl()
    del core.kl_penalty
    with pytest.raises(NotImplementedError, match=r"verl 0.9.7 has no .*\.kl_penalty"):
        ours.use_fastrl()
    assert core.agg_loss is own


def test_functions_that_were_already_replaced_are_refused(package):
    with ours.use_fastrl(), pytest.raises(RuntimeError, match="runs on fastrl already"):
        ours.use_fastrl()
    package.core.agg_loss = verl_formulas.agg_loss
    with pytest.raises(NotImplementedError, match=r"already replaced by .*verl_formulas"):
        ours.use_fastrl()


@pytest.mark.usefixtures("without_verl")
def test_without_verl():
    with pytest.raises(ImportError, match="verl is not importable"):
        ours.use_fastrl()


@pytest.mark.skipif(importable(CORE) is None, reason="needs verl itself")
def test_the_installed_verl_runs_on_fastrl():
    core = importlib.import_module(CORE)
    with ours.use_fastrl() as replaced:
        expected = {f"{CORE}.{item.name}" for item in ours._REPLACEMENTS if item.module == CORE}
        assert expected <= set(replaced.names)
        assert core.get_policy_loss_fn("vanilla") is verl_policy_losses.vanilla
        assert core.get_adv_estimator_fn("grpo") is ours.compute_grpo_outcome_advantage
        # a loss of verl that calls one of our functions
        loss, _ = core.compute_policy_loss_dro(
            *(batch().old, batch().log_prob, batch().advantages, batch().mask.float()),
            config=installed(
                LOCAL,
                policy_loss=importlib.import_module("verl.workers.config.actor").PolicyLossConfig(
                    dro_beta=0.1
                ),
            ),
        )
        assert loss.isfinite()
    assert core.get_policy_loss_fn("vanilla") is core.compute_policy_loss_vanilla


@pytest.mark.skipif(importable(CORE) is None, reason="needs verl itself")
@pytest.mark.parametrize("name", [*POLICY_LOSSES, "dro", "dppo_tv", "dppo_kl", "kl_cov"])
def test_verls_own_ppo_loss_with_entropy_and_kl(name):
    losses = pytest.importorskip("verl.workers.utils.losses", exc_type=ImportError)
    actor = importlib.import_module("verl.workers.config.actor")
    data, B, T = batch(), 6, 9
    attention = torch.cat([torch.ones(B, 1), torch.ones(B, T)], 1).long()
    fields = {
        "prompts": torch.ones(B, 1).long(),
        "responses": torch.ones(B, T).long(),
        "attention_mask": attention,
        "response_mask": data.mask,
        "old_log_probs": data.old,
        "ref_log_prob": data.old + 0.3 * data.values,
        "advantages": data.advantages,
    }
    fields = importlib.import_module("tensordict").TensorDict(fields, batch_size=B)
    for key in ("dp_size", "batch_num_tokens", "global_batch_size"):
        fields.set_non_tensor(key, GLOBAL[key])
    config = installed(
        {},
        **FIELDS.get(name, {}),
        policy_loss=actor.PolicyLossConfig(loss_mode=name, dro_beta=0.1),
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl+",
        entropy_coeff=0.01,
        loss_agg_mode="seq-mean-token-mean",
    )

    def run():
        log_prob = torch.nn.functional.pad(data.log_prob, (0, 1)).flatten().requires_grad_()
        entropy = torch.nn.functional.pad(data.values.abs(), (0, 1)).flatten().requires_grad_()
        outputs = {"log_probs": log_prob, "entropy": entropy}
        loss, metrics = losses.ppo_loss(config, outputs, fields)
        loss.backward()
        values = {key: getattr(value, "values", value) for key, value in metrics.items()}
        return loss.detach(), log_prob.grad, entropy.grad, values

    own = run()
    with ours.use_fastrl():
        found = run()
    for a, b in zip(found[:3], own[:3], strict=True):
        close(a, b)
    assert found[3].keys() == own[3].keys()
    for key, value in found[3].items():
        close(torch.tensor(value), torch.tensor(own[3][key]))
