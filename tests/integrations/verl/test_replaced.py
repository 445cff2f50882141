"""fastrl in verl's modules and registries: verl's code runs on it until `undo()`."""

import functools
import importlib
import importlib.util
import sys
import textwrap
import types

import pytest

from fastrl.integrations import verl as ours
from fastrl.integrations.verl import fused_linear, policy_losses
from tests.integrations.compared import close
from tests.integrations.packages import without_modules
from tests.integrations.verl import formulas, loss_formulas
from tests.integrations.verl.cases import (
    CORE,
    COUNTS,
    LOSSES,
    TOKENS,
    batch,
    fused_inputs,
    policy_loss,
    transcribed,
)

FUSED = "verl.utils.experimental.torch_functional"
KERNEL = "verl.utils.kernel.linear_cross_entropy"
PLUGIN = "fastrl.integrations.verl.plugin"

#: the transcribed functions that a module of verl has
COPIED = """
    import types
    from tests.integrations.verl import formulas, loss_formulas

    for name, x in (vars(formulas) | vars(loss_formulas)).items():
        of_tokens = name.endswith(("from_logits", "chunking"))
        if isinstance(x, types.FunctionType) and of_tokens == ("utils" in __name__):
            rest = (name, x.__defaults__, x.__closure__)
            globals()[name] = copy = types.FunctionType(x.__code__, x.__globals__, *rest)
            copy.__module__ = __name__
"""
REGISTRIES = """
    del compute_policy_loss_reinforce, copy, x
    POLICY_LOSS_REGISTRY = {
        name.removeprefix("compute_policy_loss_"): function
        for name, function in list(globals().items())
        if name.startswith("compute_policy_loss")
    }
    ADV_ESTIMATOR_REGISTRY = {"gae": compute_gae_advantage_return}
"""
#: a package with verl's modules of these names, made of the transcription
PACKAGE = {
    "__init__": "__version__ = '0.9.7'",
    "utils/torch_functional": COPIED,
    "trainer/ppo/core_algos": COPIED + REGISTRIES,
    "workers/losses": "from verl.trainer.ppo.core_algos import agg_loss",
    "utils/experimental/torch_functional": """
        import torch

        class FusedLinearForPPO(torch.nn.Module):
            def __init__(self, chunk_size=512):
                super().__init__()

            def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
                return "theirs"
        """,
    "utils/kernel/linear_cross_entropy": """
        import torch

        class LinearCrossEntropy(torch.autograd.Function):
            @staticmethod
            def forward(
                ctx, hidden, weight, labels, temperature=1.0, reduction="none",
                dist_process_group=None,
            ):
                return hidden

        linear_cross_entropy = LinearCrossEntropy.apply
        """,
}


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The folder of the package, of which nothing is imported yet."""
    without_modules(monkeypatch, "verl")
    for path, text in PACKAGE.items():
        file = tmp_path / "verl" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    importlib.invalidate_caches()
    yield tmp_path / "verl"
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def change(package, file, old, new, count=-1):
    """Write another version of a module, as long as it was not imported."""
    path = package / f"{file}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


@pytest.fixture
def core(package):
    del package
    return importlib.import_module(CORE)


def test_functions_are_replaced_everywhere_and_restored(core):
    losses = importlib.import_module("verl.workers.losses")
    own = dict(core.POLICY_LOSS_REGISTRY), core.agg_loss
    with ours.use_fastrl() as replaced:
        assert core.agg_loss is losses.agg_loss is ours.agg_loss
        assert core.POLICY_LOSS_REGISTRY["gspo"] is policy_losses.gspo
        assert core.ADV_ESTIMATOR_REGISTRY["gae"] is ours.compute_gae_advantage_return
        assert {f"{CORE}.kl_penalty", f"{TOKENS}.entropy_from_logits"} <= set(replaced.names)
    assert own[0] == core.POLICY_LOSS_REGISTRY
    assert core.agg_loss is losses.agg_loss is own[1]
    with ours.use_fastrl():
        replaced.undo()  # does nothing, as the second use has another handle
        assert core.agg_loss is ours.agg_loss
    assert core.agg_loss is own[1]


def test_modules_are_replaced_when_verl_imports_them(package):
    del package
    with ours.use_fastrl() as handle:
        assert FUSED not in sys.modules
        given = (*fused_inputs(5, 16, 33)[:3], 0.7)
        module, kernel = (importlib.import_module(name) for name in (FUSED, KERNEL))
        for run in (module.FusedLinearForPPO().forward, kernel.linear_cross_entropy):
            close([x.flatten() for x in run(*given)], formulas.linear(*given))
        names = {f"{FUSED}.FusedLinearForPPO.forward", f"{KERNEL}.linear_cross_entropy"}
        assert names <= set(handle.names)
    assert kernel.linear_cross_entropy.__self__ is kernel.LinearCrossEntropy
    assert module.FusedLinearForPPO()(*given) == "theirs"


def test_classes_that_verl_has_imported_are_replaced_at_once(package):
    del package
    own = importlib.import_module(FUSED).FusedLinearForPPO
    forward, instance = own.forward, own()
    with ours.use_fastrl():  # also for instances that exist already
        assert own.forward is fused_linear.FusedLinearForPPO.forward
    assert vars(own)["forward"] is forward
    assert instance(None, None, None) == "theirs"


def test_a_module_that_is_executed_again(package):
    del package
    finders = list(sys.meta_path)
    with ours.use_fastrl() as handle:
        # a copy of the caller's own, which is not the module that verl imports
        spec = importlib.util.find_spec(FUSED)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        assert copy.FusedLinearForPPO()(None, None, None) == "theirs"
        module, classes = importlib.import_module(FUSED), []
        for _ in range(2):
            classes.append(importlib.reload(module).FusedLinearForPPO)
            assert classes[-1].forward is fused_linear.FusedLinearForPPO.forward
        assert handle.names.count(f"{FUSED}.FusedLinearForPPO.forward") == 1
    assert sys.meta_path == finders
    classes.append(importlib.reload(module).FusedLinearForPPO)  # is replaced no longer
    assert {own()(None, None, None) for own in classes} == {"theirs"}


def test_the_plugin_acts_if_verl_imports_it(core):
    plugin = importlib.import_module(PLUGIN)
    assert core.agg_loss is ours.agg_loss
    with pytest.raises(RuntimeError, match=rf"through the plug-in {PLUGIN}: leave out use_fastrl"):
        ours.use_fastrl()
    plugin.replaced.undo()
    with ours.use_fastrl(), pytest.raises(RuntimeError, match="undo the first use_fastrl"):
        ours.use_fastrl()


def test_the_plugin_acts_after_verl_if_it_was_first(package):
    change(package, "trainer/ppo/core_algos", "ADV_", "kept = globals().pop('kl_penalty')\nADV_")
    plugin = importlib.import_module(PLUGIN)
    assert plugin.replaced is None
    for _ in range(2):  # the import fails each time, instead of going on without fastrl
        with pytest.raises(NotImplementedError, match=r"has no .*\.kl_penalty"):
            importlib.import_module("verl")
    core = sys.modules[CORE]
    core.kl_penalty = core.kept
    verl = importlib.import_module("verl")
    assert core.agg_loss is ours.agg_loss
    importlib.reload(verl)  # is watched no longer
    plugin.replaced.undo()
    assert core.kl_penalty is core.kept


#: the message -> a module of verl, and what another version has there instead
UNKNOWN = {
    r"gspo of verl 0.9.7 takes \(old, new\), fastrl expects \(old_log_prob, log_prob": (
        *("trainer/ppo/core_algos", "ADV_"),
        "def compute_policy_loss_gspo(old, new): ...\nADV_",
    ),
    r"verl 0.9.7 has no .*\.kl_penalty": ("trainer/ppo/core_algos", "ADV_", "del kl_penalty\nADV_"),
    "already replaced by tests.integrations.verl.formulas": (
        *("trainer/ppo/core_algos", "ADV_"),
        "from tests.integrations.verl.formulas import kl_penalty\nADV_",
    ),
    r"linear_cross_entropy of verl 0.9.7 takes \(hidden, weight, labels, weights, ": (
        *("utils/kernel/linear_cross_entropy", "labels,", "labels, weights,"),
    ),
    r"FusedLinearForPPO.forward of verl 0.9.7 takes .*mask=None\), fastrl expects": (
        *("utils/experimental/torch_functional", "temperature=1.0", "temperature=1.0, mask=None"),
    ),
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_an_unknown_verl_is_refused_and_not_changed(package, message):
    file, *other = UNKNOWN[message]
    change(package, file, *other)
    name = f"verl.{file.replace('/', '.')}"
    if name == CORE:
        with pytest.raises(NotImplementedError, match=message):
            ours.use_fastrl()
        assert sys.modules[CORE].agg_loss.__module__ == CORE
    else:  # when verl imports it
        with ours.use_fastrl():
            with pytest.raises(NotImplementedError, match=message):
                importlib.import_module(name)
            assert name not in sys.modules
        importlib.import_module(name)


def test_an_older_verl_without_a_loss_and_a_class(package):
    change(package, "trainer/ppo/core_algos", "ADV_", "del compute_policy_loss_cispo\nADV_")
    (package / "utils/experimental/torch_functional.py").write_text("")
    with ours.use_fastrl() as replaced:
        importlib.import_module(FUSED)
        names = " ".join(replaced.names)
    assert "compute_policy_loss_vanilla" in names
    assert "cispo" not in names
    assert "FusedLinear" not in names


def test_without_verl(monkeypatch):
    without_modules(monkeypatch, "verl")
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match="verl is not importable"):
        ours.use_fastrl()


#: GSPO of verl 0.9.0, which ignores `loss_agg_mode`
IGNORES = """
by_mode = compute_policy_loss_gspo
def compute_policy_loss_gspo(
    old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode="seq-mean-token-mean", config=None, rollout_is_weights=None,
):
    arguments = (old_log_prob, log_prob, advantages, response_mask, "seq-mean-token-mean")
    return by_mode(*arguments, config=config, rollout_is_weights=rollout_is_weights)
POLICY_"""


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_gspo_aggregates_as_the_verl_that_is_installed(package, mode, ignores, wrapped):
    if ignores:
        change(package, "trainer/ppo/core_algos", "POLICY_", IGNORES, 1)
    core = importlib.import_module(CORE)
    theirs = core.compute_policy_loss_gspo
    if wrapped:

        @functools.wraps(theirs)
        def wrapper(*arguments, **options):
            return theirs(*arguments, **options)

        core.compute_policy_loss_gspo = core.POLICY_LOSS_REGISTRY["gspo"] = wrapper

    def run(function):
        config = transcribed(global_batch_info=COUNTS["global"], **LOSSES["gspo"])
        namespace = types.SimpleNamespace(compute_policy_loss_gspo=function)
        return policy_loss(namespace, "gspo", batch(), config, mode)

    with ours.use_fastrl():
        assert core.POLICY_LOSS_REGISTRY["gspo"] is policy_losses.gspo
        found = run(policy_losses.gspo)
    close(found, run(theirs))
    close(run(policy_losses.gspo), run(loss_formulas.compute_policy_loss_gspo))
