"""The arguments that the public functions give to the registered operators."""

import collections

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl.contract import RowStats
from fastrl.library import operators
from tests.calls.case import Case
from tests.calls.combined import assert_value
from tests.calls.entries import ENTRIES, cut, outcome

#: Calls of one operator that are kept: with and without the optional arguments.
MOST = 4
SIZE = {"sequences": 2, "tokens": 3}
IN_PLACE = {**SIZE, "vocabulary": 37, "inplace": True}
#: What no entry does: work in place, groups by ids.
CASES = [
    *(
        Case(function, **IN_PLACE, temperature=heat, mask_dtype=dtype)
        for function in ("token_logprobs", "logits_policy_loss")
        for heat, dtype in ((0.7, "float32"), ("per-token", "int32"))
    ),
    Case("token_logprobs", **IN_PLACE, kept="few"),
    Case("token_divergence", **IN_PLACE, beta=0.4),
    Case("token_divergence", **IN_PLACE | {"inplace": False}, beta=0.4),
    Case("group_advantages", **SIZE, layout="packed", groups="ids", mask="absent"),
]


class Calls(TorchDispatchMode):
    """Keeps the arguments of calls whose tensors, if there are any, have other dtypes."""

    def __init__(self):
        super().__init__()
        self.by_operator = collections.defaultdict(dict)

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        if operator.namespace.startswith("fastrl"):
            form = tuple(str(getattr(x, "dtype", type(x))) for x in args)
            if len(self.by_operator[operator]) < MOST:
                copied = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
                self.by_operator[operator].setdefault(form, copied)
        return operator(*args, **(kwargs or {}))


def operator_calls(backend, wanted=lambda entry: True):
    """Return the arguments of some calls of each operator, by the operator."""
    with Calls() as calls:
        for entry in filter(wanted, ENTRIES.values()):
            inputs = entry.draw(2, 3, torch.float32)
            outcome(entry, backend, inputs)
            if entry.packs and "mask" in inputs:
                outcome(entry, backend, cut(entry, inputs, [3, 1]))
        if backend in ("cpu", "triton"):
            gathered_calls(backend)
            divergence_calls(backend)
        for case in CASES:
            assert_value(backend, case)
    return {operator: [*forms.values()] for operator, forms in calls.by_operator.items()}


def divergence_calls(backend):
    """Call what a comparison with a teacher calls inside of an operator, in several ways."""
    run, ids, one = operators(backend), torch.tensor([[0, 3]]), torch.ones(1, 2)
    for dtype, beta, softcap in ((torch.float32, 0.5, 0.0), (torch.bfloat16, 1.0, 5.0)):
        logits, teacher = torch.randn(2, 1, 2, 37).to(dtype)
        for optional in (None, one):
            mask = None if optional is None else optional > 0
            rows = (ids, mask, -100, optional, 1.0, 1.0, softcap)
            stats, of_teacher = (
                RowStats._make(run.token_stats_fwd(x, *rows, True, False))
                for x in (logits, teacher)
            )
            scaled = (*rows, optional, 1.0, 1.0, softcap)
            its = (of_teacher.row_max, of_teacher.log_sum)
            _, mean, _ = run.divergence_fwd(
                logits, teacher, *scaled, stats.row_max, stats.log_sum, *its, beta
            )
            saved = (stats.row_max, stats.log_sum, stats.entropy, optional, optional, optional)
            given = (logits, teacher, *scaled, *saved, *its, beta, mean, one)
            run.divergence_bwd(*given)
            run.divergence_bwd_(*given, False)


def gathered_calls(backend):
    """Call what the linear forms call inside of an operator."""
    ids = torch.tensor([[0, 2, -1], [1, -1, 2]], dtype=torch.int32)
    states, factors, run = torch.randn(2, 5), torch.randn(2, 3), operators(backend)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(4, 5).to(dtype)
        run.gathered_dots_(torch.zeros(2, 3), states, matrix, ids)
        run.gathered_sums_(torch.zeros(2, 5), factors, matrix, ids)
    run.scattered_sums_(torch.zeros(4, 5), factors, states, ids)
