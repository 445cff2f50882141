"""torchao's AdamW in the training loops: what is kept where it would be rounded away."""

import pytest
import torch

pytest.importorskip("torchao")

from fastrl.train.torchao_optimizers import EightBitAdamW, StochasticAdamW


@pytest.mark.parametrize("kind", [EightBitAdamW, StochasticAdamW])
def test_the_second_moment_decays(kind):
    """In bfloat16 it would not: 0.999 of a number rounds to that number."""
    weight = torch.nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
    optimizer = kind([weight], lr=0.1, bf16_stochastic_round=True)
    for step in range(201):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    torch.testing.assert_close(moment, torch.full((128,), 1e-3 * 0.999**200))


def test_eight_bits_do_not_move_the_rows_of_rare_tokens_more_than_adamw():
    """Rows of one block: gradients of every step, and a thousandth of them in every tenth."""
    moved = []
    for kind in (EightBitAdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer = kind([weight], lr=1e-4, weight_decay=0.0)
        generator = torch.Generator().manual_seed(0)
        for step in range(50):
            weight.grad = torch.randn(64, 128, generator=generator) * 1e-2
            weight.grad[1::2] *= 0 if step % 10 else 1e-3
            optimizer.step()
            if step == 25:
                saved = optimizer.state_dict()
                optimizer = kind([weight], lr=1e-4, weight_decay=0.0)
                optimizer.load_state_dict(saved)
        moved.append(weight.detach().abs())
    assert 0.5 < moved[0][::2].max() / moved[1][::2].max() < 2
    # hundreds where second moments round to 0
    assert 0.1 < moved[0][1::2].max() / moved[1][1::2].max() < 2
