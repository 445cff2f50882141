"""The policy losses: arguments and expected results."""

import functools
import inspect
from typing import Any

import numpy as np
from torch import Tensor

import fastrl

from .call import Function, LossCall, Place
from .case import Case
from .forms import form_of, joined_lora
from .oracle.bounded import Bounded, Decision, of_results, unbounded
from .oracle.centering import Centering
from .oracle.policy import Loss
from .policy_data import PolicyInputs, entropy_of, logprobs_of, sampler_of, weights_of
from .rows_data import ids_tensor, token_options
from .teachers import TeacherRows
from .tokens import token_tensor, tokens_of


class OfLogprobs(LossCall):
    """A call of `policy_loss`."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.tokens = tokens = tokens_of(case)
        self.logprobs, self.entropy = logprobs_of(case, tokens), entropy_of(case, tokens)
        self.inputs = PolicyInputs(case, tokens, tokens.valid, self.logprobs)
        self.given["logprobs"] = token_tensor(case, tokens, self.logprobs, case.dtype)
        if self.entropy is not None:
            given = token_tensor(case, tokens, self.entropy, case.token_dtype)
            self.given["entropy"] = given
        self.leaves, self.waited_for = tuple(self.given), self.asked
        self.given |= self.inputs.arguments()

    @functools.cached_property
    def loss(self) -> Loss:
        arithmetic, valid = of_results(self.case.dtype, self.case.token_dtype), self.tokens.valid
        logprobs, entropy = (
            None if x is None else Bounded(x[valid], 0.0, arithmetic)
            for x in (self.logprobs, self.entropy)
        )
        return self.inputs.expected(logprobs, entropy, self.doubts)

    def expected(self) -> dict[str, Bounded | Decision]:
        return {"loss": self.loss.loss, **self.loss.metrics}

    def gradients(self) -> dict[str, Bounded]:
        slopes = {"logprobs": self.loss.slope}
        if self.inputs.fields["entropy_coef"]:
            slopes["entropy"] = self.loss.entropy_slope
        tokens = self.tokens
        return {name: tokens.placed(self.scaled(x), tokens.valid) for name, x in slopes.items()}


class OfClips(OfLogprobs):
    """A call of `clipped_tokens`."""

    differentiable = False

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        taken = inspect.signature(fastrl.clipped_tokens).parameters
        self.given = {name: x for name, x in self.given.items() if name in taken}
        self.leaves = ()

    def results(self, result: Any) -> dict[str, Tensor | None]:
        return {"lower": result < 0, "upper": result > 0}

    def expected(self) -> dict[str, Bounded | Decision]:
        bounds = {"lower": self.loss.clip_low, "upper": self.loss.clip_high}
        return {name: self.tokens.placed(x, self.tokens.valid) for name, x in bounds.items()}

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        return [], []


class OfRows(LossCall):
    """A call of `logits_policy_loss` or `linear_policy_loss`."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.form = form_of(case, place, self.doubts)
        self.rows, self.leaves = self.form.rows, self.form.leaves
        self.waited_for = self.asked
        if case.dtype == "float16" and "logits" in self.leaves and not np.isnan(self.asked):
            self.waited_for = None  # it would underflow, so it is made when it is asked for
        # what is given beside the rows lies around the log-probabilities that they have
        logprobs = np.zeros(self.rows.tokens.total)
        logprobs[self.rows.active] = self.form.oracle.logprobs.value
        self.inputs = PolicyInputs(case, self.rows.tokens, self.rows.active, logprobs)
        self.given = {**self.form.tensors, "token_ids": ids_tensor(self.rows)}
        self.given |= self.inputs.arguments() | token_options(self.rows)
        self.given |= self.form.options("inplace") | ({} if case.metrics else {"metrics": False})
        fields, self.teacher, self.sampler = self.inputs.fields, None, None
        if fields["teacher_coef"] or fields["kl_estimator"] == "exact":
            self.teacher = TeacherRows(self.form)
            self.given["teacher"] = self.teacher.argument
        if case.sampler is not None:
            top, *self.sampler = sampler_of(self.rows, self.form.oracle, self.inputs)
            self.given["rollout_top_k"] = top

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        return joined_lora(self.case, given)

    @functools.cached_property
    def loss(self) -> Loss:
        oracle, score = self.form.oracle, None
        if self.sampler is not None:
            ids, log_q = (x[self.rows.active] for x in self.sampler)
            score = Centering(oracle, ids, log_q, weights_of(self.inputs), self.doubts)
        return self.inputs.expected(oracle.logprobs, oracle.entropy, self.doubts, score)

    @functools.cached_property
    def unseen(self) -> np.ndarray:
        """Rows without advantage, which need not even be projected where nothing measures them."""
        if self.case.metrics:
            return np.zeros(self.form.oracle.n, bool)
        advantages = self.inputs.of_valid(self.inputs.advantages)
        unseen = (advantages == 0) & ~np.isfinite(self.loss.slope.value)
        self.doubts.add("unseen rows", unseen)
        return unseen

    def expected(self) -> dict[str, Bounded | Decision]:
        loss = unbounded(self.loss.loss, self.unseen.any())
        return {"loss": loss, **(self.loss.metrics if self.case.metrics else {})}

    def gradients(self) -> dict[str, Bounded]:
        loss = self.loss
        slopes = (loss.slope, loss.entropy_slope, loss.score_factor)
        idle = [(slope.value == 0) & (slope.error == 0) for slope in slopes]
        dx = unbounded(self._dx(), self.unseen[:, None])
        return self.form.through(dx, np.logical_and.reduce(idle) & ~self.unseen, abs(self.asked))

    def _dx(self) -> Bounded:
        """dL/dx of the active rows."""
        oracle, loss = self.form.oracle, self.loss
        nothing = Bounded(np.zeros(oracle.n), 0.0, oracle.arithmetic)
        slopes = (loss.slope, loss.entropy_slope, loss.score_factor)

        def of(slope: Bounded, entropy_slope: Bounded, factor: Bounded) -> Bounded:
            gradient = oracle.gradient(slope, entropy_slope, nothing)
            return gradient if loss.score is None else gradient + loss.score.gradient(factor)

        gradient = of(*map(self.scaled, slopes))
        if self.asked != 0:
            return gradient
        return unbounded(gradient, ~np.isfinite(of(*slopes).error))  # before it is multiplied by 0


FUNCTIONS = {
    "policy_loss": Function(OfLogprobs, 8),
    "clipped_tokens": Function(OfClips, 1),
    "logits_policy_loss": Function(OfRows, 6),
    "linear_policy_loss": Function(OfRows, 4),
}
