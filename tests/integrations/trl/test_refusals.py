"""Which adapter a trainer of TRL gets, and what is refused by name: the trainer is then as before.

What a generation or a batch shows is refused in the files of each option.
"""

import importlib
import re
import types

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import KINDS
from tests.integrations.trl.runs import VOCABULARY, make_model

transformers, trl = needed("transformers"), needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.handle import with_globals  # noqa: E402
from fastrl.integrations.trl.rules import NOT_REPLAYED, REFUSED  # noqa: E402
from fastrl.integrations.trl.trainers import TRAINERS  # noqa: E402

LAYOUT = "accelerator.__class__.parallelism_config"
SCORES = "__class__._get_per_token_logps_and_entropies"
LOSS = "__class__._compute_loss"
OF_MODULE = f"{LOSS}.__globals__"
SELF = "__class__._compute_self_distillation_loss.__globals__"
GONE = object()
#: `trainer(arguments of use_fastrl) with what is set in the trainer -> what the error says`
BAD = rf"""
GRPO with args._n_gpu = 2 -> several devices .*one device: start .*FSDP2 or DDP
GRPO with {LAYOUT} = of(tp_enabled=True) -> tensor, context or sequence par.* FSDP2 and DDP are
GRPO with {LAYOUT} = of(cp_enabled=True) -> tensor, context or sequence par.* FSDP2 and DDP are
GRPO with {LAYOUT} = of(sp_enabled=True) -> tensor, context or sequence par.* FSDP2 and DDP are
GRPO with _get_per_token_logps_and_entropies = print -> trainer._get_per_.* is already replaced
GRPO with __class__ = own_scores() -> OtherTrainer overrides _get_per.* Call `fastrl.token_logprobs`
GRPO with {SCORES} = narrower -> has no compute_entropy, compute_aux_loss
GRPO with {SCORES} = GONE -> this version of TRL has no GRPOTrainer\._get_per
GRPO with trl.trainer.utils.add_fused_lm_head = GONE -> no model with `fused_lm_head`.*TRL 1.15 and
GRPO with model = shifted() -> the logits of LlamaForCausalLM differ from
GRPO with ref_model = shifted() -> the logits of LlamaForCausalLM differ from
GRPO with model = adapted("Lora", target_modules=["lm_head"], use_dora=True) -> must be plain LoRA
GRPO(backend="quick") -> backend must be one of
GRPO(fused=True) with loss_type = "vespo" -> no Objective is loss_type='vespo', so TRL
GRPO(fused=True) with loss_type = "next_year" -> no Objective is loss_type='next_year', so TRL
GRPO(fused=True) with args.delta = 1.1 -> delta must be above 1 \+ epsilon_high = 1.2, got 1.1, so
GRPO(fused=True) with loss_type = "cispo"; epsilon_high = -0.5
    -> epsilon_high - 1 must .*, got -1.5, so TRL
GRPO(fused=True) with beta = -0.1 -> beta must .*, got -0.1, so TRL
GRPO(fused=True) with top_entropy_quantile = 0.2; _entropy_bonus_enabled = True
    -> top_entropy_quantile=0.2 with an entropy bonus or on several ranks
RLOO(fused=True) with epsilon_low = 1.5 -> epsilon must
GRPO(packed=1.0) -> TypeError: packed must be None or a bool, got float
GRPO(packed_tokens=8.0) -> TypeError: packed_tokens must be None or an int, got float
GRPO(packed_tokens=True) -> TypeError: packed_tokens must be None or an int, got bool
GRPO(packed_tokens=0) -> ValueError: packed_tokens must be at least 1, got 0
GRPO(packed=False, packed_tokens=8) -> ValueError: packed_tokens must be None with packed=False
GRPO(packed_tokens=8) with accelerator.__class__.num_processes = 2
    -> packed_tokens must be None on 2 processes, got 8
CPO(packed=True) -> packed must be None or False: TRL reads values of padding
ORPO(packed=True) -> packed must be None or False: TRL reads values of padding
OnlineDPO(packed=True) -> packed must be None or False: TRL reads values of padding
GRPO(replay_kept_tokens=True) with use_transformers_continuous_batching = True
    -> not support `repl.*continuous_batching`: its logits belong to
GRPO(replay_kept_tokens=True) with rollout_func = print
    -> not support `repl.*`rollout_func`, tools or environments: their completions do not
GRPO(replay_kept_tokens=True) with tools = [print] -> not support `repl.*tools or environments
GRPO(replay_kept_tokens=True) with environment_factories = {{None: print}}
    -> not support `repl.*tools or environments
GRPO(replay_kept_tokens=True) with model.active_peft_config = of(is_prompt_learning=True)
    -> not support `repl.*prompt or prefix tuning .*: TRL's log-probabilities differ
GRPO(replay_kept_tokens=True) with __class__._generate_single_turn = GONE
    -> must be False .* GRPOTrainer has no _generate_single_turn
GRPO(score_centering=0) -> ValueError: score_centering must be at least 1, got 0
GRPO(score_centering=4.0) -> TypeError: score_centering must be None or an int, got float
GRPO(score_centering=4, fused=False) -> score_centering must be None: fused is False
GRPO(score_centering=4) with loss_type = "vespo"
    -> score_centering must be None: no Objective is loss_type='vespo', so
GRPO(score_centering=4) with importance_sampling_level = "sequence"
    -> None: importance_sampling_level must be 'token' with score_centering, got 'sequence'
GRPO(score_centering=4) with loss_type = "cispo"
    -> None: epsilon_high - 1 must be at least 0 with score_centering, got -0\.8
GRPO(score_centering=4, replay_kept_tokens=True) with num_iterations = 2
    -> several optimizer steps per generation .*: off policy the expected score has no
GRPO(score_centering=4) with args.steps_per_generation = 2; loss_type = "sapo"
    -> several optimizer steps per generation .*: off policy the expected score has no agreed
GRPO(score_centering=4) with num_iterations = 2; loss_type = "cispo"; epsilon_high = 2.0
    -> several optimizer steps per generation .*: off policy the .* no agreed form, except
RLOO(score_centering=4) -> score_centering must be None for a RLOO.*got 4
SFT(score_centering=4) -> score_centering must be None for a SFT.*got 4
DPO with model.forward = GONE -> LlamaForCausalLM has no `fused_lm_head`.*computes
Distillation with teacher_model = None -> has no teacher_model
Distillation with teacher_model = of() -> must be a causal language model
Distillation with teacher_model = of(hf_device_map={{"a": 0, "b": 1}}) -> several devices
Distillation with {LOSS} = other -> does not call _chunked_divergence_loss
Distillation with {OF_MODULE}._chunked_divergence_loss = other
    -> does not take student_hidden_states, teacher_hidden
Distillation with __class__ = server_distillation()
    -> ServerDis.* overrides DistillationTrainer\..*Teacher\.from_top_k
IWOPD with teacher_model = None -> has no teacher_model
IWOPD with use_teacher_server = True -> its teacher is a server
IWOPD with loss_top_k = 1 -> `loss_top_k > 0`, TRL's default: the divergence
IWOPD with __class__._compute_iw_opd_loss = other -> does not call F\.log_softmax
IWOPD(fused=True) with distillation_objective = "iw_opd"; loss_top_k = 1
    -> fused must be None or False: TRL weights
SDFT with use_teacher_server = True -> their teacher is a server.*Teacher\.from_top_k
SDPO with use_teacher_server = True -> their teacher is a server.*Teacher\.from_top_k
SDFT with {SELF}.selective_log_softmax = GONE -> TRL does not call selective_log_softmax
SDPO with {SELF}.selective_log_softmax = GONE -> TRL does not call selective_log_softmax
GOLD with use_uld_loss = True; teacher_tokenizer = "another"
    -> `use_uld_loss=True`: the loss compares sorted
CPO with __class__.concatenated_forward = other -> takes model, batch, cache, not model
TPO with {LOSS} = other -> does not call selective_log_softmax_and_entropy and
"""


def bad_rows():
    """The rows of `BAD`, and those of every trainer."""
    yield from re.sub(r"\n +", " ", BAD.strip()).splitlines()
    prompts = 'model = adapted("PromptTuning", num_virtual_tokens=2)'
    for kind in ("CPO", "ORPO", "A2PO", "OnlineDPO"):
        yield f"{kind} with {prompts} -> does not support .* prompt or pre.*more positions than"
    for kind, row in KINDS.items():
        yield f"{kind}(backend='cuda') -> backend 'cuda' cannot do this call"
        yield f"{kind} with model.hf_device_map = {{'a': 0, 'b': 1}} -> several devices"
        if kind not in ("GRPO", "RLOO"):
            own = "None or True" if row.fused else "None or False: TRL "
            yield f"{kind}(fused={not row.fused}) -> fused must be {own}"
            yield f"{kind}(replay_kept_tokens=True) -> must be False for a {kind}Trainer"


def other(self, model, batch, cache):
    return None


def narrower(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None):
    return None


def of(name="Some", base=object, **attributes):
    """An instance of a class of this name, without what its constructor needs."""
    kind = type(name, (base,), attributes)
    return kind.__new__(kind)


def own_scores():
    return subclass(_get_per_token_logps_and_entropies=lambda self, *_: None)


def subclass(**methods):
    return type("OtherTrainer", (trl.GRPOTrainer,), methods)


def server_distillation():
    return importlib.import_module("trl.experimental.server_distillation").ServerDistillationTrainer


def shifted():
    """A model with other logits than those of its head."""
    model = make_model()
    own = model.forward

    def forward(*arguments, **options):
        outputs = own(*arguments, **options)
        outputs.logits = outputs.logits + torch.arange(VOCABULARY)
        return outputs

    model.forward = forward
    return model


def adapted(kind, **options):
    peft = needed("peft")
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(make_model(), config)


def set_all(monkeypatch, trainer, changes):
    """Set or remove what a trainer and its modules hold until the end of the test."""
    for path, value in changes.items():
        *owners, name = path.split(".")
        owner = trainer
        for part in owners:
            owner = trl if part == "trl" else getattr(owner, part)
        if value is GONE:
            remove = monkeypatch.delitem if isinstance(owner, dict) else monkeypatch.delattr
            remove(owner, name)
        elif isinstance(owner, dict):
            monkeypatch.setitem(owner, name, value)
        else:
            monkeypatch.setattr(owner, name, value, raising=False)


@pytest.mark.parametrize("row", [*bad_rows()])
def test_what_is_refused(row, trainers, monkeypatch):
    """Without the arguments that are refused the trainer runs on, and says the same of itself."""
    call, sentence = row.split(" -> ")
    call, _, settings = call.partition(" with ")
    kind, _, arguments = call.removesuffix(")").partition("(")
    use, trainer = eval(f"dict({arguments})"), trainers(kind)
    changes = (one.split(" = ", 1) for one in settings.split("; ") if one)
    set_all(monkeypatch, trainer, {path: eval(value) for path, value in changes})
    before = dict(trainer.__dict__)
    with pytest.raises((TypeError, ValueError)) as error:
        use_fastrl(trainer, **use)
    found = f"{type(error.value).__name__}: {error.value}"
    assert re.search(sentence, found), found
    assert trainer.__dict__ == before
    if use:
        with use_fastrl(trainer) as handle:
            assert not (handle.fused and use.get("fused"))
            assert not (handle.packed and use.get("packed") is True)
            if use.get("packed") is True:
                assert found.endswith(handle.packed_reason)


def test_every_rule_that_refuses_is_in_the_table():
    """The other two of replaying are of vLLM, in vllm/test_replay_stand_in.py."""
    assert (len(REFUSED), len(NOT_REPLAYED)) == (2, 3 + 2)


def test_every_trainer_has_a_kind():
    """Except one that needs a GPU, of which test_fused_models.py computes a loss."""
    names = [row.name.removesuffix("Trainer") for row in TRAINERS]
    assert set(names) - KINDS.keys() == {"AsyncGRPO"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fused_may_be_asked_for(kind, trainers):
    with use_fastrl(trainers(kind), fused=KINDS[kind].fused) as handle:
        assert handle.fused == KINDS[kind].fused


@pytest.mark.parametrize("row", TRAINERS, ids=lambda row: row.name)
def test_every_class_is_where_the_table_says(row):
    base = getattr(importlib.import_module(row.module), row.name)
    assert base.__module__ == row.module
    assert all(callable(getattr(base, method)) for method in row.methods)


METHODS = [(row, method) for row in TRAINERS for method in row.methods]


@pytest.mark.parametrize(("row", "method"), METHODS, ids=lambda x: getattr(x, "name", x))
def test_another_loss_is_refused(row, method, trainers, monkeypatch):
    """In a subclass, and in the instance."""
    trainer = trainers(row.name.removesuffix("Trainer"))
    own = type("MyTrainer", (type(trainer),), {method: lambda *_: None})
    for name, value, sentence in (
        ("__class__", own, rf"MyTrainer overrides {row.name}\.{method}, which"),
        (method, print, rf"trainer\.{method} is already replaced"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, value)
            before = dict(trainer.__dict__)
            with pytest.raises(ValueError, match=sentence):
                use_fastrl(trainer)
            assert trainer.__dict__ == before


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
def test_a_loss_of_its_own_is_kept(method, trainers, monkeypatch):
    trainer = trainers("GRPO")
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


@pytest.mark.parametrize("kind", ["GRPO", "Distillation"])
def test_a_subclass_with_the_same_loss_is_accepted(kind, trainers, monkeypatch):
    """As is the class of the deprecated import, whose instances have no hash."""
    trainer = trainers(kind)
    kinds = [type("MyTrainer", (type(trainer),), {"log": lambda self, *_: None})]
    if kind == "Distillation":
        deprecated = importlib.import_module("trl.experimental.distillation")
        kinds.append(deprecated.DistillationTrainer)
    for own in kinds:
        monkeypatch.setattr(trainer, "__class__", own)
        with use_fastrl(trainer) as handle:
            assert handle.fused


def test_settings_that_are_accepted(trainers, monkeypatch):
    """Tokens have no top k; TRL compares distributions even if asked for two vocabularies."""
    of_gold, of_iwopd = trainers("GOLD"), trainers("IWOPD")
    set_all(monkeypatch, of_gold, {"use_uld_loss": True, "teacher_tokenizer": None})
    set_all(monkeypatch, of_iwopd, {"distillation_objective": "iw_opd", "loss_top_k": 1})
    with use_fastrl(of_gold) as gold, use_fastrl(of_iwopd) as iwopd:
        assert (gold.fused, iwopd.fused) == (True, False)


def test_another_tokenizer_of_the_teacher_stops_the_loss(trainers, monkeypatch):
    trainer = trainers("IWOPD")
    monkeypatch.setattr(trainer, "_local_teacher_tokenizer_matches_student", False)
    with use_fastrl(trainer), pytest.raises(ValueError, match="same tokenizer"):
        trainer.compute_loss(trainer.model, {"labels": torch.zeros(1, 2)})


@pytest.mark.parametrize(
    ("given", "way"),
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
def test_other_trainers_are_refused_with_a_way_on(given, way):
    sentence = "must be an instance of GRPOTrainer, .* or "
    with pytest.raises(TypeError, match=f"{sentence}.*{way}"):
        use_fastrl(given)


def test_a_handle_restores_what_is_still_its_own(trainers):
    owner = types.SimpleNamespace(first=1)
    handle = use_fastrl(trainers("GRPO"))
    handle.replace(owner, "first", 2)
    handle.replace(owner, "second", 3)
    handle.replace(owner, "third", 4)
    handle.replace(owner, "third", 5)
    owner.second = 6
    handle.undo()
    assert vars(owner) == {"first": 1, "second": 6}
    assert handle.undone


def test_a_copy_of_a_method_finds_other_globals():
    class Owner:
        value = 2

        def method(self, x, *, y=10):
            return self.value, x, y, LIMIT

    own = Owner().method
    assert with_globals(own, LIMIT=4)(3) == (2, 3, 10, 4)
    assert own(3) == (2, 3, 10, 1)


LIMIT = 1
