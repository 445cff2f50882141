"""Statistics of rows, among them the divergence from a teacher: arguments, expected results."""

import functools
from typing import Any

import numpy as np
from torch import Tensor

from .call import Call, Function, Place
from .case import DIVERGENCES, Case
from .forms import form_of, joined_lora
from .oracle.bounded import Bounded, Decision
from .oracle.divergence import Divergence
from .oracle.top_tokens import TopTokens
from .rows_data import ids_tensor, token_options
from .teachers import OF_TEACHER, TeacherRows
from .tokens import as_held, flat_tensor, laid_out, mask_tensor

STATISTICS = ("logprobs", "entropy", "logsumexp")
#: What makes a divergence over kept tokens.
WITH_KEPT = {"token_divergence": "token_stats", "linear_divergence": "linear_token_stats"}


class RowsCall(Call):
    """A call of `token_logprobs`, `token_stats`, `token_divergence`, or of a linear form."""

    with_gradient: tuple[str, ...] = (*STATISTICS, "divergence")

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.form = form_of(case, place, self.doubts)
        self.rows, self.leaves = self.form.rows, self.form.leaves
        self.teacher = None
        arguments = {"mask": mask_tensor(case, self.rows.tokens), **token_options(self.rows)}
        arguments |= self.form.options("inplace_backward")
        if set(self.outputs) & set(OF_TEACHER):
            self.teacher = TeacherRows(self.form)
            arguments["teacher"] = self.teacher.argument
        if case.function in DIVERGENCES and self.rows.sets is None:
            arguments.pop("ignore_index", None)  # which the function itself does not take
        else:
            if case.function in DIVERGENCES:  # nor kept tokens
                self.function = WITH_KEPT[case.function]
            arguments = {"token_ids": ids_tensor(self.rows), **arguments}
            if self.function.endswith("stats"):
                arguments["outputs"] = self.outputs
        self.given = {**self.form.tensors, **arguments}

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.case.function in DIVERGENCES:
            return ("divergence",)
        return self.case.outputs if self.case.function.endswith("stats") else ("logprobs",)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        return joined_lora(self.case, given)

    def results(self, result: Any) -> dict[str, Tensor | None]:
        return {self.outputs[0]: result} if isinstance(result, Tensor) else result._asdict()

    @functools.cached_property
    def compared(self) -> Divergence | TopTokens:
        return self.teacher.compared(self.form.oracle)

    def expected(self) -> dict[str, Bounded | Decision]:
        oracle, found = self.form.oracle, {}
        for name in self.outputs:
            if name in OF_TEACHER:
                found[name] = OF_TEACHER[name](self.compared)
            else:
                found[name] = getattr(oracle, name)
        return {name: self.rows.tokens.placed(x, self.rows.active) for name, x in found.items()}

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        case, shape = self.case, self.rows.tokens.shape
        outputs, gradients = [], []
        for name in self.with_gradient:
            values = self._upstream_of(name)
            if values is None:
                continue
            outputs.append(results[name])
            dtype = str(results[name].dtype).removeprefix("torch.")
            if case.upstream == "expanded" and values.size:
                one = flat_tensor(case, values[:1], dtype)
                gradients.append(one.view((1,) * len(shape)).expand(shape))
            else:
                layout = "strided" if case.upstream == "strided" else "contiguous"
                gradients.append(laid_out(flat_tensor(case, values, dtype).view(shape), layout))
        return outputs, gradients

    def _upstream_of(self, output: str) -> np.ndarray | None:
        """Return the upstream gradient `[N]` of an output; None is no gradient."""
        total, kind = self.rows.tokens.total, self.case.upstream
        random = self.case.random(f"upstream {output}")
        asked = [name for name in self.outputs if name in self.with_gradient]
        if output not in asked or (kind == "first" and output != asked[0]):
            return None
        if kind in ("ones", "zero", "expanded"):
            return np.full(total, {"ones": 1.0, "zero": 0.0, "expanded": -0.375}[kind])
        drawn = as_held(random.standard_normal(total), "float32")
        if kind in ("some-zero", "nan"):
            drawn = np.where(random.random(total) < 0.5, np.nan if kind == "nan" else 0.0, drawn)
        return drawn * 2.0**40 if kind == "large" else drawn

    def gradients(self) -> dict[str, Bounded]:
        oracle = self.form.oracle
        asked = {name: self._asked(name) for name in self.with_gradient}
        idle = np.logical_and.reduce([g == 0 for g in asked.values()])
        dx = None
        if not set(self.outputs).isdisjoint(STATISTICS):
            upstreams = (Bounded(asked[name], 0.0, oracle.arithmetic) for name in STATISTICS)
            dx = oracle.gradient(*upstreams)
        if "divergence" in self.outputs:
            of_teacher = self.compared.gradient(asked["divergence"])
            dx = of_teacher if dx is None else dx + of_teacher
        return self.form.through(dx, idle)

    def _asked(self, output: str) -> np.ndarray:
        """Return the upstream gradients of the active rows, zeros if the output has none."""
        given = self._upstream_of(output)
        return np.zeros(self.rows.active.sum()) if given is None else given[self.rows.active]


FUNCTIONS = {
    "token_logprobs": Function(RowsCall, 2),
    "token_stats": Function(RowsCall, 5),
    "linear_token_logprobs": Function(RowsCall, 1),
    "linear_token_stats": Function(RowsCall, 2),
    "token_divergence": Function(RowsCall, 3),
    "linear_divergence": Function(RowsCall, 2),
}
