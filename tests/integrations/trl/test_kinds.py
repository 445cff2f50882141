"""Every trainer of TRL that fastrl takes computes the same numbers with fastrl and without."""

import contextlib
import random

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.kinds import KINDS, both, check_autocast, make_trainer
from tests.integrations.trl.runs import operators, run

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

#: Trainers whose losses TRL computes from log-probabilities.
SCORED = ("SFT", "DPO", "KTO", "CPO", "ORPO", "TPO", "A2PO", "OnlineDPO")
ACCUMULATED = {"gradient_accumulation_steps": 2}
IN_PARTS = {"per_device_train_batch_size": 2, **ACCUMULATED}
CHECKPOINTING = {"gradient_checkpointing": True}
ADAPTED = {"peft_config": {"r": 2}, "learning_rate": 0.1}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
OF_HEAD = {**LORA, "target_modules": ["q_proj", "lm_head"]}
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}
PREFIX = {**PROMPT, "peft_type": "PREFIX_TUNING"}
PROMPTS = {"learning_rate": 0.05, "beta": 0.0, "num_iterations": 2, "epsilon": 0.05}
CLIPPED = {"num_iterations": 2, "epsilon": 0.1}
FULL = {"distillation_mode": "full_logits", "distillation_alpha": 0.5}
OWN = {"lmbda": 1.0, **ACCUMULATED}
OF_DATA = {"beta": 0.0, "lmbda": 0.0, "temperature": 0.7}
TOKENS = {"distillation_objective": "iw_opd"}
SAMPLED = {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}
TOP = {"distillation_mode": "topk_logits", "distillation_topk": 5}
LIVE = {"teacher_model_kind": "live"}
BASE = {"teacher_model_kind": "base"}
OF_SEQUENCES = {"importance_sampling_level": "sequence"}
RATIOS = {"num_iterations": 2, "gradient_accumulation_steps": 1}
#: The options with which each trainer is compared; those of GRPO's loss are in
#: test_losses_of_trl.py.
CASES = {
    "GRPO": {
        "prompt": {**PROMPTS, "peft_config": PROMPT},
        "prompt and KL": {**PROMPTS, "peft_config": PROMPT, "beta": 0.04},
        "prefix": {**PROMPTS, "peft_config": PREFIX},
        "prefix and KL": {**PROMPTS, "peft_config": PREFIX, "beta": 0.04},
    },
    "RLOO": {
        "no KL": {**CLIPPED, "beta": 0.0},
        "KL": {**CLIPPED, "beta": 0.04},
    },
    "SFT": {
        "in parts": IN_PARTS,
        "dft": {"loss_type": "dft"},
        "packed": {"packing": True, "max_length": 8, "packing_strategy": "wrapped"},
        "unpadded": {"completion_only_loss": False, "padding_free": True, "max_length": None},
        "smoothed": {"label_smoothing_factor": 0.1},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
        "prompt": {**ADAPTED, "peft_config": PROMPT},
    },
    "DPO": {
        "": {},
        "weights": {"use_weighting": True, "ld_alpha": 0.5, **IN_PARTS},
        "several losses": {"loss_type": ["sigmoid", "sft", "ipo"]},
        "precomputed": {"precompute_ref_log_probs": True},
    },
    "KTO": {
        "": {},
        "unpaired": {"loss_type": "apo_zero_unpaired", **IN_PARTS},
        "precomputed": {"precompute_ref_log_probs": True},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
        "prompt": {**ADAPTED, "peft_config": PROMPT},
    },
    "CPO": {
        "in parts": IN_PARTS,
        "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0},
        "ipo": {"loss_type": "ipo"},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
    },
    "ORPO": {"in parts": IN_PARTS, "LoRA": {**ADAPTED, **CHECKPOINTING}},
    "TPO": {
        "in parts": IN_PARTS,
        "no references": {"loss_type": "tpo-l", "tpo_alpha": 0.0},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
    },
    "A2PO": {"": {}},
    "OnlineDPO": {
        "": {},
        "truncated": {"max_length": 8},
        "no prompts": {"max_length": 5},
        "LoRA": {**ADAPTED, **CHECKPOINTING},
    },
    "Distillation": {
        "forward": {"beta": 0.0},
        "JS": {"beta": 0.3, "temperature": 0.7},
        "reverse, accumulated": {"beta": 1.0, **ACCUMULATED},
        "bf16, whose autocast TRL loses": {"beta": 1.0, "bf16": True},
        "checkpointing": {"beta": 0.5, **CHECKPOINTING},
        "LoRA": {"beta": 0.5, "peft_config": LORA},
    },
    "GKD": {
        "forward, its own": {"beta": 0.0, "lmbda": 1.0},
        "JS of the data": {"beta": 0.5, "lmbda": 0.0, **ACCUMULATED},
        "reverse": {"beta": 1.0, "temperature": 0.5},
        "the teacher's": {"lmbda": 0.0, "seq_kd": True},
        "LoRA": {"peft_config": LORA, **CHECKPOINTING},
    },
    "GOLD": {
        "forward": OF_DATA,
        "its own": {"beta": 0.3, **OWN},
        "reverse": {"beta": 1.0, "temperature": 1.5},
    },
    "IWOPD": {
        "tokens": {**TOKENS, "iw_opd_gamma": 0.7},
        "tokens, accumulated": {**TOKENS, **ACCUMULATED, "temperature": 0.7},
        "forward": OF_DATA,
        "its own": {"beta": 0.3, **OWN},
        "reverse": {"beta": 1.0},
    },
    "SDFT": {
        "sampled": SAMPLED,
        "full": {"distillation_alpha": 0.3, "temperature": 0.7},
        "forward, ratios": {**RATIOS, "distillation_alpha": 0.0},
        "top": {**TOP, **ACCUMULATED},
        "top and a tail": {**TOP, "distillation_add_tail": True},
        "live": LIVE,
        "live, top": {**TOP, **LIVE},
        "base, LoRA": {**BASE, "peft_config": LORA},
        "base, LoRA on the head": {**BASE, "peft_config": OF_HEAD},
        "average, LoRA on the head": {**TOP, "teacher_model_kind": "ema", "peft_config": OF_HEAD},
        "average": {"teacher_model_kind": "ema", "teacher_update_rate": 0.5},
        "tokens skipped": {"num_loss_tokens_to_skip": 2},
    },
    "SDPO": {
        "sampled, ratios": RATIOS,
        "full and a policy loss": {**RATIOS, **FULL, "distillation_weight": 0.4},
        "sequences": {**OF_SEQUENCES, **RATIOS, "distillation_weight": 0.0},
        "top": {**TOP, "distillation_alpha": 1.0},
        "live, LoRA": {**LIVE, "peft_config": LORA},
    },
}


def of_all(cases):
    """Parametrize over the cases of each kind."""
    rows = [(kind, name) for kind, of_kind in cases.items() for name in of_kind]
    return pytest.mark.parametrize(("kind", "name"), rows, ids=[", ".join(row) for row in rows])


def test_every_kind_is_compared():
    assert CASES.keys() == KINDS.keys()


@of_all(CASES)
def test_steps_are_equal(kind, name, tiny_path):
    """Losses, logs and weights; and the handle tells whether the loss is fastrl's."""
    row, options = KINDS[kind], CASES[kind][name]
    options = {"max_steps": 2 if kind in SCORED else 3, **options}
    handle, steps = both(tiny_path, kind, **options)
    metric = row.metric
    if options.get("distillation_objective"):
        metric = "iw_opd/mean_abs_advantage"
    assert handle.fused == (row.fused and "distillation_objective" not in options)
    assert (handle.reason is None) == handle.fused
    if kind in SCORED:
        assert handle.reason == f"TRL computes the loss of a {kind}Trainer, from log-probabilities"
    if options.get("distillation_weight") != 0:
        assert max(abs(step[metric]) for step in steps) > 1e-3


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_a_batch_without_tokens(kind, tiny_path):
    """All tokens of one micro-batch are masked: a loss with a gradient, of nothing."""

    def prepared(trainer):
        collate = trainer.data_collator
        calls = []

        def masked(examples):
            batch = collate(examples)
            calls.append(batch)
            if len(calls) == 1:
                for name in {"labels", "completion_mask"} & batch.keys():
                    batch[name] = torch.full_like(batch[name], -100 if name == "labels" else 0)
            return batch

        trainer.data_collator = masked

    both(tiny_path, kind, prepared, max_steps=2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Distillation"])
def test_autocast(kind, tiny_path):
    check_autocast(tiny_path, kind)


#: OnlineDPO cannot evaluate.
EVALUATED = [(kind, None) for kind in KINDS if kind != "OnlineDPO"] + [("GRPO", False)]


@pytest.mark.parametrize(("kind", "fused"), EVALUATED, ids=str)
def test_evaluation(kind, fused, tiny_path):
    """What TRL logs of an evaluation is equal, also where log-probabilities alone are fastrl's."""
    found = []
    for used in (False, True):
        trainer = make_trainer(tiny_path, kind)
        if used:
            use_fastrl(trainer, fused=fused)
        trainer.eval_dataset = trainer.train_dataset
        random.seed(0)
        values = trainer.evaluate()
        found.append({k: v for k, v in values.items() if not k.endswith(("time", "_second"))})
    assert found[1].pop(f"eval_{METRIC}", 0) == 0
    assert any(abs(value) > 1e-3 for value in found[0].values())
    assert found[1] == pytest.approx(found[0], abs=1e-4, nan_ok=True)


#: Another loss of the same trainer.
WAYS = [(kind, {}) for kind in KINDS] + [
    ("IWOPD", TOKENS),
    ("SDFT", SAMPLED),
    ("GRPO", {"beta": 0.04}),
]
ways = pytest.mark.parametrize(("kind", "options"), WAYS, ids=str)
TEACHER = "teacher_model"
#: The models whose heads TRL calls in the loss; elsewhere it computes no logits either.
CALLED = {
    **{kind: {"model"} for kind in ("CPO", "ORPO", "TPO")},
    **{kind: {"model", "ref_model"} for kind in ("A2PO", "OnlineDPO")},
    **{kind: {"model", TEACHER} for kind in ("GKD", "GOLD", "IWOPD", "SDFT", "SDPO")},
}


@ways
def test_no_logits_until_undone(kind, options, tiny_path):
    """No head is called, except for the logits of one position, as in a generation."""
    trainer = make_trainer(tiny_path, kind, max_steps=1, **options)
    models = {name: getattr(trainer, name, None) for name in ("model", "ref_model", TEACHER)}
    called = set()

    def recorded(name, hidden):
        if hidden.shape[1] > 1:
            called.add(name)

    for name, model in models.items():
        if model is not None:
            model.lm_head.register_forward_hook(
                lambda _, given, __, name=name: recorded(name, *given)
            )
    warned = pytest.warns(UserWarning, match=r"hooks on the LM head \(Linear\) do not fire")
    with warned if kind != "Distillation" else contextlib.nullcontext():
        handle = use_fastrl(trainer)
        trainer.train()
    assert called == set()
    handle.undo()
    trainer.train()
    assert called == CALLED.get(kind, set())
    teacher = models[TEACHER]
    assert teacher in (None, trainer.model) or all(p.grad is None for p in teacher.parameters())


@ways
def test_undo(kind, options, tiny_path, monkeypatch):
    """After `undo` a run is TRL's bit by bit, even under methods that were patched on top."""
    found = []
    for use in (False, True):
        trainer = make_trainer(tiny_path, kind, max_steps=1, **options)
        before = dict(trainer.__dict__)
        if use:
            with use_fastrl(trainer) as handle:
                names = [n for n, x in trainer.__dict__.items() if x is not before.get(n)]
                with pytest.raises(ValueError, match="is already replaced; undo that first"):
                    use_fastrl(trainer)
            handle.undo()
            assert trainer.__dict__ == before
            handle = use_fastrl(trainer)
            for name in names:
                own = getattr(trainer, name)
                setattr(trainer, name, lambda *given, own=own, **more: own(*given, **more))
            handle.undo()
            assert names
            assert not {name for name in names if trainer.__dict__[name] is before.get(name)}
            for home, name in [(fastrl, "linear_policy_loss"), *operators()]:
                monkeypatch.setattr(home, name, None)
        random.seed(0)
        steps, losses, _ = run(trainer)
        found.append((losses, [step.keys() for step in steps]))
    assert found[0] == found[1]
