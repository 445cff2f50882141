"""The expected results of all functions, in float64 and NumPy, with bounds on rounding errors.

- `bounded`: `Bounded`, a value with the error that float32 (or `of_results(dtypes)`) may make;
  `Decision`, what rounding may flip; `functions`: exp, clamp, mean and such of them.
- `tokens`: the valid tokens of a loss (`Tokens`) and their weights (`token_weights`,
  `term_weights`).
- `policy`: `policy_loss`, with the terms of `terms` and the corrections and masks of `masks`;
  `fields_of` gives the fields of an `Objective`; `centering`: the sampler's expected score.
- `divergence`: `Divergence`, of the rows of a student from those of a teacher.
- `rows`: `Rows`, statistics and gradient of rows of logits; `head`: `LinearHead`, the logits of
  hidden states and a weight, and what their gradient makes of these.
- `advantages`: `group_advantages`, `gae`; `values`: value loss, KL divergence, means, whitening.

Inputs are float64 arrays of the numbers that the tensors hold, `[N]`, of the valid tokens only.
`result.covers(x)` says whether an array agrees with a result.
"""
