"""Error budgets derived from rounding, instead of hand-picked tolerances."""

import torch


def assert_within_budget(actual, exact, *, ulps=8, size=None, atol=0.0):
    """Compare `actual` with the float64 `exact`, within what rounding explains.

    The budget of an element is `ulps` roundings of `size` (the magnitude of what was added up on
    the way; by default the element itself), plus `atol` for errors already in the inputs. NaN and
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
    budget = torch.as_tensor(budget).expand_as(want)
    error = torch.where(finite, (got - want).abs(), 0.0)
    excess = torch.where(error > 0, error / budget, 0.0)
    if excess.numel() and excess.max() > 1:
        worst = excess == excess.max()
        raise AssertionError(_at(worst, got, want, f"is {excess.max():.3g} times over its budget"))


def _at(where, got, want, what):
    index = tuple(where.nonzero()[0].tolist()) if where.dim() else ()
    return f"element {index} {what}: {float(got[index])!r}, exactly {float(want[index])!r}"


def assert_same(found, wanted, what=""):
    """Compare outcomes bit for bit; NaN is equal to itself."""
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        y = wanted[name]
        same = (x == y) | ((x != x) & (y != y))
        assert x.dtype == y.dtype, (what, name)
        assert same.all(), (what, name, (~same).nonzero().tolist()[:3])


def assert_close(found, wanted):
    """Compare outcomes within the rounding of sums in another order."""
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        double = x.dtype == torch.float64
        size = wanted[name].double().abs().max().item() if x.numel() else 0.0
        rtol, atol = (1e-12, 1e-13) if double else (2e-5, 2e-6)
        torch.testing.assert_close(
            x, wanted[name], rtol=rtol, atol=atol * (1 + size), msg=lambda m, n=name: f"{n}: {m}"
        )
