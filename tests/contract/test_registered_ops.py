"""The registered operators under opcheck, and under torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fastrl
from fastrl import Objective, native
from fastrl.ops._rows import operators as loops
from tests.contract.operator_calls import operator_calls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UNTRACED = {"objective_eval", "cpu_capability", "has_matrix_tiles"}  # for tests, or no tensors
needs_extension = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))


@needs_extension
@pytest.mark.slow
def test_opcheck_of_every_operator():
    calls = operator_calls("cpu")
    calls[torch.ops.fastrl.huge_pages_.default] = [[torch.empty(4, 4)]]
    if native.has_matrix_tiles():
        half = torch.randn(7, 5).bfloat16()
        given = [torch.zeros(3, 5), torch.randn(3, 7), half, True]
        calls[torch.ops.fastrl.mixed_matmul_.default] = [given]
    for operator, given in calls.items():
        for arguments in given:
            torch.library.opcheck(operator, arguments)
    absent = {*UNTRACED, *fastrl.library.ONLY_ON_GPUS}
    if not native.has_matrix_tiles():
        absent.add("mixed_matmul_")
    seen = {operator.name().partition("::")[2] for operator in calls}
    declared = fastrl.library._SCHEMAS.keys() | loops._SCHEMAS.keys()
    assert seen - absent == declared - absent


def of_logits(logits, token_ids, advantages, mask, old, ref, backend):
    """A total and a metric of what takes logits, and of the loss of their statistics."""
    result = fastrl.logits_policy_loss(
        logits,
        token_ids,
        advantages,
        mask,
        old_logprobs=old,
        ref_logprobs=ref,
        objective=Objective(kl_coef=0.1, entropy_coef=0.01),
        temperature=0.8,
        backend=backend,
    )
    stats = fastrl.token_stats(logits, token_ids, mask=mask, backend=backend)
    more = fastrl.policy_loss(
        stats.logprobs,
        advantages,
        mask,
        old_logprobs=old,
        entropy=stats.entropy,
        policy_weights=advantages.abs(),
        objective=Objective.preset(
            "gspo", entropy_coef=0.01, off_policy_threshold=0.1, top_entropy_quantile=0.5
        ),
        backend=backend,
    )
    return result.loss + more.loss, result.metrics["kl"] + more.metrics["ratio_max"]


def of_hidden_states(hidden, token_ids, advantages, mask, old, ref, backend):
    """A total and advantages of what takes hidden states, rewards or values."""
    scan = fastrl.gae(old, ref, mask, backend=backend)
    group = fastrl.group_advantages(advantages, group_size=2, backend=backend)
    white = fastrl.whiten(scan.advantages, mask)
    weight = hidden[0, :1].detach().new_ones(11, hidden.shape[-1])
    token_ids = token_ids % 11
    result = fastrl.linear_policy_loss(
        hidden, weight, token_ids, advantages, mask, old_logprobs=old, backend=backend
    )
    scored = fastrl.linear_token_logprobs(hidden, weight, token_ids, backend=backend)
    value = fastrl.value_loss(scored, scan.returns, mask, old_values=old, clip=0.2)
    return result.loss + scored.sum() + value.loss, white, group.advantages


#: Together they call all differentiable operators.
CALLS = [of_logits, of_hidden_states]


def arguments(length):
    return (
        torch.randn(2, length, 19, requires_grad=True),
        torch.randint(19, (2, length)),
        torch.randn(2),
        torch.rand(2, length) > 0.2,
        torch.randn(2, length) - 2,
        torch.randn(2, length) - 2,
    )


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("call", CALLS)
def test_compiled_without_a_graph_break(backend, compiler, call):
    torch.compiler.reset()
    given = arguments(4)
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    outcomes = []
    for function in (call, compiled):
        given[0].grad = None
        total, *others = function(*given, backend)
        total.backward()
        outcomes.append((total.detach(), *others, given[0].grad))
    for eager, traced in zip(*outcomes, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["cpu"])
def test_twenty_lengths_cost_at_most_two_compilations(backend, call):
    if native.missing is not None:
        pytest.skip(native.missing)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for length in range(3, 23):
        given = arguments(length)
        total, *_ = compiled(*given, backend)
        total.backward()
        expected = call(*given, backend)[0]
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2
