"""verl's distillation from a teacher's most probable tokens, on fastrl."""

import importlib
import math
import sys
import types

import pytest
import torch

from fastrl.integrations import verl
from fastrl.integrations.verl.distillation import compute_forward_kl_topk
from tests.integrations.compared import close, each, implementations
from tests.integrations.verl.cases import batch, installed, with_prompts, worker_batch

HOME = "verl.trainer.distillation.fsdp.losses"


def transcribed(logits, log_p, ids, config, data_format):
    """What verl 0.9 computes, in float64."""
    log_p, ids = log_p.values()[None].double(), ids.values()[None]
    lowest, log_q = config.distillation_loss.log_prob_min_clamp, logits.double().log_softmax(-1)
    of_student = log_q.topk(ids.shape[-1]).indices
    log_q = log_q.gather(-1, ids)
    found = {"student_mass": log_q.exp().sum(-1), "teacher_mass": log_p.exp().sum(-1)}
    if lowest is not None:
        log_q, log_p = log_q.clamp_min(lowest), log_p.clamp_min(lowest)
    terms = log_p.exp() * (log_p - log_q)
    among = (ids[..., None] == of_student[..., None, :]).any(-1)
    found["overlap_count"] = among.sum(-1)
    found["overlap_token_advantage"] = -(terms * among).sum(-1) / among.sum(-1).clamp(min=1)
    return {**found, "distillation_losses": terms.sum(-1)}


IMPLEMENTATIONS = implementations(transcribed, HOME, "compute_forward_kl_topk")
theirs = each(IMPLEMENTATIONS)


def config(lowest=None, **more):
    return types.SimpleNamespace(
        distillation_loss=types.SimpleNamespace(log_prob_min_clamp=lowest, **more)
    )


def given(V=31, K=6, dtype=torch.float32, lengths=(3, 5), nested=True):
    """Logits that agree with some of the teacher's tokens, which a padded row repeats."""
    torch.manual_seed(0)
    N = sum(lengths)
    logits, teacher = (3 * torch.randn(1, N, V) for _ in range(2))
    log_p, ids = (teacher + logits).log_softmax(-1).topk(K)
    log_p[0, 1], ids[0, 1] = 0.0, 0
    log_p[0, 2], logits[0, 2, ids[0, 2]] = math.log(0.4 / K), 20.0  # a negative loss
    tensors = [log_p[0], ids[0]]
    if nested:
        tensors = [
            torch.nested.as_nested_tensor(list(x.split(lengths)), layout=torch.jagged)
            for x in tensors
        ]
    return logits.to(dtype), *tensors


def outcome(function, logits, *rest):
    leaf = logits.clone().requires_grad_()
    found = function(leaf * 1, *rest, "thd")
    losses = found["distillation_losses"]
    losses.backward(torch.arange(1.0, losses.numel() + 1).reshape(losses.shape).to(losses.dtype))
    return {name: x.detach() for name, x in found.items()}, leaf.grad


@pytest.mark.parametrize("lowest", [None, -10.0, -3.0])
def test_the_forward_kl_of_the_most_probable_tokens(theirs, lowest):
    data = given()
    a, b = (outcome(f, *data, config(lowest)) for f in (compute_forward_kl_topk, theirs))
    assert a[0].keys() == b[0].keys()
    assert 0 < a[0]["overlap_count"].sum() < 48
    assert a[0]["distillation_losses"].min() < 0  # as in verl, which clamps it later
    for name, value in a[0].items():
        close(value, b[0][name])
    close(a[1], b[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_have_a_loss_of_32_bits(dtype):
    data = given(dtype=dtype)
    a, b = (outcome(f, *data, config(-5.0)) for f in (compute_forward_kl_topk, transcribed))
    assert a[0]["distillation_losses"].dtype == torch.float32
    assert a[1].dtype == dtype
    close(a[0]["distillation_losses"], b[0]["distillation_losses"])
    close(a[1], b[1], 2e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_teachers_log_probabilities_of_any_dtype(dtype):
    """One token of the teacher's is among the student's in the first row, none in the second."""
    log_p, ids = (
        torch.tensor([[[-1.0, -2.0], [-0.5, -4.0]]]).to(dtype),
        torch.tensor([[[3, 0]] * 2]),
    )
    logits = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [1.0, 8.0, 9.0, 0.0]]])
    found = compute_forward_kl_topk(logits, log_p, ids, config(), "thd")
    log_q = logits.double().log_softmax(-1).gather(-1, ids)
    terms = log_p.double().exp() * (log_p.double() - log_q)
    close(found["distillation_losses"], terms.sum(-1))
    close(found["overlap_token_advantage"], torch.tensor([[-terms[0, 0, 0], 0.0]]))
    assert found["overlap_count"].tolist() == [[1, 0]]
    for name, value in found.items():
        assert value.dtype == (torch.int64 if name == "overlap_count" else torch.float32), name


def test_the_logits_may_be_overwritten_before_the_backward():
    """As verl's log-probabilities of the same logits do in their own backward."""
    data = given()
    _, expected = outcome(compute_forward_kl_topk, *data, config())
    leaf = data[0].clone().requires_grad_()
    logits = leaf * 1
    losses = compute_forward_kl_topk(logits, *data[1:], config(), "thd")["distillation_losses"]
    with torch.no_grad():
        logits.zero_()
    losses.backward(torch.arange(1.0, 9.0)[None])
    assert torch.equal(leaf.grad, expected)


def test_a_second_backward_raises_and_is_not_wrong():
    """The first has scaled the gradient in place."""
    logits, *rest = given()
    found = compute_forward_kl_topk(logits.requires_grad_(), *rest, config(), "thd")
    losses = found["distillation_losses"].sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()


def test_only_the_loss_has_a_gradient_and_only_if_it_is_needed():
    logits, *rest = given()
    found = compute_forward_kl_topk(logits.requires_grad_(), *rest, config(), "bshd")
    assert [x for x, y in found.items() if y.requires_grad] == ["distillation_losses"]
    found = compute_forward_kl_topk(logits.detach(), *rest, config(), "bshd")
    assert not any(x.requires_grad for x in found.values())
    with torch.no_grad():
        found = compute_forward_kl_topk(logits, *rest, config(), "bshd")
    assert not any(x.requires_grad for x in found.values())


def test_a_rank_takes_its_part_of_the_teachers_tokens(monkeypatch):
    logits, *rest = given()
    whole = compute_forward_kl_topk(logits, *rest, config(), "thd")
    ulysses = types.SimpleNamespace(
        get_ulysses_sequence_parallel_world_size=lambda: 2,
        slice_input_tensor=lambda x, dim: x.chunk(2, dim)[1],
    )
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", ulysses)
    part = compute_forward_kl_topk(logits[:, 4:], *rest, config(), "thd")
    for name, value in part.items():
        close(value, whole[name][:, 4:])


@pytest.mark.parametrize("shift", [slice(1, None), slice(0, 3)])
def test_other_numbers_of_tokens_are_refused(shift):
    logits, log_p, ids = given(nested=False)
    with pytest.raises(
        ValueError, match=r"K entries for each of the tokens \(1, \d\) of student_l"
    ):
        compute_forward_kl_topk(logits[:, shift], log_p[None], ids[None], config(), "thd")


@pytest.mark.skipif("installed" not in IMPLEMENTATIONS, reason="needs verl itself")
@pytest.mark.parametrize(
    ("mode", "policy_gradient"), [("k1", True), ("k3", False), ("abs", True), ("k2", False)]
)
def test_verls_own_distillation_loss_runs_on_fastrl(mode, policy_gradient):
    losses = importlib.import_module("verl.trainer.distillation.losses")
    configs = importlib.import_module("verl.workers.config")
    data, fields = batch(), worker_batch(batch())
    teacher = torch.nn.functional.pad(data.old + data.values, (0, 1)).reshape(-1, 1)
    fields["teacher_logprobs"] = torch.nested.as_nested_tensor(
        list(teacher.split(data.mask.shape[1] + 1)), layout=torch.jagged
    )
    own = configs.DistillationLossConfig(loss_mode=mode, use_policy_gradient=policy_gradient)

    def run():
        log_prob = with_prompts(data.log_prob)
        settings = types.SimpleNamespace(distillation_loss=own)
        output = {"log_probs": log_prob}
        loss, _ = losses.distillation_loss(installed({}), settings, output, fields)
        loss.backward()
        return loss.detach(), log_prob.grad

    expected = run()
    with verl.use_fastrl():
        assert losses.kl_penalty is verl.kl_penalty
        close(run(), expected)


@pytest.mark.skipif("installed" not in IMPLEMENTATIONS, reason="needs verl itself")
def test_the_installed_function_is_replaced():
    module = importlib.import_module(HOME)
    with verl.use_fastrl() as replaced:
        assert module.compute_forward_kl_topk is compute_forward_kl_topk
        assert f"{HOME}.compute_forward_kl_topk" in replaced.names
    assert module.compute_forward_kl_topk is IMPLEMENTATIONS["installed"]
