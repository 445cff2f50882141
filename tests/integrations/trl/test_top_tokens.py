"""The teacher of a few tokens that fastrl makes for `distillation_mode="topk_logits"`."""

import pytest
import torch

from tests.integrations.packages import needed
from tests.integrations.trl.runs import make_model

needed("trl")
from fastrl.integrations.transformers import lm_head  # noqa: E402
from fastrl.integrations.transformers.head import LmHead  # noqa: E402
from fastrl.integrations.trl import top_tokens  # noqa: E402
from fastrl.integrations.trl.two_models import Side  # noqa: E402

HEADS = {
    "plain": ("LlamaConfig", {}),
    "a softcap": ("Gemma2Config", {"final_logit_softcapping": 3.0}),
    "a factor on the logits": ("CohereConfig", {"logit_scale": 0.3}),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_likeliest_tokens(name, chunk, monkeypatch):
    monkeypatch.setattr(top_tokens, "_CHUNK", chunk)
    kind, changes = HEADS[name]
    ids, sides, logits = torch.tensor([[5, 6, 7, 8]]), [], []
    for model in (make_model(kind, **changes), make_model(kind, **{**changes, "hidden_size": 32})):
        sides.append(Side(model.base_model(ids).last_hidden_state, lm_head(model)))
        logits.append(model(ids).logits.detach() / 0.7)
    mask = torch.tensor([[1, 0, 1, 1]])
    given = {"beta": 0.5, "temperature": 0.7, "has_tail": False}
    teacher = top_tokens.top_k_teacher(*sides, mask, 3, **given)
    expected = logits[0].topk(3).indices
    of_teacher = logits[1].log_softmax(-1).gather(-1, expected)
    assert (teacher.token_ids[mask == 1] == expected[mask == 1]).all()
    torch.testing.assert_close(teacher.logprobs[mask == 1], of_teacher[mask == 1])
    assert (teacher.logprobs[mask == 0] == 0).all()
    assert (teacher.beta, teacher.has_tail) == (0.5, False)


def test_likeliest_tokens_of_an_adapted_head():
    hidden, weight, bias = torch.randn(1, 2, 4), torch.randn(9, 4), torch.randn(9)
    a, b = torch.randn(2, 4), torch.randn(9, 2)
    side = Side(hidden, LmHead(weight, bias, (a, b, 0.5), 1.0, None))
    given = {"beta": 1.0, "temperature": 1.0, "has_tail": True}
    teacher = top_tokens.top_k_teacher(side, side, torch.ones(1, 2), 4, **given)
    logprobs = (hidden @ (weight + 0.5 * b @ a).t() + bias).log_softmax(-1)
    torch.testing.assert_close(teacher.logprobs, logprobs.topk(4).values)
