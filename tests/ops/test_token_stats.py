"""Statistics of tokens from logits: excluded tokens, rows by themselves."""

import math

import pytest
import torch

import fastrl

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("softcap", [None, 10.0])
def test_an_excluded_token_is_the_most_likely_only_among_excluded_ones(backend, softcap):
    logits = torch.full((3, 5), -math.inf)
    logits[1, 3], logits[2, 3] = 0.0, -1e4  # where a softcap has reached its end
    given = {"outputs": ("is_top1",), "logit_softcap": softcap, "backend": backend}
    stats = fastrl.token_stats(logits, torch.tensor([2, 2, 2]), **given)
    assert stats.is_top1.tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("excluded", [0, 3, 200])
def test_tokens_of_the_lowest_number_alone_are_equally_likely(backend, dtype, excluded):
    if backend == "cuda":
        pytest.skip("to which these are excluded, as its docstring says")
    row = torch.full((300,), torch.finfo(dtype).min, dtype=dtype)
    row[:excluded] = -math.inf
    row = row[None].requires_grad_()
    stats = fastrl.token_stats(row, torch.tensor([299]), backend=backend)
    (stats.logprobs + 0.1 * stats.entropy).sum().backward()
    count = 300 - excluded
    expected = torch.zeros(1, 300)
    expected[:, excluded:] = -1 / count
    expected[:, 299] += 1
    torch.testing.assert_close(stats.logprobs, torch.tensor([-math.log(count)]))
    torch.testing.assert_close(stats.entropy, torch.tensor([math.log(count)]))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(row.grad.float(), expected, atol=rounding / 8, rtol=rounding)


@pytest.mark.not_on("reference")  # eager torch promises no batch invariance
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [257, 50257])
def test_a_row_does_not_depend_on_other_rows(backend, vocabulary, dtype):
    logits = (3 * torch.randn(9, vocabulary)).to(dtype)
    token_ids = torch.randint(vocabulary, (9,))

    def outcome(rows):
        x = logits[rows].clone().requires_grad_()
        stats = fastrl.token_stats(x, token_ids[rows], backend=backend)
        (stats.logprobs + stats.entropy).sum().backward()
        return stats.logprobs.detach(), stats.entropy.detach(), x.grad

    alone = zip(*(outcome(slice(i, i + 1)) for i in range(9)), strict=True)
    assert all(map(torch.equal, outcome(slice(9)), map(torch.cat, alone)))
