"""What `use_fastrl` does not support is refused by name, and the trainer is unchanged."""

import types

import pytest
import torch

from tests.support.trl_runs import VOCABULARY, make_model, make_trainer, needed, save_model

transformers, trl = needed("transformers"), needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.rules import REFUSED  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("tiny"))
    return make_trainer(path, output_dir=tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def rloo(tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("tiny"))
    return make_trainer(path, "RLOO", output_dir=tmp_path_factory.mktemp("out"))


# what is set (where, to what), and the error message
BAD = {
    "device_map": (
        "model.hf_device_map",
        {"a": 0, "b": 1},
        "several devices .*one device: start .*FSDP2 or DDP",
    ),
    "several GPUs": ("args._n_gpu", 2, "several devices .*one device: start .*FSDP2 or DDP"),
    "own scores": (
        "_get_per_token_logps_and_entropies",
        print,
        "trainer._get_per_token.* is already replaced",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_setting_is_refused(name, trainer, monkeypatch):
    path, value, sentence = BAD[name]
    *owners, attribute = path.split(".")
    owner = trainer
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, attribute, value, raising=False)
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer)
    assert trainer.__dict__ == before


@pytest.mark.parametrize("kind", ["tp_enabled", "cp_enabled", "sp_enabled"])
def test_other_parallelism_is_refused(kind, trainer, monkeypatch):
    monkeypatch.setattr(
        type(trainer.accelerator), "parallelism_config", types.SimpleNamespace(**{kind: True})
    )
    with pytest.raises(
        ValueError, match=r"tensor, context or sequence parallelism.* FSDP2 and DDP are"
    ):
        use_fastrl(trainer)


def test_every_rule_that_refuses_is_tested():
    assert len(REFUSED) == 2


def test_a_subclass_with_scores_of_its_own_is_refused(trainer, monkeypatch):
    class OtherTrainer(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *_):
            return None

    monkeypatch.setattr(trainer, "__class__", OtherTrainer)
    sentence = r"OtherTrainer overrides _get_per_token.* Call `fastrl.token_logprobs`"
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer)


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
def test_a_subclass_with_a_loss_of_its_own_keeps_it(method, trainer, monkeypatch):
    class OtherTrainer(trl.GRPOTrainer):
        pass

    setattr(OtherTrainer, method, lambda self, *_: None)
    monkeypatch.setattr(trainer, "__class__", OtherTrainer)
    with use_fastrl(trainer) as handle:
        assert not handle.fused
        assert method not in trainer.__dict__
    with pytest.raises(
        ValueError, match=r"fused must .*: this OtherTrainer computes a loss of its own"
    ):
        use_fastrl(trainer, fused=True)


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
def test_an_instance_with_a_loss_of_its_own_keeps_it(method, trainer, monkeypatch):
    monkeypatch.setitem(trainer.__dict__, method, print)
    with use_fastrl(trainer) as handle:
        assert not handle.fused
        assert getattr(trainer, method) is print


def test_a_trl_before_1_15_is_refused(trainer, monkeypatch):
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head")
    with pytest.raises(ValueError, match=r"no model with `fused_lm_head`.*TRL 1.15 and later"):
        use_fastrl(trainer)


def test_a_subclass_that_overrides_other_methods_is_accepted(trainer, monkeypatch):
    class LoggingTrainer(trl.GRPOTrainer):
        def log(self, logs, start_time=None):
            super().log(logs, start_time)

    monkeypatch.setattr(trainer, "__class__", LoggingTrainer)
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
        (of("MyTrainer", transformers.Trainer), '"Hugging Face `Trainer`"'),
        (trl.GRPOTrainer, "got the class GRPOTrainer: pass an instance$"),
        (type("MyTrainer", (trl.RLOOTrainer,), {}), "got the class MyTrainer: pass an instance$"),
        (trl.DPOTrainer, "got the class DPOTrainer: .*`fastrl.linear_token_logprobs`"),
        (of("MyTrainer", trl.DPOTrainer), "got MyTrainer: .*`fastrl.linear_token_logprobs`"),
        (of("GKDTrainer", trl.SFTTrainer), "compares whole distributions.*`fastrl.kl_divergence`"),
        (of("SSDTrainer"), "needs log-probabilities of given tokens"),
        (of("IWOPDTrainer"), 'distillation_objective="iw_opd" .*objective="reinforce"'),
        (of("SDPOTrainer"), 'distillation_mode="sampled_token" .*objective="reinforce"'),
        (of("RewardTrainer", trl.RewardTrainer), "one score .* to save memory on$"),
        (of("AsyncGRPOTrainer"), "`fastrl.linear_policy_loss` computes such a loss"),
    ],
)
def test_other_trainers_are_refused_with_a_way_on(other, way):
    sentence = "must be an instance of GRPOTrainer or RLOOTrainer, "
    with pytest.raises(TypeError, match=f"{sentence}.*{way}"):
        use_fastrl(other)


def test_a_trl_with_other_methods_is_refused(trainer, monkeypatch):
    def narrower(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None):
        return None

    name = "_get_per_token_logps_and_entropies"
    monkeypatch.setattr(trl.GRPOTrainer, name, narrower)
    with pytest.raises(ValueError, match="has no compute_entropy, compute_aux_loss"):
        use_fastrl(trainer)
    monkeypatch.delattr(trl.GRPOTrainer, name)
    with pytest.raises(ValueError, match=r"this version of TRL has no GRPOTrainer\._get_per"):
        use_fastrl(trainer)


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [("quick", "backend must be one of"), ("cuda", "backend 'cuda' cannot do this call")],
)
def test_a_backend_that_cannot_run_here_is_refused(backend, sentence, trainer):
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer, backend=backend)
    assert "_compute_loss" not in trainer.__dict__


UNFUSED = {
    "vespo": ({"loss_type": "vespo"}, "no Objective is loss_type='vespo', so TRL"),
    "a new loss": ({"loss_type": "next_year"}, "no Objective is loss_type='next_year', so TRL"),
    "delta": (
        {"args.delta": 1.1},
        r"delta must be above 1 \+ epsilon_high = 1.2, got 1.1, so TRL",
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": -0.5},
        r"epsilon_high - 1 must .*, got -1.5, so TRL",
    ),
    "beta": ({"beta": -0.1}, "beta must .*, got -0.1, so TRL"),
    "top entropy and a bonus": (
        {"top_entropy_quantile": 0.2, "_entropy_bonus_enabled": True},
        "top_entropy_quantile=0.2 with an entropy bonus or on several ranks",
    ),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_fused_is_refused_where_it_is_impossible(name, trainer, monkeypatch):
    options, sentence = UNFUSED[name]
    for path, value in options.items():
        *owners, attribute = path.split(".")
        monkeypatch.setattr(trainer.args if owners else trainer, attribute, value)
    with pytest.raises(ValueError, match=f"fused must be None or False: {sentence}"):
        use_fastrl(trainer, fused=True)
    with use_fastrl(trainer) as handle:
        assert not handle.fused


def test_rloo_is_fused_where_an_objective_has_its_bounds(rloo, monkeypatch):
    with use_fastrl(rloo, fused=True) as handle:
        assert handle.fused
    monkeypatch.setattr(rloo, "epsilon_low", 1.5)
    with use_fastrl(rloo) as handle:
        assert not handle.fused
        assert handle.reason.startswith("epsilon must")


def test_a_model_with_other_logits_is_refused(trainer, monkeypatch):
    for name in ("model", "ref_model"):
        other = make_model()
        own = type(other).forward

        def shifted(*arguments, own=own, other=other, **options):
            outputs = own(other, *arguments, **options)
            outputs.logits = outputs.logits + torch.arange(VOCABULARY)
            return outputs

        other.forward = shifted
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, other)
            before = dict(trainer.__dict__)
            with pytest.raises(ValueError, match="the logits of LlamaForCausalLM differ from"):
                use_fastrl(trainer)
            assert trainer.__dict__ == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target_modules": ["lm_head"], "use_dora": True}, "must be plain LoRA"),
        ({"target_modules": ["lm_head"], "lora_dropout": 0.1}, "lora_dropout on the LM head"),
    ],
)
def test_an_unsupported_adapter_is_refused(options, sentence, trainer, monkeypatch):
    peft = needed("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, **options)).train()
    monkeypatch.setattr(trainer, "model", model)
    with pytest.raises(ValueError, match=sentence):
        use_fastrl(trainer)
