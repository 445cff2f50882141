"""The defaults of TRL, verl, OpenRLHF and Liger beside those of conventions and drop-ins.

Each is compared with the source of the package where that is installed, which need not be
importable, and with ours everywhere. What differs is in docs/conventions.md.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fastrl
from fastrl import Objective
from fastrl.integrations import liger, liger_distillation, openrlhf, verl
from fastrl.objective.presets import ADVANTAGE_CONVENTIONS
from fastrl.ops.group_advantages import group_advantages


class Ours(NamedTuple):
    """What we have in the place of an option: its name, and a function that looks it up."""

    name: str
    read: Callable[[], object]


class Row(NamedTuple):
    option: str
    default: object
    ours: Ours | None = None  # None: there is no default here, the caller passes it
    meaning: object = ...  # their default as a value of ours, where it is written otherwise


class Source(NamedTuple):
    """A class with fields, a function or a class with `__init__`, or a parser, and its defaults."""

    package: str
    version: str
    file: str
    name: str
    rows: list[Row]


def presets(convention: str, field: str, names: str) -> Ours:
    """A field of presets, which should be the same in all of them."""

    def read() -> object:
        found = {getattr(Objective.preset(x, convention=convention), field) for x in names.split()}
        return found.pop() if len(found) == 1 else found

    return Ours(f"`{field}` of {names.replace(' ', ', ')}", read)


def weights(field: str) -> Ours:
    preset = Objective.preset("vespo", convention="trl")
    return Ours(f"`GammaWeights.{field}` of vespo", lambda: getattr(preset.gamma_weights, field))


def argument(function: Callable[..., Any], name: str) -> Ours:
    parameter = inspect.signature(function).parameters[name]
    return Ours(f"`{function.__qualname__}({name})`", lambda: parameter.default)


def signature(function: Callable[..., Any], **defaults: object) -> list[Row]:
    """The rows of a drop-in, which has their names."""
    return [Row(name, default, argument(function, name)) for name, default in defaults.items()]


CLIPPED, KLS = "bnpo dapo grpo dr_grpo", "bnpo dapo grpo dr_grpo gspo sapo luspo cispo vespo"
OF_TRL = "trainer/grpo_config.py"
TRL = [
    Row("epsilon", 0.2, presets("trl", "clip_low", CLIPPED)),
    Row("epsilon", 0.2, presets("trl", "clip_low", "gspo luspo")),
    Row("epsilon_high", None, presets("trl", "clip_high", CLIPPED), 0.2),
    Row("epsilon_high", None, presets("trl", "clip_high", "gspo luspo"), 0.2),
    Row("epsilon_high", None, presets("trl", "clip_high", "cispo"), 0.2 - 1),
    Row("delta", None, presets("trl", "delta", CLIPPED)),
    Row("beta", 0.0, presets("trl", "kl_coef", KLS)),
    Row("use_bias_correction_kl", True, presets("trl", "kl_gradient", KLS), "bias-corrected"),
    Row("sapo_temperature_pos", 1.0, presets("trl", "sapo_temperature_pos", "sapo")),
    Row("sapo_temperature_neg", 1.05, presets("trl", "sapo_temperature_neg", "sapo")),
    Row("vespo_k_pos", 2.0, weights("k_pos")),
    Row("vespo_lambda_pos", 3.0, weights("lambda_pos")),
    Row("vespo_k_neg", 3.0, weights("k_neg")),
    Row("vespo_lambda_neg", 2.0, weights("lambda_neg")),
    Row("importance_sampling_level", "token", presets("trl", "level", f"{CLIPPED} sapo cispo")),
    Row("entropy_coef", 0.0, presets("trl", "entropy_coef", KLS)),
    Row("top_entropy_quantile", 1.0, presets("trl", "top_entropy_quantile", KLS)),
    Row("off_policy_mask_threshold", None, presets("trl", "off_policy_threshold", KLS)),
    Row("scale_rewards", "group", argument(group_advantages, "scale")),
    Row("temperature", 1.0, argument(fastrl.linear_policy_loss, "temperature")),
    Row("loss_type", "dapo"),
    Row("max_completion_length", 512),
    Row("vllm_importance_sampling_correction", True),
    Row("vllm_importance_sampling_mode", "sequence_mask"),
    Row("vllm_importance_sampling_clip_max", 3.0),
    Row("vllm_importance_sampling_clip_min", None),
    Row("multi_objective_aggregation", "sum_then_normalize"),
    Row("mask_truncated_completions", False),
    Row("use_adaptive_entropy", False),
]
TRL_GMPO = [
    Row("epsilon", 0.4, presets("trl", "clip_low", "gmpo")),
    Row("epsilon", 0.4, presets("trl", "clip_high", "gmpo")),  # epsilon_high is None
]
TRL_RLOO = [
    Row("epsilon", 0.2),
    Row("epsilon_high", None),
    Row("beta", 0.05),
    Row("normalize_advantages", False),
    Row("reward_clip_range", None),
]

ALL = "ppo grpo dr_grpo dapo cispo gspo sapo gmpo reinforce dppo_tv dppo_kl"
BOUNDED, BY_TOKEN = "ppo grpo dr_grpo cispo", "ppo grpo dapo cispo reinforce dppo_tv dppo_kl"
VERL_ACTOR = [
    Row("clip_ratio", 0.2, presets("verl", "clip_low", f"{BOUNDED} dapo")),
    Row("clip_ratio_low", 0.2, presets("verl", "clip_low", f"{BOUNDED} dapo")),
    Row("clip_ratio_low", 0.2, presets("verl", "clip_low", "gspo gmpo")),
    Row("clip_ratio_high", 0.2, presets("verl", "clip_high", BOUNDED)),
    Row("clip_ratio_high", 0.2, presets("verl", "clip_high", "dapo gspo gmpo")),
    Row("clip_ratio_c", 3.0, presets("verl", "dual_clip", "ppo grpo dr_grpo dapo")),
    Row("clip_ratio_c", 3.0, presets("verl", "clip_high", "dppo_tv dppo_kl"), 3.0 - 1),
    Row("loss_agg_mode", "token-mean", presets("verl", "aggregation", BY_TOKEN)),
    Row("loss_agg_mode", "token-mean", presets("verl", "aggregation", "gspo")),
    Row(
        "loss_agg_mode",
        "token-mean",
        presets("verl", "kl_aggregation", "gspo sapo gmpo"),
    ),
    Row("loss_scale_factor", None, presets("verl", "length_norm", "dr_grpo")),
    Row("entropy_coeff", 0, presets("verl", "entropy_coef", ALL)),
    Row("tau_pos", 1.0, presets("verl", "sapo_temperature_pos", "sapo")),
    Row("tau_neg", 1.05, presets("verl", "sapo_temperature_neg", "sapo")),
    Row("use_kl_loss", False, presets("verl", "kl_coef", ALL), 0.0),
    Row("kl_loss_type", "low_var_kl", presets("verl", "kl_estimator", ALL), "k3"),
    Row("kl_loss_coef", 0.001),
]
VERL_POLICY = [
    Row("loss_mode", "vanilla"),
    Row("clip_cov_ratio", 0.0002),
    Row("clip_cov_lb", 1.0),
    Row("clip_cov_ub", 5.0),
    Row("kl_cov_ratio", 0.0002),
    Row("ppo_kl_coef", 0.1),
    Row("dro_beta", None),
]
VERL_ALGORITHM = [
    Row("norm_adv_by_std_in_grpo", True, argument(group_advantages, "scale"), "group"),
    Row("gamma", 1.0, argument(fastrl.gae, "gamma")),
    Row("lam", 1.0),
    Row("adv_estimator", "gae"),
    Row("use_kl_in_reward", False),
    Row("rollout_correction", None, presets("verl", "rollout_correction", ALL)),
]
VERL_CORRECTION = [
    Row("rollout_is", "sequence"),
    Row("rollout_is_threshold", 2.0),
    Row("rollout_is_batch_normalize", False),
    Row("rollout_rs", None),
    Row("rollout_rs_threshold", None),
]
EPSILON = Ours("`group_advantages(eps)`", lambda: ADVANTAGE_CONVENTIONS["verl"][1])
VERL_GRPO = [
    Row("epsilon", 1e-6, EPSILON),
    *signature(
        verl.compute_grpo_outcome_advantage,
        epsilon=1e-6,
        norm_adv_by_std_in_grpo=True,
        config=None,
    ),
]
VERL_AGGREGATION = signature(
    verl.agg_loss,
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
)

EVERY = "ppo grpo dapo gspo"
OPENRLHF_OPTIONS = [
    Row("--actor.eps_clip", 0.2, presets("openrlhf", "clip_low", "ppo grpo dapo")),
    Row("--actor.eps_clip", 0.2, presets("openrlhf", "clip_low", "gspo")),
    Row("--actor.eps_clip", 0.2, presets("openrlhf", "clip_high", "ppo grpo")),
    Row("--actor.eps_clip", 0.2, presets("openrlhf", "clip_high", "dapo gspo")),
    Row("--actor.eps_clip_low_high", None),
    Row("--actor.dual_clip", None, presets("openrlhf", "dual_clip", "ppo grpo dapo")),
    Row("--actor.entropy_coef", None, presets("openrlhf", "entropy_coef", EVERY), 0.0),
    Row("--actor.policy_loss_type", "ppo"),
    Row("--algo.kl.use_loss", False, presets("openrlhf", "kl_coef", EVERY), 0.0),
    Row("--algo.kl.estimator", "k1", presets("openrlhf", "kl_estimator", EVERY)),
    Row(
        "--algo.kl.unbiased_gradient",
        False,
        presets("openrlhf", "kl_gradient", EVERY),
        "exact",
    ),
    Row("--algo.kl.init_coef", 0.01),
    Row("--algo.advantage.is_correction_level", "off"),
    Row("--algo.advantage.no_std_norm", False),
    Row("--algo.advantage.gamma", 1, argument(fastrl.gae, "gamma")),
    Row("--algo.advantage.lambd", 1),
    Row("--rollout.temperature", 1.0, argument(openrlhf.log_probs_from_logits, "temperature")),
    Row("--critic.value_clip", 0.5),
]
OPENRLHF_POLICY = signature(
    openrlhf.PolicyLoss,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    dual_clip=None,
    token_level_loss=True,
    policy_loss_type="ppo",
    is_correction_level="off",
    is_correction_mode="mask",
    is_correction_gating="ratio",
    is_correction_threshold=(0.5, 5.0),
)
OPENRLHF_VALUE = signature(openrlhf.ValueLoss, clip_eps=None, token_level_loss=True)
OPENRLHF_KL = signature(
    openrlhf.compute_approx_kl, log_probs_old=None, kl_estimator="k1", unbiased_gradient=False
)
LIGER_GRPO = signature(
    liger.LigerFusedLinearGRPOLoss,
    beta=0.04,
    compiled=True,
    use_ref_model=True,
    chunk_size=1,
    epsilon_low=0.2,
    epsilon_high=0.2,
    loss_type="dapo",
    max_completion_length=None,
    importance_sampling_level="token",
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    temperature=1.0,
    delta=None,
    use_bias_correction_kl=False,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
)
LIGER_JSD = signature(
    liger_distillation.LigerFusedLinearJSDLoss,
    weight_hard_loss=0.5,
    weight_soft_loss=0.5,
    beta=0.5,
    ignore_index=-100,
    temperature=1.0,
    compiled=True,
    chunk_size=1024,
    return_soft_hard_loss=False,
)
CORE, ALGORITHM = "trainer/ppo/core_algos.py", "trainer/config/algorithm.py"
ACTOR, LOSS = "workers/config/actor.py", "models/loss.py"
CHUNKED = "chunked_loss"
SOURCES = [
    Source("trl", "1.16", OF_TRL, "GRPOConfig", TRL),
    Source("trl", "1.16", "experimental/gmpo/gmpo_config.py", "GMPOConfig", TRL_GMPO),
    Source("trl", "1.16", "trainer/rloo_config.py", "RLOOConfig", TRL_RLOO),
    Source("verl", "0.9.1", ACTOR, "ActorConfig", VERL_ACTOR),
    Source("verl", "0.9.1", ACTOR, "PolicyLossConfig", VERL_POLICY),
    Source("verl", "0.9.1", ALGORITHM, "AlgoConfig", VERL_ALGORITHM),
    Source("verl", "0.9.1", ALGORITHM, "RolloutCorrectionConfig", VERL_CORRECTION),
    Source("verl", "0.9.1", CORE, "compute_grpo_outcome_advantage", VERL_GRPO),
    Source("verl", "0.9.1", CORE, "agg_loss", VERL_AGGREGATION),
    Source("openrlhf", "0.11.2", "cli/train_ppo_ray.py", "", OPENRLHF_OPTIONS),
    Source("openrlhf", "0.11.2", LOSS, "PolicyLoss", OPENRLHF_POLICY),
    Source("openrlhf", "0.11.2", LOSS, "ValueLoss", OPENRLHF_VALUE),
    Source("openrlhf", "0.11.2", "models/utils.py", "compute_approx_kl", OPENRLHF_KL),
    Source(
        "liger_kernel", "0.8.5", f"{CHUNKED}/grpo_loss.py", "LigerFusedLinearGRPOLoss", LIGER_GRPO
    ),
    Source("liger_kernel", "0.8.5", f"{CHUNKED}/jsd_loss.py", "LigerFusedLinearJSDLoss", LIGER_JSD),
]
ROWS = [(source, row) for source in SOURCES for row in source.rows]


def value_of(node: ast.expr | None) -> object:
    """Return a literal, or the source of anything else, without `field(default=...)`."""
    if isinstance(node, ast.Call):
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        node = named.get("default", node)
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except ValueError:
        return ast.unparse(node)  # type: ignore[arg-type]


def defaults_of(tree: ast.AST, name: str) -> dict[str, object]:
    """Return the defaults of a function or class of this name, or of options of a parser."""
    if not name:
        options = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and x.args]
        options = [x for x in options if getattr(x.func, "attr", "") == "add_argument"]
        return {str(value_of(option.args[0])): value_of(option) for option in options}
    (found,) = [x for x in ast.walk(tree) if getattr(x, "name", None) == name]
    if isinstance(found, ast.ClassDef):
        fields = [x for x in found.body if isinstance(x, ast.AnnAssign) and x.value]
        inits = [x for x in found.body if getattr(x, "name", None) == "__init__"]
        if not inits:
            return {ast.unparse(x.target): value_of(x.value) for x in fields}
        (found,) = inits
    given = found.args.args[len(found.args.args) - len(found.args.defaults) :]
    return {x.arg: value_of(y) for x, y in zip(given, found.args.defaults, strict=True)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda x: f"{x.package} {x.name or x.file}")
def test_their_defaults_are_those_that_were_compared(source):
    spec = importlib.util.find_spec(source.package)
    if spec is None:
        pytest.skip(f"needs the files of {source.package}")
    file = Path(spec.submodule_search_locations[0]) / source.file
    found = defaults_of(ast.parse(file.read_text()), source.name)
    compared = {row.option: row.default for row in source.rows}
    assert {name: found.get(name, "missing") for name in compared} == compared
    if all(row.ours and row.option in row.ours.name for row in source.rows):
        assert found == compared, "an option is new"


@pytest.mark.parametrize(("source", "row"), ROWS, ids=lambda x: getattr(x, "option", None))
def test_our_default_is_theirs_or_a_difference_in_the_docs(source, row):
    if row.ours is None:
        return
    theirs, ours = row.default if row.meaning is ... else row.meaning, row.ours.read()
    if ours != theirs:
        text = (Path(__file__).parents[2] / "docs" / "conventions.md").read_text()
        differences = text.partition("Remaining differences:")[2].partition("\n## ")[0]
        assert f"`{row.option.rpartition('.')[2]}`" in differences, (source, ours, theirs)
