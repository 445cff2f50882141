"""`group_advantages`, `gae` and `discounted_returns`, one group or sequence at a time."""

import math

import numpy as np

from .bounded import FLOAT64, Arithmetic, Bounded, certain

#: Mean and variance are made in float64, to a relative error that float32 does not see.
OF_FLOAT64 = 2.0**-45


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    options: dict,
    arithmetic: Arithmetic,
    kernels: str = "cpu",
) -> dict[str, object]:
    """Return the parts of `GroupAdvantages`, `[N]` each.

    CUDA works in fixed point: the mean is the lowest reward plus a rounded distance; a square is
    rounded twice, their sum, its quotient and the root once; one more rounds what is centred.
    Triton rounds a distance from the mean twice, its square, their sums in 64 columns, whose tree
    has up to log2 N levels, the quotient and the root.
    """
    n = len(rewards)
    fixed_point = kernels == "cuda"
    advantages, mean, std = (np.zeros(n) for _ in range(3))
    errors = np.zeros((3, n))
    informative = np.zeros(n, bool)
    correction = options["correction"]
    unit = max(arithmetic.unit, OF_FLOAT64)
    of_std, of_made = (4.0, 7.0) if fixed_point else (2.0, 3.0)
    if kernels == "triton":
        of_std = (2 * 2 + 1 + math.log2(max(n, 1)) + n // 64 + 1) / 2 + 1
        of_made = of_std + 1
    together = _mean_and_std(rewards[_in_finite_groups(rewards, groups)], correction)[1]
    for group in np.unique(groups):
        inside = groups == group
        r = rewards[inside]
        mean[inside], deviation = _mean_and_std(r, correction)
        std[inside] = deviation
        size = np.abs(r).max()
        away = np.ptp(r) if fixed_point else 0.0
        errors[1, inside] = _relative(r.mean(), unit) + unit * away + OF_FLOAT64 * size
        errors[2, inside] = _relative(deviation, of_std * unit) + OF_FLOAT64 * size
        equal = (r == r[0]).all() if np.isfinite(r).all() else False
        informative[inside] = not equal and not np.isnan(r).any() and np.isfinite(r).all()
        if len(r) == 1:
            raw = options["singleton"] == "raw"
            advantages[inside] = r if raw else np.where(np.isfinite(r), 0.0, np.nan)
            informative[inside] = raw and np.isfinite(r).all()
            continue
        divisor = _divisor(deviation, together, mean[inside][0], options)
        centred, error = _centred(r, size, options["baseline"])
        if equal and options["baseline"] != "none":
            centred, error = np.zeros(len(r)), 0.0
        nothing = (centred == 0) & (divisor == 0)
        made = np.where(nothing, 0.0, centred / divisor)
        advantages[inside] = made
        # what float64 loses in the deviation, if that is next to nothing, counts here
        of_divisor = errors[1, inside].max() if options["scale"] == "mean" else OF_FLOAT64 * size
        lost = of_divisor / np.abs(divisor)
        off = _relative(made, of_made * unit + lost) + np.where(error, error / np.abs(divisor), 0)
        if not abs(divisor) > of_divisor and (arithmetic is FLOAT64 or options["scale"] == "mean"):
            off = np.where(nothing, 0.0, np.inf)
        by_batch = options["baseline"] == "none" and options["scale"] == "batch"
        if by_batch and np.isnan(r).any():  # unspecified: whether the others of the group are NaN
            off = np.where(np.isnan(r), off, np.inf)
        errors[0, inside] = off
    values = (advantages, mean, std)
    # unspecified: what else there is in a group of an infinite reward, which is to stay in it
    infinite = np.isin(groups, groups[np.isinf(rewards)])
    parts = {}
    for name, value, error in zip(("advantages", "mean", "std"), values, errors, strict=True):
        error = np.where(np.isnan(error), np.inf, error)
        error = np.where(np.isfinite(value) | np.isinf(error), error, 0.0)
        if name == "advantages":
            error = np.where((value == 0) & np.isfinite(error), 0.0, error)
        error = np.where(infinite, np.inf, error)
        parts[name] = Bounded(value, error, arithmetic)
    return {**parts, "informative": certain(informative)}


def _relative(x: object, by: float) -> object:
    return np.where(np.isfinite(x), np.abs(x) * by, 0.0)


def _mean_and_std(r: np.ndarray, correction: float) -> tuple[float, float]:
    if len(r) == 0:
        return 0.0, 0.0
    if np.isfinite(r).all() and (r == r[0]).all():
        return float(r[0]), 0.0
    mean = math.fsum(r) / len(r) if np.isfinite(r).all() else float(r.sum() / len(r))
    freedom = len(r) - correction
    if freedom <= 0:
        return mean, 0.0 if np.isfinite(r).all() else np.nan
    return mean, float(np.sqrt(((r - mean) ** 2).sum() / freedom))


def _centred(r: np.ndarray, size: float, baseline: str) -> tuple[np.ndarray, float]:
    if baseline == "none":
        return r.copy(), 0.0
    if baseline == "mean":
        return r - r.sum() / len(r), OF_FLOAT64 * size
    others = (r.sum() - r) / (len(r) - 1)
    return r - others, 2 * OF_FLOAT64 * size


def _in_finite_groups(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Say which rewards the batch is made of: what is not finite stays in its group."""
    return ~np.isin(groups, groups[~np.isfinite(rewards)])


def _divisor(deviation: float, together: float, mean: float, options: dict) -> np.float64:
    """The divisor as a NumPy number, for which a division by 0 is infinite."""
    scale = options["scale"]
    if scale == "none":
        return np.float64(1)
    chosen = {"group": deviation, "batch": together, "mean": mean}[scale]
    return np.float64(chosen + options["eps"])


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    sequence: np.ndarray,
    valid: np.ndarray,
    flags: dict[str, np.ndarray],
    following: np.ndarray | None,
    gamma: float,
    lam: float,
    arithmetic: Arithmetic,
) -> tuple[Bounded, Bounded]:
    """Return advantages and returns, `[N]`; `following` is what comes after each token, if known.

    Every product and sum of the recurrence rounds once, and gamma, lam and gamma lam do when they
    are brought into the arithmetic.
    """
    n = len(rewards)
    advantages, errors = np.zeros(n), np.zeros(n)
    unit = arithmetic.unit
    ahead: dict[int, tuple[float, float, float]] = {}
    for t in range(n - 1, -1, -1):
        if not valid[t]:
            continue
        last = sequence[t] not in ahead
        value, advantage, error = ahead.get(sequence[t], (0.0, 0.0, 0.0))
        ends = bool(flags["truncated"][t]) or last
        if ends and following is not None and (last or not np.isnan(following[t, 1])):
            value = following[t, 0] if last else following[t, 1]
        if flags["truncated"][t]:
            advantage, error = 0.0, 0.0
        if flags["terminated"][t]:
            value, advantage, error = 0.0, 0.0, 0.0
        terms = (rewards[t], gamma * value, -values[t], gamma * lam * advantage)
        made = terms[0] + terms[1] + terms[2] + terms[3]
        magnitude = sum(abs(term) for term in terms)
        # unspecified: what a discount of 0 leaves of infinity and NaN
        lost = math.isinf(error) or (gamma == 0 and not math.isfinite(value))
        lost = lost or (gamma * lam == 0 and not math.isfinite(advantage))
        rounding = 7 * unit * magnitude + arithmetic.smallest * (magnitude > 0)
        error = math.inf if lost else gamma * lam * error + rounding
        advantages[t], errors[t] = made, error if math.isfinite(made) or math.isinf(error) else 0.0
        ahead[sequence[t]] = (values[t], made, errors[t])
    made = Bounded(advantages, errors, arithmetic)
    return made, made + Bounded(np.where(valid, values, 0.0), 0.0, arithmetic)
