"""Bad arguments: each error names the argument, what was expected and what came.

The rows are in bad_losses.txt and bad_calls.txt, and use the names of `NAMES`.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import ones, tensor, zeros

import fastrl
from fastrl import Objective
from fastrl.native import missing

TEXTS = ("bad_losses.txt", "bad_calls.txt")
KINDS = {"TypeError": TypeError, "ValueError": ValueError}


def squared(logprobs, old_logprobs, ref_logprobs, advantages):
    return (logprobs - advantages) ** 2


def loss(objective="grpo", **changes):
    inputs = {"logprobs": zeros(2, 3), "advantages": zeros(2), "mask": ones(2, 3), **changes}
    return fastrl.policy_loss(**inputs, objective=objective)


def packed_loss(objective="grpo", **changes):
    inputs = {"logprobs": zeros(5), "advantages": zeros(5), "mask": ones(5), **changes}
    return loss(objective, **inputs)


def gae(**changes):
    inputs = {"rewards": zeros(2, 3), **changes}
    shape = getattr(inputs["rewards"], "shape", (2, 3))
    return fastrl.gae(**{"values": zeros(shape), **inputs})


def weights(mask=None, aggregation="token-mean", **options):
    return fastrl.token_weights(
        ones(2, 3) if mask is None else mask, aggregation=aggregation, **options
    )


def metrics_of(**changes):
    return fastrl.reduce_metrics({**loss().metrics, **changes})


def completion(ids, sampled=(3,), **offsets):
    """The outputs of an engine that has sampled one token."""
    mask = SimpleNamespace(token_ids=ids, **offsets)
    return [SimpleNamespace(token_ids=sampled, sampling_mask=mask)]


def sampled(logprobs):
    """The outputs of an engine that has sampled one token."""
    return [SimpleNamespace(token_ids=[3], logprobs=logprobs)]


def top_k(ids=None, q=None):
    ids = tensor([[0, 1]] * 6) if ids is None else ids
    return fastrl.TopKLogprobs(ids, -ones(6, 2) if q is None else q)


def centered(top, objective=None, **changes):
    objective = objective or Objective.preset("reinforce", score_centering=True)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    inputs = {"advantages": zeros(2), "mask": ones(2, 3), "objective": objective, **changes}
    return fastrl.logits_policy_loss(zeros(2, 3, 5), ids, **inputs, rollout_top_k=top)


NAMES = {
    **{name: getattr(fastrl, name) for name in fastrl.__all__},
    "np": np,
    "torch": torch,
    "inf": torch.inf,
    "nan": torch.nan,
    "ones": ones,
    "tensor": tensor,
    "zeros": zeros,
    "two": tensor([0, 2, 5]),
    "meta": torch.zeros(2, 3, device="meta"),
    "logits": zeros(2, 3, 5),
    "ids": torch.zeros(2, 3, dtype=torch.int64),
    "head": (zeros(2, 3, 4), zeros(5, 4), torch.zeros(2, 3, dtype=torch.int64)),
    # rows of five logits that start two elements apart; not a leaf, as `inplace` requires
    "overlapping": (torch.randn(20, requires_grad=True) * 1).as_strided((2, 3, 5), (6, 2, 1)),
    "apart": Objective(kl_coef=0.1, kl_aggregation="token-sum", aggregation="seq-mean-token-mean"),
    "squared": squared,
    "preset": Objective.preset,
    "METRICS": loss().metrics,
    "metrics_of": metrics_of,
    "completion": completion,
    "sampled": sampled,
    "top_k": top_k,
    "centered": centered,
    # functions with good arguments
    "loss": loss,
    "packed_loss": packed_loss,
    "by_prompt": partial(loss, Objective(aggregation="prompt-mean")),
    "weights": weights,
    "value_loss": partial(
        fastrl.value_loss, values=zeros(2, 3), returns=zeros(2, 3), mask=ones(2, 3)
    ),
    "kl": partial(fastrl.kl_divergence, logprobs=ones(3), ref_logprobs=ones(3)),
    "groups": partial(fastrl.group_advantages, rewards=zeros(6)),
    "linear": partial(
        fastrl.linear_token_logprobs,
        hidden=zeros(2, 4),
        weight=zeros(7, 4),
        token_ids=tensor([0, 1]),
    ),
    "normalizer": partial(fastrl.global_normalizer, mask=ones(2, 3)),
    "gae": gae,
    "discounted_returns": partial(fastrl.discounted_returns, rewards=zeros(2, 3)),
}


def rows():
    texts = [Path(__file__).with_name(name).read_text() for name in TEXTS]
    found = "".join(texts).replace("\n    ", "  ").splitlines()
    return [one for row in found if row and not row.startswith("#") for one in each_of(row)]


def each_of(row):
    """A row with `a|b` is one for each of these names, which is `$` in the message."""
    several = re.search(r"\w+(?:\|\w+)+", row)
    if several is None:
        return [row]
    names = several[0].split("|")
    return [one for x in names for one in each_of(row.replace(several[0], x).replace("$", x))]


def refuses(call, error, message):
    """Check that the call raises `error` with the parts of `message` in this order."""
    pattern = ".*".join(re.escape(part) for part in message.split(" ... "))
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    text = str(caught.value)
    assert re.search(pattern, text), f"{text!r} does not say {message!r}"


@pytest.mark.parametrize("row", rows())
def test_it_is_refused(row):
    call, error, message = re.fullmatch(r"(.*?)  (TypeError|ValueError): (.*)", row).groups()
    if "backend='cpu'" in call and missing:
        pytest.skip(missing)
    refuses(lambda: eval(call, dict(NAMES)), KINDS[error], message)
