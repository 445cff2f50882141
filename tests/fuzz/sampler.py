"""The sampler's most likely tokens: their log-probabilities, as tensors, and for the oracle."""

from math import inf, isfinite, log, nan

import numpy as np

from fastrl import TopKLogprobs

from .oracle.centering import Centering
from .oracle.rows import Rows
from .policy_data import PolicyInputs
from .rows_data import LogitRows
from .tokens import as_held, flat_tensor, laid_out
from .trial import Trial

#: How far log q is from log p.
APART = {"equal": 0.0, "near": 0.15, "bounds": 0.15, "far": 2.0, "own": 2.0, "tail": 1.0}


def sampler_of(
    trial: Trial, rows: LogitRows, oracle: Rows, inputs: PolicyInputs
) -> tuple[TopKLogprobs, Centering]:
    """Return the tokens as they are given, and their expected score in the active rows."""
    case, tokens, active, vocabulary = rows.case, rows.tokens, rows.active, rows.case.vocabulary
    random, weights = case.random("sampler"), weights_of(inputs)
    whole = vocabulary <= 130 and (case.sampler == "tail" or random.random() < 0.2)
    count = vocabulary if whole else int(random.integers(1, min(vocabulary, 6) + 1))
    known = np.where(np.isfinite(oracle.log_p), oracle.log_p, -5.0).clip(-1e4)
    log_p = random.standard_normal((tokens.total, vocabulary))
    log_p[active] = known
    log_q = log_p * (case.sampler not in ("own", "tail"))
    log_q = log_q + APART[case.sampler] * random.standard_normal(log_p.shape)
    if random.random() < 0.4:  # q is 0
        log_q[random.random(log_q.shape) < 0.15] = -inf
    log_q = log_q - np.logaddexp.reduce(log_q, 1, keepdims=True).clip(-1e6)
    by = log_q if random.random() < 0.7 else random.standard_normal(log_q.shape)
    by = log_p if case.sampler == "tail" else by
    ids = np.argsort(-by, 1)[:, :count]
    log_q = np.take_along_axis(log_q, ids, 1)
    if case.sampler == "bounds":
        bounds = [x for one in weights for x in (one["low"], one["high"]) if x > 0 and isfinite(x)]
        apart = random.choice([log(x) for x in bounds] or [0.0], log_q.shape)
        on_bounds = np.take_along_axis(log_p, ids, 1) - apart
        log_q = np.where(random.random(log_q.shape) < 0.6, on_bounds, log_q)
    total = np.logaddexp.reduce(log_q, 1, keepdims=True)
    log_q = as_held(np.minimum(log_q - np.maximum(total, 0.0), 0.0), case.sampler_dtype)
    absent = random.random(log_q.shape) < random.choice([0.0, 0.2])
    if case.sampler == "tail":  # the fewest that leave next to nothing to the policy
        others = np.cumsum(np.exp(np.take_along_axis(log_p, ids, 1))[:, ::-1], 1)[:, ::-1]
        absent |= others < 10.0 ** -random.integers(1, 6)
    absent |= (random.random(len(log_q)) < 0.15)[:, None]
    ids = np.where(absent, -1, ids)
    log_q = np.where(absent, random.choice([-inf, nan, 0.0], log_q.shape), log_q)
    if case.masked_values != "usual":  # they may be anything under the mask
        ids = np.where(tokens.valid[:, None], ids, random.choice([-9, 2**30, vocabulary]))
        log_q = np.where(tokens.valid[:, None], log_q, random.choice([nan, 5.0, inf]))
    shape = tokens.shape if random.random() < 0.6 else (tokens.total,)
    top = TopKLogprobs(
        laid_out(flat_tensor(case, ids, case.ids_dtype).view(*shape, count), case.token_layout),
        laid_out(
            flat_tensor(case, log_q, case.sampler_dtype).view(*shape, count), case.logits_layout
        ),
    )
    return top, Centering(oracle, ids[active], log_q[active], weights, trial.doubts)


def weights_of(inputs: PolicyInputs) -> list[dict]:
    """Return the corrections by which tokens of the sampler are weighed."""
    fields = inputs.fields
    if fields["surrogate"] == "cispo" and inputs.old is not None:  # by the bounded ratio
        clamp = fields["log_ratio_clamp"]
        ends = clamp if isinstance(clamp, tuple) else (-(clamp or inf), clamp or inf)
        low, high = np.clip(np.exp(ends), 1 - fields["clip_low"], 1 + fields["clip_high"])
        return [{"kind": "truncate", "estimator": "ratio", "low": low, "high": high}]
    return [one for one in fields["rollout_correction"] or () if one["level"] == "token"]
