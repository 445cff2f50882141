"""The fuzzer fails if fastrl or the oracle is wrong, and reports a line that shows how."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastrl
from tests.calls.case import Case, parse
from tests.calls.examine import examine, signatures
from tests.calls.oracle import policy, rows, terms

from .run import Run, perform

ROOT = Path(__file__).parent.parent.parent
REFERENCE = Run(60, seed=5, backend="reference")


class Flipped(torch.autograd.Function):
    """The identity with a gradient of the wrong sign."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return -upstream


def replaced(monkeypatch, name, wrong):
    """Replace a public function by `wrong(right, *arguments)`."""
    right = getattr(fastrl, name)
    changed = functools.wraps(right)(lambda *given, **options: wrong(right, *given, **options))
    monkeypatch.setattr(fastrl, name, changed)


def failures_of(function, run=REFERENCE):
    return perform(dataclasses.replace(run, function=function)).failures


def flipped_gradient(right, logits, *given, **options):
    return right(Flipped.apply(logits) if logits.requires_grad else logits, *given, **options)


def without_kl(right, *given, objective="grpo", **options):
    if not isinstance(objective, fastrl.Objective) or not objective.kl_coef:
        return right(*given, objective=objective, **options)
    usual = {field.name: field.default for field in dataclasses.fields(objective)}
    of_kl = {name: usual[name] for name in usual if name.startswith("kl_")}
    return right(*given, objective=dataclasses.replace(objective, **of_kl), **options)


def off_by_rounding(right, *given, **options):
    """Eight units in the last place of float32."""
    result = right(*given, **options)
    return result * (1 + 2.0**-20) if result.dtype == torch.float32 else result


def overwriting(right, rewards, *given, **options):
    result = right(rewards, *given, **options)
    rewards.add_(1)
    return result


def lenient(right, mask, **options):
    return right(mask=mask.real if mask.is_complex() else mask, **options)


WRONGS = {
    "a gradient of the wrong sign": ("token_logprobs", flipped_gradient),
    "a loss without its KL": ("policy_loss", without_kl),
    "a result off by eight roundings": ("masked_mean", off_by_rounding),
    "an input that is written to": ("discounted_returns", overwriting),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_wrong_function_is_noticed(monkeypatch, wrong):
    function, change = WRONGS[wrong]
    assert not failures_of(function)
    replaced(monkeypatch, function, change)
    assert failures_of(function)


def test_a_refusal_that_is_missing_is_noticed(monkeypatch):
    case = Case("token_weights", wrong="complex", parameters={"aggregation": "token-sum"})
    assert examine(case, "reference", "cpu") == ([], {}, True)
    replaced(monkeypatch, "token_weights", lenient)
    assert examine(case, "reference", "cpu").differences[0].kind == "not refused"


def test_the_shrunk_line_fails_in_the_same_way_and_is_simpler(monkeypatch):
    replaced(monkeypatch, "policy_loss", without_kl)
    report = perform(dataclasses.replace(REFERENCE, function="policy_loss"))
    failures, lines = report.failures, str(report)
    assert f"policy_loss {REFERENCE.cases}" in lines
    differing = {kind: failures[kind] for kind in failures if kind[1] != "call"}  # no refusals
    assert differing
    for kind, failure in differing.items():
        pasted = parse(repr(failure.shrunk))
        assert pasted == failure.shrunk
        assert kind in signatures(pasted, REFERENCE.examine(pasted))
        assert len(repr(pasted)) < len(repr(failure.found))
        assert repr(pasted) in lines
    monkeypatch.undo()
    assert not examine(pasted, "reference", "cpu").differences


@pytest.mark.parametrize(
    ("module", "name", "wrong", "function"),
    [
        (policy, "difference", lambda a, b: b - a, "policy_loss"),
        (terms, "SATURATION", 10.0, "policy_loss"),
        (rows, "sum_roundings", lambda terms: -50.0, "token_stats"),
    ],
)
def test_a_wrong_oracle_is_noticed(monkeypatch, module, name, wrong, function):
    monkeypatch.setattr(module, name, wrong)
    assert failures_of(function)


CRASH = """
import os, signal
import torch, fastrl
from tests.fuzz.run import Run
from tests.fuzz.supervise import supervised

right = fastrl.discounted_returns

def crashing(rewards, *given, **options):
    if rewards.dtype == torch.float16:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(rewards, *given, **options)

fastrl.discounted_returns = crashing
run = Run(60, seed=5, backend="reference", function="discounted_returns")
print(supervised(run, jobs=2))
"""


def fresh(*arguments):
    """Run Python in the root of the repository: a process that has used threads must not fork."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_crash_is_a_failure_like_others():
    code, output = fresh("-c", CRASH)
    assert code == 0, output
    assert "60 cases of seed 5" in output
    assert "crashed with SIGSEGV" in output
    assert "\n    Case('discounted_returns', dtype='float16')\n" in output


def test_the_command_runs_cases_and_one_that_is_pasted():
    code, output = fresh("-m", "tests.fuzz", "--cases", "20", "--backend", "reference")
    assert "20 cases of seed 0 on reference" in output, output
    code, output = fresh("-m", "tests.fuzz", "Case('gae', tokens=3)", "--backend", "reference")
    assert (code, output.splitlines()[0]) == (0, "0 parts differ")


def test_a_signature_tells_parts_and_kinds_apart(monkeypatch):
    replaced(monkeypatch, "token_logprobs", flipped_gradient)
    case = Case("token_logprobs")
    found = signatures(case, examine(case, "reference", "cpu"))
    assert found == [("token_logprobs", "grad logits", "value")]
