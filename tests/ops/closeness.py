"""Error budgets derived from rounding, instead of hand-picked tolerances."""

import torch


def assert_within_budget(actual, exact, same_dtype=None, *, ulps=8, size=None, atol=0.0):
    """Compare `actual` with the float64 `exact`, within what rounding explains.

    The budget of an element is twice the worst error of `same_dtype` (the eager computation in the
    dtype under test), plus `ulps` roundings of `size` (the magnitude of what was added up on the
    way; by default the element itself), plus `atol` for errors already in the inputs. NaN and
    infinities must be in the same places.
    """
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    got, want = actual.detach().double(), exact.detach().double()
    finite = want.isfinite()
    same = torch.where(finite, got.isfinite(), (got == want) | (got.isnan() & want.isnan()))
    assert same.all(), _at(~same, got, want, "is not finite where it must be, or the reverse")
    rounding = torch.finfo(actual.dtype)
    size = want.abs() if size is None else torch.as_tensor(size, dtype=torch.float64)
    budget = ulps * rounding.eps * size + ulps * rounding.eps * rounding.tiny + atol
    if same_dtype is not None:
        eager = same_dtype.detach().double()
        known = finite & eager.isfinite()
        if known.any():
            budget = budget + 2 * (eager - want)[known].abs().max()
    budget = torch.as_tensor(budget).expand_as(want)
    error = torch.where(finite, (got - want).abs(), 0.0)
    excess = torch.where(error > 0, error / budget, 0.0)
    if excess.numel() and excess.max() > 1:
        worst = excess == excess.max()
        raise AssertionError(_at(worst, got, want, f"is {excess.max():.3g} times over its budget"))


def _at(where, got, want, what):
    index = tuple(where.nonzero()[0].tolist()) if where.dim() else ()
    return f"element {index} {what}: {float(got[index])!r}, exactly {float(want[index])!r}"
