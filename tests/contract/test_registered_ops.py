"""The registered operators under opcheck and torch.compile, and with poisoned allocations."""

import pytest
import torch
import torch.distributed

import fastrl
from fastrl import Objective, native
from fastrl.contract import (
    AGGREGATIONS,
    BASELINES,
    KL_GRADIENTS,
    LEVELS,
    SCALES,
    SINGLETONS,
    AggregationArguments,
    LossArguments,
    RowArguments,
    RowStats,
)
from fastrl.ops._vocabulary_parts.parts import WHOLE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

UNTRACED = {"objective_eval", "cpu_capability", "has_matrix_tiles"}  # for tests, or no tensors
needs_extension = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))
OBJECTIVE = Objective(kl_coef=0.1, entropy_coef=0.01).arguments


def per_token(*shape):
    return torch.randn(*shape)


def loss_arguments(*shape, sequences, **given):
    """All constants, per sequence and per token."""
    usual = LossArguments(
        advantages=torch.randn(sequences),
        weights=torch.rand(sequences),
        kl_weights=torch.rand(*shape),
        entropy_weights=None,
        policy_weights=torch.rand(*shape),
        old_logprobs=per_token(*shape),
        ref_logprobs=per_token(*shape),
        cu_seqlens=None,
    )
    return usual._replace(**given)


def row_arguments(*shape, **given):
    usual = RowArguments(
        token_ids=torch.randint(37, shape),
        mask=torch.rand(shape) > 0.3,
        ignore_index=-100,
        temperatures=None,
        temperature=0.7,
        logit_scale=1.0,
        logit_softcap=0.0,
    )
    return usual._replace(**given)


def aggregation_arguments(**given):
    usual = AggregationArguments(
        aggregation=AGGREGATIONS.index("seq-mean-token-mean"),
        normalizer=0.0,
        normalizer_tensor=None,
        length_norm=0.0,
        count_empty=False,
        group_size=0,
        group_ids=None,
    )
    return usual._replace(**given)


def vocabulary_samples():
    for permuted in (False, True):
        logits = torch.randn(3, 2, 37).transpose(0, 1) if permuted else torch.randn(2, 3, 37)
        heated = {"temperature": 1.0, "logit_scale": 0.5, "logit_softcap": 30.0}
        rows = row_arguments(2, 3)
        scaled = row_arguments(2, 3, mask=None, temperatures=torch.rand(2, 3) + 0.5, **heated)
        for options in (rows, scaled, rows._replace(mask=rows.mask.long())):
            yield "token_stats_fwd", (logits, *options, True, True)
            found = RowStats._make(torch.ops.fastrl.token_stats_fwd(logits, *options, True, True))
            saved = (found.row_max, found.log_sum, found.entropy)
            grads = (per_token(2, 3), None, per_token(2, 3))
            yield "token_stats_bwd", (logits, *options, *saved, *grads)
            yield "token_stats_bwd_", (logits.clone(), *options, *saved, *grads, False)
            loss = (*options, *loss_arguments(2, 3, sequences=2), *OBJECTIVE)
            yield "logits_policy_loss_fwd", (logits, *loss)
            yield "logits_policy_loss_fwd_", (logits.clone(), *loss, False)


def token_samples():
    bounds = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    mask = torch.rand(2, 5) > 0.3
    ids = torch.randint(4, (2, 5))
    grouped = AGGREGATIONS.index("prompt-mean")
    for given, tokens in ((mask, None), (mask, ids), (mask.float(), None)):
        yield "sequence_weights", (given, tokens, 0, None, *aggregation_arguments())
    normalizer = torch.tensor([7])
    how = aggregation_arguments(aggregation=grouped, group_size=1, normalizer_tensor=normalizer)
    yield "sequence_weights", (torch.ones(1, 6, dtype=torch.int32), None, 0, bounds, *how)
    by_ids = how._replace(group_size=0, group_ids=torch.tensor([4, 4, -1]))
    yield "sequence_weights", (torch.ones(1, 6, dtype=torch.bool), None, 0, bounds, *by_ids)

    loss = loss_arguments(2, 5, sequences=2)
    yield "policy_loss_fwd", (per_token(2, 5), torch.rand(2, 5), mask, *loss, *OBJECTIVE)
    plain = Objective().arguments
    yield "policy_loss_fwd", (per_token(2, 5), None, mask, *loss, *plain)
    packed = loss_arguments(1, 6, sequences=3, cu_seqlens=bounds)
    whole = torch.ones(1, 6, dtype=torch.bool)
    for level in LEVELS:
        for gradient in KL_GRADIENTS:
            o = Objective(level=level, kl_coef=0.1, kl_gradient=gradient).arguments
            yield "policy_loss_fwd", (per_token(1, 6), None, whole, *packed, *o)


def advantage_samples():
    mask, bounds = torch.rand(2, 5) > 0.3, torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    rewards, values, bootstrap = per_token(2, 5), per_token(2, 5), per_token(2, 5)
    yield "gae_fwd", (rewards, values, mask, None, mask, bootstrap, None, 0.99, 0.95)
    packed = (per_token(1, 6), per_token(1, 6), None, None, None, per_token(3), bounds)
    yield "gae_fwd", (*packed, 0.99, 0.95)
    mean, others = BASELINES.index("mean"), BASELINES.index("leave_one_out")
    group, batch = SCALES.index("group"), SCALES.index("batch")
    zero, raw = SINGLETONS.index("zero"), SINGLETONS.index("raw")
    yield "group_advantages_fwd", (per_token(8), None, 4, mean, group, 1.0, 1e-4, zero)
    ids = torch.tensor([5, -1, 5, 5, 9, -1])
    yield "group_advantages_fwd", (per_token(6), ids, 0, others, batch, 0.0, 0.0, raw)


def linear_samples():
    hidden, weight = torch.randn(5, 8), torch.randn(37, 8)
    lora = (torch.randn(37), torch.randn(2, 8), torch.randn(37, 2), 0.5)
    rows = row_arguments(5, mask=torch.tensor([True] * 4 + [False]))
    for compact, head in ((True, (weight, None, None, None, 1.0)), (False, (weight, *lora))):
        chunked = (hidden, *head, *rows, 2, compact, "cpu", None, *WHOLE)
        needs = [True, True, head[1] is not None, head[1] is not None, False]
        found = RowStats._make(torch.ops.fastrl.linear_token_stats_fwd(*chunked))
        saved = (found.row_max, found.log_sum, found.entropy)
        grads = (torch.randn(5), None, None)
        yield "linear_token_stats_fwd", chunked
        yield "linear_token_stats_bwd", (*chunked, *saved, *grads, needs)
        loss = loss_arguments(5, sequences=5)
        yield "linear_policy_loss_fwd", (*chunked, *loss, *OBJECTIVE, needs, True)


def samples():
    """Arguments for every operator: compact and permuted logits, with and without the options."""
    yield from vocabulary_samples()
    yield from token_samples()
    yield from advantage_samples()
    yield from linear_samples()
    yield "huge_pages_", (torch.empty(4, 4),)
    if native.has_matrix_tiles():
        half = torch.randn(7, 5).bfloat16()
        yield "mixed_matmul_", (torch.zeros(3, 5), torch.randn(3, 7), half, True)


@needs_extension
def test_opcheck_of_every_operator():
    seen = set()
    for name, arguments in samples():
        torch.library.opcheck(getattr(torch.ops.fastrl, name).default, arguments)
        seen.add(name)
    absent = {*UNTRACED, *fastrl.library.ONLY_ON_GPUS}
    if not native.has_matrix_tiles():
        absent.add("mixed_matmul_")
    registered = {name for name in fastrl.library._SCHEMAS if name not in absent}
    assert seen == registered


@needs_extension
def test_operators_write_everything_they_allocate():
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
    """One function that calls all differentiable operators."""
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
