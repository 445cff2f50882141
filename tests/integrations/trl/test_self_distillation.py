"""TRL's SDFTTrainer and SDPOTrainer log the same numbers with fastrl and without."""

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.distilling import make_self_distillation
from tests.integrations.trl.runs import both, make_model, run

needed("trl")
from fastrl.integrations.transformers import lm_head  # noqa: E402
from fastrl.integrations.transformers.head import LmHead  # noqa: E402
from fastrl.integrations.trl import top_tokens, use_fastrl  # noqa: E402
from fastrl.integrations.trl.two_models import Side  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
HEAD = {**LORA, "target_modules": ["q_proj", "lm_head"]}
TWICE = {"num_iterations": 2, "gradient_accumulation_steps": 1}
FULL = {"distillation_mode": "full_logits"}
TOP = {"distillation_mode": "topk_logits", "distillation_topk": 5}
CASES = {
    "SDFT, sampled": ("SDFT", {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}),
    "SDFT, full": ("SDFT", {**FULL, "distillation_alpha": 0.3, "temperature": 0.7}),
    "SDFT, full, forward, ratios": ("SDFT", {**FULL, **TWICE, "distillation_alpha": 0.0}),
    "SDFT, top": ("SDFT", {**TOP, "gradient_accumulation_steps": 2}),
    "SDFT, top and a tail": ("SDFT", {**TOP, "distillation_add_tail": True}),
    "SDFT, live": ("SDFT", {**FULL, "teacher_model_kind": "live"}),
    "SDFT, live, top": ("SDFT", {**TOP, "teacher_model_kind": "live"}),
    "SDFT, base, LoRA": ("SDFT", {**FULL, "teacher_model_kind": "base", "lora": LORA}),
    "SDFT, base, LoRA on the head": ("SDFT", {**FULL, "teacher_model_kind": "base", "lora": HEAD}),
    "SDFT, average, LoRA on the head": ("SDFT", {**TOP, "teacher_model_kind": "ema", "lora": HEAD}),
    "SDFT, average": ("SDFT", {**FULL, "teacher_model_kind": "ema", "teacher_update_rate": 0.5}),
    "SDFT, the first tokens skipped": ("SDFT", {**FULL, "num_loss_tokens_to_skip": 2}),
    "SDPO, sampled, ratios": ("SDPO", TWICE),
    "SDPO, full and a policy loss": (
        "SDPO",
        {**FULL, **TWICE, "distillation_weight": 0.4, "distillation_alpha": 0.5},
    ),
    "SDPO, a policy loss of sequences": (
        "SDPO",
        {**TWICE, "distillation_weight": 0.0, "importance_sampling_level": "sequence"},
    ),
    "SDPO, top": ("SDPO", {**TOP, "distillation_alpha": 1.0}),
    "SDPO, live, sampled, LoRA": ("SDPO", {"teacher_model_kind": "live", "lora": LORA}),
}


@pytest.mark.parametrize("name", CASES)
def test_three_steps(name, tiny_path, tmp_path):
    kind, options = CASES[name]
    options = {"make": make_self_distillation, "output_dir": tmp_path, **options}
    handle, steps = both(tiny_path, kind, **options)
    assert not handle.fused
    if options.get("distillation_weight") != 0:
        assert max(abs(step["self_distillation/distillation_loss"]) for step in steps) > 1e-3


@pytest.fixture(scope="module", params=["SDFT", "SDPO"])
def trainer(request, tiny_path, tmp_path_factory):
    options = {**FULL, "output_dir": tmp_path_factory.mktemp("out")}
    return make_self_distillation(tiny_path, request.param, **options)


def test_no_logits_and_undo(trainer):
    called, before = [], dict(trainer.__dict__)
    models = (trainer.model, trainer.teacher_model)
    hooks = [m.lm_head.register_forward_hook(lambda *_: called.append(1)) for m in models]
    ids = torch.randint(4, 50, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    batch = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": mask[:, :2],
        "completion_ids": ids[:, 2:],
        "completion_mask": mask[:, 2:],
        "teacher_input_ids": torch.cat([ids, ids[:, 2:]], 1),
        "teacher_attention_mask": torch.cat([mask, mask[:, 2:]], 1),
    }
    trainer.current_gradient_accumulation_steps = 1
    with pytest.warns(UserWarning, match=r"hooks on the LM head \(Linear\) do not fire"):
        handle = use_fastrl(trainer)
    copied = trainer._compute_self_distillation_loss
    ours = trainer.compute_loss(trainer.model, batch)
    trainer._compute_rollout_logps(*(batch[f"{name}"] for name in list(batch)[:4]))
    assert called == []
    handle.undo()
    assert trainer.__dict__.keys() - before.keys() <= {"current_gradient_accumulation_steps"}
    trainer._compute_self_distillation_loss = copied  # as one that was wrapped
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(ours.item(), abs=1e-5)
    assert called == [1, 1]
    del trainer._compute_self_distillation_loss
    for hook in hooks:
        hook.remove()
    assert all(p.grad is None for p in trainer.teacher_model.parameters())


@pytest.mark.parametrize("weight", [0.4, 1.0])
def test_a_policy_loss_has_tokens_that_are_not_distilled(weight, trainer, monkeypatch):
    """SDPO distils the samples that have a demonstration; SDFT all of them."""
    monkeypatch.setattr(trainer.args, "distillation_weight", weight, raising=False)
    trainer.current_gradient_accumulation_steps, mask = 1, torch.ones(2, 7, dtype=torch.long)
    ids = torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    of_prompt, of_completion, teacher = ids[:, :3], ids[:, 3:], torch.cat([ids[:, 1:3], ids], 1)
    batch = {
        "prompt_ids": of_prompt,
        "prompt_mask": mask[:, :3],
        "completion_ids": of_completion,
        "completion_mask": mask[:, 3:],
        "teacher_input_ids": teacher,
        "teacher_attention_mask": torch.ones_like(teacher),
        "self_distillation_mask": torch.tensor([1.0, 0.0]),
        "advantages": torch.tensor([0.5, -1.5]),
        "old_per_token_logps": torch.full((2, 4), -3.5),
    }
    found = []
    for use in (False, True):
        handle = use_fastrl(trainer) if use else None
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in trainer.model.parameters())])
    handle.undo()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_what_is_refused(trainer, monkeypatch):
    before = dict(trainer.__dict__)
    with pytest.raises(ValueError, match="TRL weights the divergences of the tokens"):
        use_fastrl(trainer, fused=True)
    functions = type(trainer)._compute_self_distillation_loss.__globals__
    with monkeypatch.context() as patch:
        patch.delitem(functions, "selective_log_softmax")
        with pytest.raises(ValueError, match="TRL does not call selective_log_softmax"):
            use_fastrl(trainer)
    monkeypatch.setattr(trainer, "use_teacher_server", True)
    with pytest.raises(ValueError, match=r"their teacher is a server.*Teacher\.from_top_k"):
        use_fastrl(trainer)
    monkeypatch.undo()
    assert trainer.__dict__ == before
    use_fastrl(trainer, fused=False).undo()


def test_evaluation(trainer):
    trainer.eval_dataset, found = trainer.train_dataset, []
    for use in (False, True):
        handle = use_fastrl(trainer) if use else None
        trainer._metrics["eval"].clear()
        torch.manual_seed(0)
        values = trainer.evaluate()
        found.append({k: v for k, v in values.items() if "runtime" not in k and "per_sec" not in k})
    handle.undo()
    assert found[1] == pytest.approx(found[0], abs=1e-4, nan_ok=True)


def test_mixed_precision(tiny_path, tmp_path):
    """TRL rounds the logits to bfloat16."""
    found, options = [], {**FULL, "output_dir": tmp_path, "bf16": True, "max_steps": 1}
    for use in ((), (use_fastrl,)):
        torch.manual_seed(0)
        found.append(run(make_self_distillation(tiny_path, **options), *use)[1])
    assert found[1] == pytest.approx(found[0], rel=0.05)


HEADS = {
    "plain": ("LlamaConfig", {}),
    "a softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0}),
    "a factor on the logits": ("CohereConfig", {"logit_scale": 0.3}),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_likeliest_tokens(name, chunk, monkeypatch):
    monkeypatch.setattr(top_tokens, "_CHUNK", chunk)
    kind, changes = HEADS[name]
    ids, sides, logits = torch.tensor([[5, 6, 7, 8]]), [], []
    for model in (make_model(kind, **changes), make_model(kind, **{**changes, "hidden_size": 32})):
        sides.append(Side(model.base_model(ids).last_hidden_state, lm_head(model)))
        logits.append(model(ids).logits.detach() / 0.7)
    mask = torch.tensor([[1, 0, 1, 1]])
    given = {"beta": 0.5, "temperature": 0.7, "has_tail": False}
    teacher = top_tokens.top_k_teacher(*sides, mask, 3, **given)
    expected = logits[0].topk(3).indices
    of_teacher = logits[1].log_softmax(-1).gather(-1, expected)
    assert (teacher.token_ids[mask == 1] == expected[mask == 1]).all()
    torch.testing.assert_close(teacher.logprobs[mask == 1], of_teacher[mask == 1])
    assert (teacher.logprobs[mask == 0] == 0).all()
    assert (teacher.beta, teacher.has_tail) == (0.5, False)


def test_likeliest_tokens_of_an_adapted_head():
    hidden, weight, bias = torch.randn(1, 2, 4), torch.randn(9, 4), torch.randn(9)
    a, b = torch.randn(2, 4), torch.randn(9, 2)
    side = Side(hidden, LmHead(weight, bias, (a, b, 0.5), 1.0, None))
    given = {"beta": 1.0, "temperature": 1.0, "has_tail": True}
    teacher = top_tokens.top_k_teacher(side, side, torch.ones(1, 2), 4, **given)
    logprobs = (hidden @ (weight + 0.5 * b @ a).t() + bias).log_softmax(-1)
    torch.testing.assert_close(teacher.logprobs, logprobs.topk(4).values)
