"""What `use_fastrl` does not support is refused by name, and the trainer is unchanged."""

import types

import pytest

from tests.support.trl_runs import make_model, make_trainer, needed, save_model

trl = needed("trl")
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
    "liger": ("args.use_liger_kernel", True, "`use_liger_kernel=True`: Liger replaces"),
    "compile": ("args.torch_compile", True, "`torch_compile=True`: the compiled forward"),
    "deepspeed": ("is_deepspeed_enabled", True, "DeepSpeed: sharded parameters"),
    "fsdp": ("is_fsdp_enabled", True, "FSDP: sharded parameters"),
    "vision": ("_is_vlm", True, "vision-language models: only TRL knows"),
    "experts": ("aux_loss_enabled", True, "mixture of experts .*: fastrl does not see"),
    "device_map": ("model.hf_device_map", {"a": 0, "b": 1}, "several devices .*on one device"),
    "several GPUs": ("args._n_gpu", 2, "several devices .*on one device"),
    "own scores": (
        "_get_per_token_logps_and_entropies",
        print,
        "trainer._get_per_token.* is already replaced",
    ),
    "own loss": ("_compute_loss", print, "trainer._compute_loss is already replaced"),
    "own compute_loss": ("compute_loss", print, "trainer.compute_loss is already replaced"),
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
    with pytest.raises(ValueError, match="tensor, context or sequence parallelism"):
        use_fastrl(trainer)


def test_every_rule_that_refuses_is_tested():
    assert len(REFUSED) == 8


@pytest.mark.parametrize("method", ["_compute_loss", "_get_per_token_logps_and_entropies"])
def test_a_subclass_that_overrides_a_method_is_refused(method, trainer, monkeypatch):
    class OtherTrainer(trl.GRPOTrainer):
        pass

    setattr(OtherTrainer, method, lambda self, *_: None)
    monkeypatch.setattr(trainer, "__class__", OtherTrainer)
    with pytest.raises(ValueError, match=f"OtherTrainer overrides {method}, which would"):
        use_fastrl(trainer)


def test_trls_own_subclass_with_another_loss_is_refused(trainer, monkeypatch):
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    monkeypatch.setattr(trainer, "__class__", gmpo.GMPOTrainer)
    with pytest.raises(ValueError, match="GMPOTrainer overrides _compute_loss"):
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


@pytest.mark.parametrize("other", [None, object(), trl.GRPOTrainer])
def test_other_types_are_refused(other):
    with pytest.raises(TypeError, match="must be an instance of GRPOTrainer or RLOOTrainer, got"):
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
    "GSPO": ("importance_sampling_level", "sequence", "importance_sampling_level"),
    "vespo": ("loss_type", "vespo", "vespo"),
    "a new loss": ("loss_type", "next_year", "not in this table"),
    "delta": ("args.delta", 1.1, "`delta` not above"),
    "off-policy mask": ("off_policy_mask_threshold", 0.1, "off_policy_mask_threshold"),
    "top entropy": ("top_entropy_quantile", 0.2, "top_entropy_quantile"),
    "adaptive bonus": ("use_adaptive_entropy", True, "use_adaptive_entropy"),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_fused_is_refused_where_it_is_impossible(name, trainer, monkeypatch):
    path, value, sentence = UNFUSED[name]
    *owners, attribute = path.split(".")
    monkeypatch.setattr(trainer.args if owners else trainer, attribute, value)
    with pytest.raises(ValueError, match=f"fused must be None or False with .*{sentence}"):
        use_fastrl(trainer, fused=True)
    with use_fastrl(trainer) as handle:
        assert not handle.fused


def test_rloo_is_not_fused(rloo):
    with pytest.raises(ValueError, match="fused must be None or False with `RLOOTrainer`"):
        use_fastrl(rloo, fused=True)


def test_an_unknown_head_is_refused(trainer, monkeypatch):
    import transformers

    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1)
    other = transformers.AutoModelForCausalLM.from_config(config)
    for name in ("model", "ref_model"):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, other)
            with pytest.raises(ValueError, match="got GPT2LMHeadModel of type gpt2"):
                use_fastrl(trainer)


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


def test_prompt_learning_is_refused(trainer, monkeypatch):
    peft = needed("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    monkeypatch.setattr(trainer, "model", peft.get_peft_model(make_model(), config))
    with pytest.raises(ValueError, match="must not use a prompt-learning adapter"):
        use_fastrl(trainer)
