"""Rows of logits with the sampler's expected score, beside what they are compared with.

The score is a sum over K tokens of each row. Its gradient is a number for each of them, and one for
the log-sum-exp, which the kernels for rows take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import CenteringStats, SoftmaxStats
from fastrl.ops._arguments import SamplerArguments
from fastrl.ops._companions.pair import Compared, Pair, RowsAlone, Upstream
from fastrl.ops._companions.top_k import TopKRows
from fastrl.ops._head.projection import gradient_of
from fastrl.ops._lens.kept import Columns
from fastrl.ops._lens.rows import Rows, slopes_at
from fastrl.ops._process_groups import total
from fastrl.ops._vocabulary_parts.parts import VocabularyParts
from fastrl.reference.rollout_correction import corrections_of


class SamplerTokens:
    """The sampler's tokens of rows `[B, T]`, with their logits, which are read at once."""

    def __init__(
        self,
        rows: Rows,
        token_ids: Tensor,
        logits: Tensor,
        sampler: SamplerArguments,
        parts: VocabularyParts,
        columns: Columns | None,
    ) -> None:
        """Read logits `[B, T, V]`, or `[B, T, K]` of kept columns; `sampler` has these rows.

        `token_ids` `[B, T]` are ids in the whole vocabulary, like those of the sampler.
        """
        assert sampler.token_ids is not None
        assert sampler.logprobs is not None
        self.rows, self.ids = rows, sampler.token_ids
        self.are_sampled = self.ids == token_ids[..., None]
        self._weights = corrections_of(sampler.weights)
        start = parts.start() if rows.part is not None else 0
        local = torch.where(self.ids < 0, -1, self.ids - start)
        size = logits.shape[-1]
        if columns is None:
            self.own, place = (local >= 0) & (local < size), local
        else:
            self.own, place = _found(columns.ids[None].to(torch.int64), local)
        # tokens without a column here write the first one's value to its column once more
        first = self.own.int().argmax(-1, keepdim=True)
        self._first, place = first, torch.where(self.own, place, 0)
        self._place = torch.where(self.own, place, place.gather(-1, first))
        real = torch.float64 if logits.dtype == torch.float64 else torch.float32
        x = logits.gather(-1, self._place).to(real)
        known = self.own
        if rows.part is not None:
            found = torch.stack([torch.where(self.own, x, 0.0), self.own.to(x.dtype)])
            x, counts = total(found, rows.part.group).unbind()
            known = counts > 0
        x = torch.where(known, x, -torch.inf)
        if columns is None:  # on a GPU the ids have not been checked
            x = torch.where(self.ids >= parts.total(size), torch.nan, x)
        self.logits = x
        self._sampled = torch.where(self.ids < 0, -torch.inf, sampler.logprobs.to(real))

    def score(self, stats: SoftmaxStats) -> reference.ExpectedScore:
        """Return the expected score with the statistics of the rows."""
        z = self.rows.exponents(self.logits)
        logprobs = z - self.rows.exponents(stats.row_max[..., None]) - stats.log_sum[..., None]
        return reference.expected_score(logprobs, self._sampled, self._weights)

    def write(self, target: Tensor, values: Tensor) -> None:
        """Write dL/dlogits of the tokens that this rank has."""
        values = torch.where(self.rows.active[..., None], values, 0.0).to(target.dtype)
        values = torch.where(self.own, values, values.gather(-1, self._first))
        none = ~self.own.any(-1, keepdim=True)
        values = torch.where(none, self.read(target), values)
        if target.itemsize == 2:  # torch would copy all of a 16-bit target on a CPU
            target, values = target.view(torch.int16), values.view(torch.int16)
        target.scatter_(-1, self._place, values)

    def read(self, target: Tensor) -> Tensor:
        """Return the values of the tokens that this rank has."""
        return target.gather(-1, self._place)


def _found(columns: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return which ids `[1, C, K]` are among the columns `[1, C, M]`, and where."""
    ordered, order = columns.sort(-1)
    place = torch.searchsorted(ordered, ids).clamp(max=columns.shape[-1] - 1)
    return (ordered.gather(-1, place) == ids) & (ids >= 0), order.gather(-1, place)


class CenteredRows:
    """Rows with the sampler's expected score, with the interface of `Pair`."""

    def __init__(
        self, tokens: SamplerTokens, logits: Tensor, others: RowsAlone | Pair | TopKRows
    ) -> None:
        """Take `tokens` that were read before `others` could write the logits."""
        self._tokens, self._logits, self._others = tokens, logits, others
        self._found: reference.ExpectedScore | None = None

    def compare(self, stats: SoftmaxStats) -> Compared | None:
        """Return the comparison with a teacher, if there is one."""
        return self._others.compare(stats)

    def centering(self, stats: SoftmaxStats) -> CenteringStats:
        """Return what is found for each row, 0 in inactive ones."""
        active, found = self._tokens.rows.active, self._score(stats).stats
        return CenteringStats._make(torch.where(active, x, 0.0) for x in found)

    def gradient(self, upstream: Upstream) -> Tensor:
        """Return dL/dlogits."""
        assert not isinstance(self._others, TopKRows)  # it has copies
        gradient = self._others.gradient(self._with_score(upstream))
        self._write(gradient, upstream)
        return gradient

    def write_gradient(self, upstream: Upstream, *, narrow: bool = False) -> None:
        """Overwrite the logits with dL/dlogits."""
        logits, alone = self._logits, isinstance(self._others, RowsAlone)
        self._others.write_gradient(self._with_score(upstream), narrow=narrow and alone)
        narrowed = gradient_of(logits[0], narrow=True)[None] if narrow else logits
        self._write(narrowed if alone else logits, upstream)
        if narrow and not alone:  # rounded once large slopes have cancelled
            narrowed.copy_(logits.clone())

    def _score(self, stats: SoftmaxStats) -> reference.ExpectedScore:
        """Return the expected score; all calls have the same statistics."""
        if self._found is None:
            self._found = self._tokens.score(stats)
        return self._found

    def _with_score(self, upstream: Upstream) -> Upstream:
        """Add the slope of the expected score by the log-sum-exp to the upstream slopes."""
        grad = upstream.grad_centering
        if grad is None:
            return upstream
        *slopes, of_logsumexp = upstream.slopes
        of_score = -grad * self._score(upstream.stats).sum()[..., 0]
        of_score = torch.where(self._tokens.rows.active & (grad != 0), of_score, 0.0)
        of_logsumexp = of_score if of_logsumexp is None else of_logsumexp + of_score
        return upstream._replace(slopes=(*slopes, of_logsumexp))

    def _write(self, target: Tensor, upstream: Upstream) -> None:
        """Write dL/dlogits of the sampler's tokens."""
        grad, tokens = upstream.grad_centering, self._tokens
        if grad is None:
            return
        score, factor = self._score(upstream.stats), grad[..., None]
        slopes = tokens.rows.exponent_slopes(tokens.logits)
        if isinstance(self._others, RowsAlone):  # exact also where alpha is large
            stats = upstream.stats
            own = slopes_at(score.logprobs, tokens.are_sampled, stats.entropy, upstream.slopes)
            values = (own + factor * score.slopes()) * slopes
        else:
            of_score = factor * score.coefficients() * slopes
            values = tokens.read(target).to(tokens.logits.dtype) + of_score
        # a row without a factor may have no distribution either
        tokens.write(target, torch.where(factor == 0, tokens.read(target), values))
