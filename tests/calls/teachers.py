"""Teachers of rows: their numbers, as they are given, and the divergence from them."""

from typing import Any

import numpy as np

import fastrl

from .forms import OfLogits, multiplied
from .oracle.bounded import Arithmetic, of_results
from .oracle.divergence import Divergence
from .oracle.head import LinearHead
from .oracle.rows import Head, Rows
from .oracle.top_tokens import TopTokens
from .rows_data import HEATS, LogitRows, lowest_of
from .tokens import MASKED_VALUES, as_held, flat_tensor, token_tensor

#: The outputs that a teacher makes.
OF_TEACHER = {
    "divergence": lambda compared: compared.divergence(),
    "teacher_entropy": lambda compared: compared.teacher.entropy,
    "agrees": lambda compared: compared.agrees(),
}


class TeacherRows:
    """A teacher of rows: by its logits `[N, V]`, hidden states, or K tokens per row.

    Attributes:
        argument: the teacher as it is given.
    """

    def __init__(self, form: OfLogits) -> None:
        self.form, self.rows, self.case = form, form.rows, form.case
        case = self.case
        self.dtype = case.dtype if case.teacher_dtype == "like" else case.teacher_dtype
        self.heat = np.full(self.rows.tokens.total, 1.0)
        if case.teacher_temperature == "per-token":
            drawn = case.random("teacher temperature").choice(HEATS, self.heat.shape)
            self.heat = as_held(drawn, "float32")
        else:
            self.heat *= case.teacher_temperature
        random = case.random("teacher")
        if case.teacher == "tokens":
            self.argument = self._of_tokens(random)
        elif case.teacher == "hidden":
            self.argument = self._of_hidden(random)
        else:
            self.argument = self._of_logits(random)

    def compared(self, student: Rows) -> Divergence | TopTokens:
        """Return the divergence of these active rows from the teacher's."""
        case, rows, active = self.case, self.rows, self.rows.active
        if case.teacher == "tokens":
            ids, logprobs = self.numbers
            known = (ids[active], logprobs[active], self.dtype, self.argument.has_tail, case.beta)
            return TopTokens(student, rows.head(self.form.place), *known, self.form.x_error)
        if case.teacher == "hidden":
            hidden, weight = self.numbers
            operands = hidden[active], weight, self.dtype, self.dtype
            hidden, weight, entering = multiplied(case, self.form.place, *operands)
            head = LinearHead(hidden, weight, None, None, self._arithmetic, entering)
            x, error = head.logits()
            error = rows.kept(np.broadcast_to(error, x.shape), 0.0)
        else:
            x, error = self.numbers[active], 0.0
        head = Head(self.heat[active], 1.0, case.teacher_softcap, self.form.place.on_gpu_kernels)
        teacher = Rows(rows.kept(x), rows.ids[active], head, self._arithmetic, error)
        return Divergence(student, teacher, case.beta)

    @property
    def _arithmetic(self) -> Arithmetic:
        linear = self.case.function.startswith("linear") and self.case.weight_dtype != "like"
        return of_results(self.case.dtype, *((self.case.weight_dtype,) if linear else ()))

    @property
    def _options(self) -> dict[str, Any]:
        temperature: Any = self.case.teacher_temperature
        if temperature == "per-token":
            temperature = token_tensor(self.case, self.rows.tokens, self.heat, "float32")
        return {
            "beta": self.case.beta,
            "temperature": temperature,
            "logit_softcap": self.case.teacher_softcap,
        }

    def _of_tokens(self, random: np.random.Generator) -> fastrl.Teacher:
        case, tokens, vocabulary = self.case, self.rows.tokens, self.case.vocabulary
        z = random.standard_normal((tokens.total, vocabulary)) * min(case.spread, 30.0)
        z = z - z.max(1, keepdims=True, initial=-np.inf)
        logprobs = z - np.log(np.exp(z).sum(1, keepdims=True))
        count = int(random.integers(1, min(vocabulary, 6) + 1))
        by = logprobs if random.random() < 0.6 else random.standard_normal(logprobs.shape)
        ids = np.argsort(-by, 1)[:, :count]
        has_tail = bool(random.random() < 0.8)
        logprobs = as_held(np.minimum(np.take_along_axis(logprobs, ids, 1), 0.0), self.dtype)
        self.numbers = ids, logprobs
        shown = ids
        if case.masked_values != "usual":  # they may be anything under the mask
            shown = np.where(self.rows.active[:, None], ids, random.choice([-9, 2**30, 0]))
        of_ids = flat_tensor(case, shown, case.ids_dtype).view(*tokens.shape, count)
        given = _wide(self.rows, logprobs, self.dtype)
        return fastrl.Teacher.from_top_k(of_ids, given, has_tail=has_tail, beta=case.beta)

    def _of_hidden(self, random: np.random.Generator) -> fastrl.Teacher:
        hidden = as_held(random.standard_normal((self.rows.tokens.total, 5)), self.dtype)
        weight = as_held(random.standard_normal((self.case.vocabulary, 5)), self.dtype)
        self.numbers = hidden, weight
        states = _wide(self.rows, hidden, self.dtype)
        head = flat_tensor(self.case, weight, self.dtype)
        return fastrl.Teacher.from_hidden(states, head, **self._options)

    def _of_logits(self, random: np.random.Generator) -> fastrl.Teacher:
        """Return a teacher whose logits are like the student's, or its own."""
        case, kind, logits = self.case, self.case.teacher, self.form.logits
        own = random.standard_normal((self.rows.tokens.total, case.vocabulary)) * case.spread
        apart = {"own": None, "near": 1e-3, "same": 0.0}[kind]
        x = own if apart is None else np.where(np.isfinite(logits), logits, 0.0) + apart * own
        banned, theirs = random.random(x.shape) < 0.3, np.isneginf(logits)
        alike = random.random() < 0.8  # else a KL of most of these rows is infinite
        if case.has("inf-some") and kind == "own":
            x[banned & theirs if case.beta == 1 and alike else banned] = -np.inf
        if apart is not None or (case.beta == 0 and alike):
            x[theirs] = -np.inf
        if case.has("lowest-some"):  # often of the same tokens, by other numbers
            low = logits <= np.finfo(np.float16).min
            lowest = random.choice([lowest_of(self.dtype, random), -np.inf])
            if random.random() < 0.8:
                x[low] = lowest
            elif kind == "own":
                x[banned & low if random.random() < 0.5 else banned] = lowest
        self.numbers = as_held(x, self.dtype)
        return fastrl.Teacher.from_logits(
            _wide(self.rows, self.numbers, self.dtype), **self._options
        )


def _wide(rows: LogitRows, values: np.ndarray, dtype: str) -> Any:
    case, tokens = rows.case, rows.tokens
    if case.masked_values != "usual":
        values = np.where(rows.active[:, None], values, MASKED_VALUES[case.masked_values])
    return flat_tensor(case, values, dtype).view(*tokens.shape, values.shape[1])
