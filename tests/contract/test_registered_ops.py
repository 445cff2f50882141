"""The registered operators under opcheck and torch.compile, and with poisoned allocations."""

import pytest
import torch

import fastrl
from fastrl import Objective, native
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS, LEVELS, SURROGATES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UNTRACED = {"objective_eval", "cpu_capability", "has_matrix_tiles"}  # for tests, or no tensors
needs_extension = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
INF = float("inf")
OBJECTIVE = (
    SURROGATES.index("ppo_clip"),
    KL_ESTIMATORS.index("k3"),
    KL_GRADIENTS.index("exact"),
    [0.2, 0.2, INF, INF, 1.0, 1.05, 0.1, INF, INF, INF, 0.01],
)


def per_token(*shape):
    return torch.randn(*shape)


def samples():
    """Arguments for every operator: compact and permuted logits, with and without the options."""
    for permuted in (False, True):
        logits = torch.randn(3, 2, 37).transpose(0, 1) if permuted else torch.randn(2, 3, 37)
        rows = (torch.randint(37, (2, 3)), torch.rand(2, 3) > 0.3, None, 0.7, 1.0, 0.0)
        heated = (*rows[:2], torch.rand(2, 3) + 0.5, 1.0, 0.5, 30.0)
        for options in (rows, heated):
            yield "token_stats_fwd", (logits, *options, True, True)
            *_, row_max, log_sum = torch.ops.fastrl.token_stats_fwd(logits, *options, True, True)
            entropy = torch.rand(2, 3)
            grads = (per_token(2, 3), None, per_token(2, 3))
            yield "token_stats_bwd", (logits, *options, row_max, log_sum, entropy, *grads)
            yield "token_stats_bwd_", (logits.clone(), *options, row_max, log_sum, entropy, *grads)
            weights = (torch.rand(2, 3), torch.rand(2, 3), None)
            loss = (per_token(2, 3), *weights, per_token(2, 3), per_token(2, 3), *OBJECTIVE)
            yield "logits_policy_loss_fwd", (logits, *options, *loss)
            yield "logits_policy_loss_fwd_", (logits.clone(), *options, *loss)
    mask = torch.rand(2, 5) > 0.3
    five = [per_token(2, 5) for _ in range(5)]
    yield (
        "policy_loss_fwd",
        (*five[:2], mask, torch.rand(2, 5), None, None, *five[2:], None, 0, *OBJECTIVE),
    )
    bounds = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    one = [per_token(1, 6) for _ in range(4)]
    weights = [torch.rand(1, 6) for _ in range(3)]
    packed = (*one[:2], mask.new_ones(1, 6), *weights, None, one[3], one[0], bounds)
    for level in range(1, len(LEVELS)):
        for gradient in range(len(KL_GRADIENTS)):
            objective = (level, OBJECTIVE[0], 0, gradient, OBJECTIVE[3])
            yield "policy_loss_fwd", (*packed, *objective)
    yield "gae_fwd", (five[0], five[1], mask, None, mask, five[2], None, 0.99, 0.95)
    yield "gae_fwd", (one[0], one[1], None, None, None, per_token(3), bounds, 0.99, 0.95)
    yield "group_advantages_fwd", (per_token(8), None, 4, 0, 0, 1.0, 1e-4, 0)
    yield (
        "group_advantages_fwd",
        (per_token(6), torch.tensor([5, -1, 5, 5, 9, -1]), 0, 1, 1, 0.0, 0.0, 1),
    )

    yield "huge_pages_", (torch.empty(4, 4),)
    if native.has_matrix_tiles():
        half = torch.randn(7, 5).bfloat16()
        yield "mixed_matmul_", (torch.zeros(3, 5), torch.randn(3, 7), half, True)

    hidden, weight = torch.randn(5, 8), torch.randn(37, 8)
    lora = (torch.randn(37), torch.randn(2, 8), torch.randn(37, 2), 0.5)
    tokens = (torch.randint(37, (5,)), torch.tensor([True] * 4 + [False]), None, 0.7, 1.0, 0.0)
    for compact, head in ((True, (weight, None, None, None, 1.0)), (False, (weight, *lora))):
        chunked = (hidden, *head, *tokens, 2, compact, "cpu")
        needs = [True, True, head[1] is not None, head[1] is not None, False]
        stats = torch.ops.fastrl.linear_token_stats_fwd(*chunked)
        grads = (torch.randn(5), None, None)
        yield "linear_token_stats_fwd", chunked
        yield (
            "linear_token_stats_bwd",
            (*chunked, stats[5], stats[6], stats[1], *grads, needs),
        )
        weights = [torch.rand(5) * tokens[1], None, torch.rand(5) * tokens[1]]
        of_row = [torch.randn(5), *weights, torch.randn(5), torch.randn(5)]
        yield "linear_policy_loss_fwd", (*chunked, *of_row, *OBJECTIVE, needs, True)


@needs_extension
def test_opcheck_of_every_operator():
    seen = set()
    for name, arguments in samples():
        torch.library.opcheck(getattr(torch.ops.fastrl, name).default, arguments)
        seen.add(name)
    absent = UNTRACED if native.has_matrix_tiles() else {*UNTRACED, "mixed_matmul_"}
    registered = {name for name in fastrl.library._SCHEMAS if name not in absent}
    assert seen == registered


@needs_extension
def test_operators_write_all_that_they_allocate():
    """Deterministic mode fills fresh memory with NaN (integers with their maximum)."""
    for name, arguments in samples():
        if name.endswith("_"):
            continue
        operator = getattr(torch.ops.fastrl, name)
        clean = operator(*arguments)
        torch.use_deterministic_algorithms(True)
        try:
            poisoned = operator(*arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        clean, poisoned = (x if isinstance(x, tuple) else (x,) for x in (clean, poisoned))
        for before, after in zip(clean, poisoned, strict=True):
            assert torch.equal(before, after), name


def everything(logits, token_ids, advantages, mask, old, ref, backend):
    """One function that goes through all differentiable operators."""
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
    scan = fastrl.gae(old, ref, mask, backend=backend)
    group = fastrl.group_advantages(advantages, group_size=2, backend=backend)
    white = fastrl.whiten(scan.advantages, mask)
    value = fastrl.value_loss(stats.logprobs, scan.returns, mask, old_values=old, clip=0.2)
    weight = logits[0, :1].detach().new_ones(11, logits.shape[-1])
    hidden = fastrl.linear_policy_loss(
        logits, weight, token_ids % 11, advantages, mask, old_logprobs=old, backend=backend
    )
    scored = fastrl.linear_token_logprobs(logits, weight, token_ids % 11, backend=backend)
    total = result.loss + more.loss + value.loss + hidden.loss + scored.sum()
    return total, result.metrics["kl"] + more.metrics["ratio_max"] + white.sum(), group.advantages


def arguments(length):
    return (
        torch.randn(2, length, 19, requires_grad=True),
        torch.randint(19, (2, length)),
        torch.randn(2),
        torch.rand(2, length) > 0.2,
        torch.randn(2, length) - 2,
        torch.randn(2, length) - 2,
    )


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_without_a_graph_break(backend, compiler):
    torch.compiler.reset()
    given = arguments(4)
    compiled = torch.compile(everything, fullgraph=True, backend=compiler)
    outcomes = []
    for function in (everything, compiled):
        given[0].grad = None
        total, metric, advantages = function(*given, backend)
        total.backward()
        outcomes.append((total.detach(), metric, advantages, given[0].grad))
    for eager, traced in zip(*outcomes, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu"])
def test_twenty_lengths_cost_at_most_two_compilations(backend):
    if native.missing is not None:
        pytest.skip(native.missing)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(everything, fullgraph=True, backend=counter)
    for length in range(3, 23):
        given = arguments(length)
        total, *_ = compiled(*given, backend)
        total.backward()
        expected = everything(*given, backend)[0]
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2
