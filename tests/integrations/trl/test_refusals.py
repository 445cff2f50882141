"""What `use_fastrl` does not support is refused by name, and the trainer is unchanged."""

import types

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import make_trainer
from tests.integrations.trl.runs import VOCABULARY, make_model

transformers, trl = needed("transformers"), needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.rules import REFUSED  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SCORES = "_get_per_token_logps_and_entropies"


@pytest.fixture(scope="module")
def trainer(tiny_path, tmp_path_factory):
    return make_trainer(tiny_path, output_dir=tmp_path_factory.mktemp("out"))


def subclass(**methods):
    return type("OtherTrainer", (trl.GRPOTrainer,), methods)


def set_all(monkeypatch, trainer, changes):
    """Set attributes of a trainer and of what it holds until the end of the test."""
    for path, value in changes.items():
        *owners, attribute = path.split(".")
        owner = trainer
        for part in owners:
            owner = getattr(owner, part)
        monkeypatch.setattr(owner, attribute, value, raising=False)


def narrower(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None):
    return None


LAYOUT = "accelerator.__class__.parallelism_config"
PARALLEL = r"tensor, context or sequence parallelism.* FSDP2 and DDP are"
SEVERAL = "several devices .*one device: start .*FSDP2 or DDP"
# what is set (where, to what), and the error message
BAD = {
    "device_map": ("model.hf_device_map", {"a": 0, "b": 1}, SEVERAL),
    "several GPUs": ("args._n_gpu", 2, SEVERAL),
    **{
        kind: (LAYOUT, types.SimpleNamespace(**{kind: True}), PARALLEL)
        for kind in ("tp_enabled", "cp_enabled", "sp_enabled")
    },
    "own scores": (SCORES, print, "trainer._get_per_token.* is already replaced"),
    "scores of a subclass": (
        "__class__",
        subclass(**{SCORES: lambda self, *_: None}),
        r"OtherTrainer overrides _get_per_token.* Call `fastrl.token_logprobs`",
    ),
    "a TRL with other arguments": (
        f"__class__.{SCORES}",
        narrower,
        "has no compute_entropy, compute_aux_loss",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_setting_is_refused(name, trainer, monkeypatch):
    path, value, sentence = BAD[name]
    set_all(monkeypatch, trainer, {path: value})
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer)
    assert trainer.__dict__ == before


def test_every_rule_that_refuses_is_tested():
    assert len(REFUSED) == 2


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (f"trl.GRPOTrainer.{SCORES}", r"this version of TRL has no GRPOTrainer\._get_per"),
        ("trl.trainer.utils.add_fused_lm_head", r"no model with `fused_lm_head`.*TRL 1.15 and"),
    ],
)
def test_a_trl_without_a_part_is_refused(missing, sentence, trainer, monkeypatch):
    monkeypatch.delattr(missing)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer)


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
def test_a_loss_of_its_own_is_kept(method, trainer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "__class__", subclass(**{method: lambda self, *_: None}))
        with use_fastrl(trainer) as handle:
            assert not handle.fused
            assert method not in trainer.__dict__
        sentence = r"fused must .*: this OtherTrainer computes a loss of its own"
        with pytest.raises(ValueError, match=sentence):
            use_fastrl(trainer, fused=True)
    monkeypatch.setitem(trainer.__dict__, method, print)
    with use_fastrl(trainer) as handle:
        assert not handle.fused
        assert getattr(trainer, method) is print


def test_a_subclass_that_overrides_other_methods_is_accepted(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "__class__", subclass(log=lambda self, *_: None))
    with use_fastrl(trainer) as handle:
        assert handle.fused


def test_a_second_use_is_refused(trainer):
    with (
        use_fastrl(trainer),
        pytest.raises(ValueError, match="is already replaced; undo that first"),
    ):
        use_fastrl(trainer)


def of(name, base=object):
    """An instance of a class of this name, without what its constructor needs."""
    kind = type(name, (base,), {})
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("other", "way"),
    [
        (None, "got NoneType: if its loss is a policy loss, `fastrl.linear_policy_loss`"),
        (of("NextYearsTrainer"), "if it needs log-probabilities .*`fastrl.linear_token_logprobs`"),
        (of("NextYearsTrainer", trl.DPOTrainer.__base__), "if its loss is a policy loss"),
        (
            of("MyTrainer", transformers.Trainer),
            r"logits_policy_loss` \(docs/replace-the-loss/transformers.md\)",
        ),
        (trl.GRPOTrainer, "got the class GRPOTrainer: pass an instance$"),
        (type("MyTrainer", (trl.RLOOTrainer,), {}), "got the class MyTrainer: pass an instance$"),
        (trl.DPOTrainer, "got the class DPOTrainer: pass an instance$"),
        (of("GKDTrainer"), "compares distributions.*`fastrl.linear_policy_loss"),
        (of("SSDTrainer"), "needs log-probabilities of given tokens"),
        (of("IWOPDTrainer"), 'distillation_objective="iw_opd" .*objective="reinforce"'),
        (of("SDPOTrainer"), 'distillation_mode="sampled_token" .*objective="reinforce"'),
        (of("RewardTrainer", trl.RewardTrainer), "one score .* to save memory on$"),
        (of("AsyncGRPOTrainer"), "`fastrl.linear_policy_loss` computes such a loss"),
    ],
)
def test_other_trainers_are_refused_with_a_way_on(other, way):
    sentence = "must be an instance of GRPOTrainer, .* or "
    with pytest.raises(TypeError, match=f"{sentence}.*{way}"):
        use_fastrl(other)


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [("quick", "backend must be one of"), ("cuda", "backend 'cuda' cannot do this call")],
)
def test_a_backend_that_cannot_run_here_is_refused(backend, sentence, trainer):
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer, backend=backend)
    assert "_compute_loss" not in trainer.__dict__


UNFUSED = {
    "no Objective is loss_type='vespo', so TRL": {"loss_type": "vespo"},
    "no Objective is loss_type='next_year', so TRL": {"loss_type": "next_year"},
    r"delta must be above 1 \+ epsilon_high = 1.2, got 1.1, so TRL": {"args.delta": 1.1},
    r"epsilon_high - 1 must .*, got -1.5, so TRL": {"loss_type": "cispo", "epsilon_high": -0.5},
    "beta must .*, got -0.1, so TRL": {"beta": -0.1},
    "top_entropy_quantile=0.2 with an entropy bonus or on several ranks": {
        "top_entropy_quantile": 0.2,
        "_entropy_bonus_enabled": True,
    },
}


@pytest.mark.parametrize("sentence", UNFUSED)
def test_fused_is_refused_where_it_is_impossible(sentence, trainer, monkeypatch):
    set_all(monkeypatch, trainer, UNFUSED[sentence])
    with pytest.raises(ValueError, match=f"fused must be None or False: {sentence}"):
        use_fastrl(trainer, fused=True)
    with use_fastrl(trainer) as handle:
        assert not handle.fused


def test_rloo_is_fused_where_an_objective_has_its_bounds(tiny_path, tmp_path):
    rloo = make_trainer(tiny_path, "RLOO", output_dir=tmp_path)
    with use_fastrl(rloo, fused=True) as handle:
        assert handle.fused
    rloo.epsilon_low = 1.5
    assert use_fastrl(rloo).reason.startswith("epsilon must")


@pytest.mark.parametrize("name", ["model", "ref_model"])
def test_a_model_with_other_logits_is_refused(name, trainer, monkeypatch):
    other = make_model()
    own = other.forward

    def shifted(*arguments, **options):
        outputs = own(*arguments, **options)
        outputs.logits = outputs.logits + torch.arange(VOCABULARY)
        return outputs

    other.forward = shifted
    monkeypatch.setattr(trainer, name, other)
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match="the logits of LlamaForCausalLM differ from"):
        use_fastrl(trainer)
    assert trainer.__dict__ == before


def test_an_unsupported_adapter_is_refused(trainer, monkeypatch):
    peft = needed("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True)
    monkeypatch.setattr(trainer, "model", peft.get_peft_model(make_model(), config))
    with pytest.raises(ValueError, match="must be plain LoRA"):
        use_fastrl(trainer)
