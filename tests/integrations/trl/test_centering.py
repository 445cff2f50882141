"""`score_centering`: the sampler's likeliest tokens reach the loss, which equals float64."""

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.kinds import loss_of, make_trainer

trl = needed("trl")

from fastrl.integrations.trl import use_fastrl  # noqa: E402
from fastrl.integrations.trl.replay import KEPT, TOP_K  # noqa: E402
from fastrl.ops.metrics import CENTERING_METRICS  # noqa: E402

METRICS = [f"fastrl/{name}" for name in CENTERING_METRICS]
PARTS = {"gradient_accumulation_steps": 2}  # TRL shuffles and splits a generation


def first_batch(trainer):
    """The first micro-batch of a generation."""
    trainer.model.train()
    rows = 4 * trainer.args.gradient_accumulation_steps
    return trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(rows)])


@torch.no_grad()
def move(model):
    """Let the policy differ from the sampler."""
    torch.manual_seed(5)
    for weight in model.parameters():
        weight += 0.05 * torch.randn_like(weight)


def in_float64(model):
    """A copy whose forward is not TRL's."""
    made = type(model)(model.config).double()
    made.load_state_dict(model.state_dict())
    return made


def log_softmax(trainer, model, batch):
    """The model's log-probabilities `[B, C, V]`, over the sets if there are any, in float64."""
    ids = batch["completion_ids"]
    whole = torch.cat([batch["prompt_ids"], ids], 1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(whole, attention_mask=attended).logits[:, -ids.shape[1] - 1 : -1]
    logits = logits / trainer.temperature
    for row, sets in enumerate(batch.get(KEPT, ())):
        for place, members in enumerate(sets.token_ids.split(sets.counts().tolist())):
            if len(members):  # an empty set is the whole vocabulary
                left_out = torch.ones(logits.shape[-1], dtype=torch.bool)
                left_out[members.long()] = False
                logits[row, place] = logits[row, place].masked_fill(left_out, -1e9)
    return logits.log_softmax(-1)


def surrogate(trainer, logp, advantages):
    """The term of a token whose ratio is 1."""
    ratio = (logp - logp.detach()).exp()
    if trainer.loss_type == "cispo":
        return logp
    if trainer.loss_type == "sapo":
        pos, neg = trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg
        t = torch.where(advantages > 0, pos, neg)
        return torch.sigmoid(t * (ratio - 1)) * 4 / t
    return ratio


def weight_of(trainer):
    """TRL's weight of a token, a function of p / q."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return torch.ones_like
    low = trainer.vllm_importance_sampling_clip_min or 0.0
    high = trainer.vllm_importance_sampling_clip_max
    if trainer.vllm_importance_sampling_mode == "token_truncate":
        return lambda ratio: ratio.clamp(low, high)
    return lambda ratio: torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def by_hand(trainer, batch, *, centered=True):
    """Loss, gradients and metrics in float64, of sums over the whole vocabulary."""
    model = in_float64(trainer.model)
    ids, mask = batch["completion_ids"], batch["completion_mask"].double()
    every, weight = log_softmax(trainer, model, batch), weight_of(trainer)
    logp = every.gather(-1, ids[..., None])[..., 0]
    advantages = batch["advantages"].double()[:, None].expand_as(mask)
    ratio = torch.ones_like(mask)
    if weight is not torch.ones_like:
        ratio = weight((logp - batch["sampling_per_token_logps"]).exp()).detach()
    tokens = -ratio * surrogate(trainer, logp, advantages)

    top, log_q = batch[TOP_K[0]].clamp(min=0), batch[TOP_K[1]].double()
    p, q_head = every.detach().exp(), log_q.exp()
    tail_q = (1 - q_head.sum(-1, keepdim=True)).clamp(min=0)
    rho = tail_q / (1 - p.gather(-1, top).sum(-1, keepdim=True)).clamp(min=1e-6)
    q = (rho * p).scatter(-1, top, q_head)

    def mass(p, q):
        return torch.where(q > 0, q * weight(p / q.clamp(min=1e-300)), 0.0)

    entropy = mass(torch.ones_like(rho), rho)[..., 0] * (p * every.detach()).sum(-1)
    score = (mass(p, q) * every).sum(-1) - entropy
    tokens = advantages * (tokens + (score if centered else 0.0))
    if trainer.loss_type in ("grpo", "sapo"):
        loss = ((tokens * mask).sum(1) / mask.sum(1)).mean() / 2  # parts, in `loss_of`
    else:
        parts = 2 / trainer.args.steps_per_generation
        loss = (tokens * mask).sum() / (batch["num_items_in_batch"] * parts)
    (3 * loss).backward()
    kl = torch.where(q > 0, q * (q.clamp(min=1e-300).log() - every.detach()), 0.0).sum(-1)
    values = (q_head.sum(-1), kl, (ratio == 0).double())
    metrics = {
        name: [((value * mask).sum() / mask.sum()).item()]
        for name, value in zip(METRICS, values, strict=True)
    }
    gradients = {name: w.grad.float() for name, w in model.named_parameters()}
    return loss.item(), metrics, gradients, (score * mask).abs().max().item()


def check_step(trainer, batch):
    """Compare a step with a computation in float64; logits are about 5, so rounding is 1e-6."""
    loss, metrics, gradients, score = by_hand(trainer, batch)
    ours = loss_of(trainer, batch)
    assert score > 1e-2
    assert ours[0].item() == pytest.approx(loss, abs=1e-5)
    for name, value in metrics.items():
        assert ours[1][name] == pytest.approx(value, abs=1e-5), name
    torch.testing.assert_close(ours[2], gradients, rtol=1e-4, atol=1e-5)
    return metrics


CASES = {
    "dapo": {"temperature": 0.7},
    "grpo": {"loss_type": "grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "top_p": {"top_p": 0.7, "max_completion_length": 12, "pad_to_multiple_of": 8},
    "penalty": {"repetition_penalty": 1.3},
    "top_p and its sets": {"top_p": 0.7, "replay": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_a_hand(name, tiny_path):
    options = dict(CASES[name])
    replay = options.pop("replay", False)
    trainer = make_trainer(tiny_path, **PARTS, **options)
    handle = use_fastrl(trainer, score_centering=5, replay_kept_tokens=replay)
    assert handle.fused
    batch = first_batch(trainer)
    ids, found = (batch[name] for name in TOP_K)
    mask = batch["completion_mask"].bool()
    assert ids.shape == (*mask.shape, 5)
    if replay or not {"top_p", "repetition_penalty"} & options.keys():
        own = log_softmax(trainer, in_float64(trainer.model), batch)[mask]
        held, found = own.gather(-1, ids[mask]), found[mask].double()
        torch.testing.assert_close(found.clamp(min=-1e9), held.clamp(min=-1e9), rtol=0, atol=1e-5)
        assert (found[:, -1] - own.topk(5).values[:, -1] > -1e-5)[found[:, -1] > -1e8].all()
    move(trainer.model)
    check_step(trainer, batch)


def test_cispo_off_policy(tiny_path):
    """With the sampler's log-probabilities as old ones, the weight is the clipped ratio."""
    options = {"loss_type": "cispo", "epsilon_high": 1.5, "num_iterations": 2, "top_k": 9}
    trainer = make_trainer(tiny_path, **PARTS, **options)
    use_fastrl(trainer, score_centering=5, replay_kept_tokens=True)
    batch = first_batch(trainer)
    move(trainer.model)
    trainer.use_vllm, trainer.vllm_importance_sampling_clip_max = True, 1.5
    trainer.vllm_importance_sampling_mode = "token_truncate"
    expected = by_hand(trainer, batch | {"sampling_per_token_logps": batch["old_per_token_logps"]})
    trainer.use_vllm = False
    ours = loss_of(trainer, batch)
    assert ours[0].item() == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(ours[2], expected[2], rtol=1e-4, atol=1e-5)


def test_metrics_and_undo(tiny_path):
    trainer = make_trainer(tiny_path, top_p=0.7, max_steps=1, **PARTS)
    trainer.eval_dataset = trainer.train_dataset
    with use_fastrl(trainer, score_centering=80):  # more than the vocabulary
        trainer.train()
        assert {f"eval_{name}" for name in METRICS} <= trainer.evaluate().keys()
        step = trainer.state.log_history[0]
        assert step[METRICS[0]] == pytest.approx(1, abs=1e-6)
        assert 0 < step[METRICS[1]] < 0.4  # log(1 / 0.7) and a little
        assert TOP_K[0] in trainer._buffered_inputs[0]
    assert trainer._buffered_inputs is None
    replaced = ("_compute_loss", "_generate_single_turn", "_generate_and_score_completions")
    assert not {*replaced} & trainer.__dict__.keys()
    assert "_get_logits_processor" not in trainer.model.__dict__
    batch = first_batch(trainer)
    assert not {*TOP_K} & batch.keys()
    lacking = pytest.raises(ValueError, match="inputs must have rollout_top_k_ids, rollout_top_k_l")
    with use_fastrl(trainer, score_centering=2), lacking:
        trainer.compute_loss(trainer.model, batch)


def test_what_changes_later_is_refused(tiny_path):
    sampled = {"generation_kwargs": {"do_sample": False}}
    trainer = make_trainer(tiny_path, **sampled)
    use_fastrl(trainer, score_centering=4)
    with pytest.raises(ValueError, match="score_centering None for a generation by greedy"):
        trainer.train()
    trainer = make_trainer(tiny_path)
    use_fastrl(trainer, score_centering=4)
    batch = first_batch(trainer)
    with pytest.raises(ValueError, match=r"score_centering must be None: inputs must be.* other$"):
        trainer.compute_loss(trainer.model, batch | {"other": torch.ones(4)})
    trainer.loss_type = "vespo"
    with pytest.raises(ValueError, match="score_centering must be None: no Objective is"):
        trainer.compute_loss(trainer.model, batch)
