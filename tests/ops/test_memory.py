"""Peak memory beyond inputs and gradients: a few percent from logits, one chunk from hidden."""

import pytest

from fastrl import native
from tests.support.measured import measured, needs_measuring

pytestmark = needs_measuring
MEGA = 2**20

FROM_LOGITS = """
rows, vocabulary, dtype, entropy_coef, layout = case
dtype = getattr(torch, dtype)
objective = fastrl.Objective.preset("grpo", kl_coef=0.1, entropy_coef=entropy_coef)

def step(rows, vocabulary):
    wide = torch.randn(rows // 8 + 1, 8, vocabulary, dtype=dtype)
    logits = wide[:-1] if layout == "slice" else wide[:-1].clone()
    del wide
    logits.requires_grad_()
    per_token = torch.full(logits.shape[:2], -5.0)
    token_ids = torch.randint(vocabulary, per_token.shape)
    before = reset_peak()
    loss = fastrl.logits_policy_loss(
        logits, token_ids, per_token[:, 0], torch.ones_like(per_token),
        old_logprobs=per_token, ref_logprobs=per_token, objective=objective, backend="cpu",
    ).loss
    loss.backward()
    return status("VmHWM") - before - logits.grad.nbytes, logits.nbytes

step(16, 64)
print(json.dumps(step(rows, vocabulary)))
"""

FROM_HIDDEN = """
rows, width, vocabulary, dtype, objective = case
dtype = getattr(torch, dtype)

def step(rows, vocabulary):
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    per_token = torch.full((rows,), -5.0)
    token_ids = torch.randint(vocabulary, (rows,))
    before = reset_peak()
    fastrl.linear_policy_loss(
        hidden, weight, token_ids, per_token, torch.ones_like(per_token), old_logprobs=per_token,
        objective=objective, backend="cpu", cu_seqlens=torch.tensor([0, rows // 2, rows]),
    ).loss.backward()
    return status("VmHWM") - before

step(16, 64)
print(json.dumps(step(rows, vocabulary)))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("layout", ["contiguous", "slice"])
def test_from_logits_beyond_logits_and_gradient_at_most_two_percent(dtype, entropy_coef, layout):
    rows = 512 if dtype == "float32" else 1024
    beyond, logits = measured(FROM_LOGITS, [rows, 65536, dtype, entropy_coef, layout])
    assert beyond <= 0.02 * logits, f"{beyond} bytes beside {logits} bytes of logits"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_from_hidden_the_peak_is_flat_in_the_number_of_rows(dtype, objective):
    width, vocabulary, few, many = 64, 65536, 2048, 16384
    short = measured(FROM_HIDDEN, [few, width, vocabulary, dtype, objective])
    long = measured(FROM_HIDDEN, [many, width, vocabulary, dtype, objective])
    size = 4 if dtype == "float32" else 2
    explained = (many - few) * (width * size + 64)  # the gradient of hidden, per-token tensors
    assert long - short <= explained + 64 * MEGA, (short, long)
    parameters = vocabulary * width * (4 + size)  # summed in float32, returned in its dtype
    assert short <= 256 * MEGA + parameters + few * width * 8, short


PARTIAL_SUMS = """
def step(rows, columns, terms):
    a, b = torch.ones(rows, terms), torch.ones(terms, columns, dtype=torch.bfloat16)
    out = torch.zeros(rows, columns)
    before = reset_peak()
    torch.ops.fastrl.mixed_matmul_(out, a, b, False)
    assert bool((out == terms).all())
    return status("VmHWM") - before

step(16, 16, 16)
print(json.dumps(step(*case)))
"""


@pytest.mark.skipif(not native.has_matrix_tiles(), reason="no AMX tiles here")
def test_a_product_with_long_sums_takes_at_most_32_mega_of_partial_sums():
    assert measured(PARTIAL_SUMS, [1536, 5000, 16384]) <= 40 * MEGA
