"""Every trainer of TRL that fastrl takes computes the same numbers with fastrl and without."""

import contextlib
import random

import pytest
import torch

import fastrl
from tests.integrations.packages import needed
from tests.integrations.trl.cases import CASES, LOSSES, SAMPLED, TOKENS, UNFUSED
from tests.integrations.trl.kinds import KINDS, both, check_autocast, make_trainer
from tests.integrations.trl.runs import operators, run

needed("trl")
from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.saturation import METRIC  # noqa: E402

#: Trainers whose losses TRL computes from log-probabilities.
SCORED = ("SFT", "DPO", "KTO", "CPO", "ORPO", "TPO", "A2PO", "OnlineDPO")


def test_every_kind_is_compared():
    assert CASES.keys() == KINDS.keys()


ROWS = [(kind, name) for kind, of_kind in CASES.items() for name in of_kind]


@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[", ".join(row) for row in ROWS])
def test_steps_are_equal(kind, name, tiny_path):
    """Losses, logs and weights; and the handle tells whether the loss is fastrl's.

    Two policies have ratios, whose saturation is logged; some ratios are clipped.
    """
    row, options = KINDS[kind], {"max_steps": 2 if kind in SCORED else 3, **CASES[kind][name]}
    use = options.pop("use", {})
    handle, steps = both(tiny_path, kind, use=use, **options)
    by_tokens = "distillation_objective" in options
    unfused = by_tokens or (kind == "GRPO" and name in UNFUSED) or use.get("fused") is False
    assert handle.fused == (handle.reason is None) == (row.fused and not unfused)
    if kind in SCORED:
        assert handle.reason == f"TRL computes the loss of a {kind}Trainer, from log-probabilities"
    twice = options.get("num_iterations") == 2
    if kind == "GRPO":
        assert (METRIC in steps[0]) == (handle.fused and (twice or options.get("beta", 0) > 0))
    if kind == "GRPO" and twice and name in LOSSES:
        metrics = ("clip_ratio/region_mean", "cispo_clip_ratio")
        assert max(step.get(metric, 0) for step in steps for metric in metrics) > 0
    if options.get("distillation_weight") != 0:
        metric = "iw_opd/mean_abs_advantage" if by_tokens else row.metric
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
