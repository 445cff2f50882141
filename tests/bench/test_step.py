"""`fastrl bench step`: the same step in both variants, what its parts take, and how it ends."""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

import fastrl
from fastrl.bench import command_line, step
from fastrl.bench.child import Process, say
from fastrl.bench.grpo_step import (
    PARTS,
    VARIANTS,
    WITH,
    WITHOUT,
    Measurement,
    Settings,
    grpo_step,
    load,
    logprobs,
    policy_loss,
)
from fastrl.bench.step import main
from fastrl.integrations.transformers import LmHead

TINY = ["--model", "tiny", "--prompts", "2", "--group-size", "2", "--completion-tokens", "24"]
SETTINGS = Settings("tiny", False, 2, 3, 5, 7, 6, "float32", "cpu", False, 1)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_both_variants_have_the_same_loss_and_gradient(scale, softcap):
    torch.manual_seed(0)
    weight = torch.randn(50, 8, requires_grad=True)
    hidden = torch.randn(3, 5, 8, requires_grad=True)
    head = LmHead(weight, None, None, scale, softcap)
    ids, gains = torch.randint(50, (3, 5)), torch.tensor([1.0, -2.0, 0.5])
    old = logprobs(hidden, head, ids, False).detach()
    torch.testing.assert_close(logprobs(hidden, head, ids, True), old)
    old += torch.linspace(-0.5, 0.5, 15).view(3, 5)  # some ratios are clipped
    losses, gradients = [], []
    for fused in (False, True):
        losses.append(policy_loss(hidden, head, ids, old, gains, 6, fused))
        gradients.append(torch.autograd.grad(losses[-1], [hidden, weight]))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "changes", [{}, {"micro_batch": 2}, {"recompute": True}], ids=["", "micro-batches", "recompute"]
)
def test_a_step_follows_the_gradient_of_the_models_own_logits(variant, changes, monkeypatch):
    settings, entered, called = SETTINGS._replace(**changes), [], []
    for name in ("linear_token_logprobs", "linear_policy_loss"):
        function = mock.Mock(side_effect=getattr(fastrl, name))
        called.append(function)
        monkeypatch.setattr(f"fastrl.bench.grpo_step.{name}", function)

    def part(name):
        entered.append(name)
        return nullcontext()

    torch.manual_seed(0)
    model = load(settings)
    grpo_step(model, torch.optim.SGD(model.parameters(), lr=1.0), variant, settings, part)

    assert tuple(dict.fromkeys(entered)) == PARTS
    calls = 6 // settings.micro_batch if variant == WITH else 0
    assert [function.call_count for function in called] == [calls, calls]
    expected = _expected_weights(settings)
    torch.testing.assert_close(_weights(model), expected, rtol=1e-4, atol=1e-6)


def _expected_weights(settings):
    """On policy the gradient is that of the advantage times the log-probability, on average."""
    torch.manual_seed(0)
    model = load(settings)
    before = _weights(model)
    prompts = torch.randint(1000, (settings.prompts, settings.prompt_tokens))
    ids = model.eval().generate(prompts, attention_mask=torch.ones_like(prompts))
    rewards = torch.randn(len(ids)).view(settings.prompts, -1)
    gains = fastrl.group_advantages(rewards.flatten(), group_size=rewards.shape[1]).advantages
    logits = model(ids).logits[:, :-1].log_softmax(-1)
    found = logits.gather(-1, ids[:, 1:, None])[:, settings.prompt_tokens - 1 :, 0]
    (-(gains[:, None] * found).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert (_weights(model) - before).abs().max() > 1e-4
    return _weights(model)


def _weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak")
def test_the_logits_take_what_is_predicted_and_less_with_fastrl():
    vocabulary = 60_000
    settings = SETTINGS._replace(micro_batch=4, completion_tokens=64)
    predicted = step._predicted(settings, vocabulary)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    head, peaks = LmHead(weight, None, None, 1.0, None), {}
    hidden = torch.randn(4, 64, 4, requires_grad=True)
    ids, old = torch.randint(vocabulary, (4, 64)), torch.full((4, 64), -11.0)
    for variant in (WITHOUT, *VARIANTS):  # the first call takes more
        part = Measurement(torch.device("cpu"), memory=True)
        with part("loss"):
            loss = policy_loss(hidden, head, ids, old, torch.ones(4), 4, variant == WITH)
        with part("backward"):
            loss.backward()
        peaks[variant] = part.peaks
        weight.grad = hidden.grad = None
    assert peaks[WITHOUT] == pytest.approx(predicted, rel=0.1)
    assert max(peaks[WITH].values()) < 0.4 * peaks[WITHOUT]["backward"]


@pytest.mark.slow
def test_the_parts_add_up_to_the_step_and_the_tables_have_a_line_for_each_variant(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([*TINY, "--steps", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "step-light.svg").exists() == (find_spec("matplotlib") is not None)
    results = json.loads((tmp_path / "step.json").read_text())
    for variant in results["variants"]:
        assert tuple(one["part"] for one in variant["parts"]) == PARTS
        total = sum(one["seconds"] for one in variant["parts"])
        assert 0.7 * variant["seconds"] < total <= variant["seconds"]
        assert variant["peak"] == max(one["peak"] for one in variant["parts"])
        assert variant["held"] > 3 * 4 * 1000 * 32  # the embedding and its moments
    assert results["command"].startswith("fastrl bench step --model tiny")
    text = (tmp_path / "step.md").read_text()
    for unit in ("seconds", "MB"):
        table = text.partition(f"| {unit} |")[2].partition("\n\n")[0].splitlines()
        assert [line.split(" | ")[0] for line in table[2:4]] == [f"| {name}" for name in VARIANTS]
        assert {line.count("|") for line in table[1:]} == {len(PARTS) + 3}


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--steps", "0", "argument --steps: must be at least 1, got '0'"),
        ("--group-size", "1", "argument --group-size: must be at least 2"),
        ("--prompts", "many", "argument --prompts: must be at least 1, got 'many'"),
        ("--micro-batch", "5", "argument --micro-batch: must be at most"),
        ("--completion-tokens", "50000", "argument --completion-tokens: the model has a context"),
        ("--dtype", "int8", "argument --dtype: "),
        ("--device", "quantum", "argument --device: "),
        ("--model", "no/such/model", "argument --model: cannot use 'no/such/model': "),
        ("--out", __file__, "argument --out: cannot use "),
    ],
)
def test_bad_input_names_the_option(option, value, named, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*TINY, option, value])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_a_missing_transformers_is_told_with_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(TINY)
    assert "pip install 'fastrl-kernels[train]'" in capsys.readouterr().err


STEP = {"total": 1.0, "held": 1, "seconds": dict.fromkeys(PARTS, 0.1)}
STEP["peaks"] = dict.fromkeys(PARTS, 5)


def ends(variant, settings, how):
    """A variant that ends in its backward: at once, or in its fourth step."""
    say(part="backward")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raised":
        raise MemoryError("7 GB")
    for number in range(3):
        say(step=number, **STEP)
    if how == "Ctrl-C":
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    sys.exit(1)


@pytest.mark.parametrize(
    ("how", "status", "failure", "parts"),
    [
        ("killed", 1, "backward: killed by signal 9, as Linux does when memory", 0),
        ("raised", 1, "backward: MemoryError: 7 GB", 0),
        ("raised later", 0, "backward: exit status 1", 6),
        ("Ctrl-C", 130, "interrupted in step 4, backward", 6),
    ],
)
def test_a_variant_that_ends_early_is_a_row_that_says_why(
    how, status, failure, parts, monkeypatch, tmp_path
):
    started = []

    def start(call, log):
        started.append(Process(partial(ends, *call.args, how), log))
        return started[-1]

    monkeypatch.setattr(step.child, "Process", start)
    assert command_line.main(["step", *TINY, "--out", str(tmp_path)]) == status
    assert not any(process._process.is_alive() for process in started)
    first, *others = json.loads((tmp_path / "step.json").read_text())["variants"]
    assert first["failure"].startswith(failure)
    assert len(first["parts"]) == parts
    assert [one["name"] for one in others] == ([] if status == 130 else [WITH])
    assert f"| without ({failure}" in (tmp_path / "step.md").read_text()
