"""Losses, trainers and the sampler on a pretrained model: `make test-real` makes it and runs this.

FASTRL_REAL_MODEL is the folder of a causal LM with a chat template, a head without a bias, and
logits that nothing scales: SmolLM2-135M-Instruct.
"""

import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import fastrl
from fastrl import Objective, Teacher
from fastrl.integrations.transformers import last_hidden_states
from fastrl.train.config import GrpoConfig
from fastrl.train.loading import load
from fastrl.train.policy import completion_logprobs
from fastrl.train.prompts import encode
from fastrl.train.sampling import Sampler
from tests.calls.oracle.bounded import FLOAT32, Bounded
from tests.calls.oracle.functions import exp, stored
from tests.calls.oracle.head import ON_TILES, Entering, LinearHead
from tests.calls.oracle.rows import Head, Rows
from tests.integrations.packages import needed
from tests.integrations.trl.kinds import both
from tests.ops.ranks.gloo_ranks import on_ranks
from tests.train.packed import padded

FOLDER = os.environ.get("FASTRL_REAL_MODEL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="needs FASTRL_REAL_MODEL, a folder: make test-real"),
    pytest.mark.filterwarnings("ignore"),
]

CHAT = (
    ("What is 17 + 26?", "17 + 26 is 43, since 17 + 20 = 37 and 37 + 6 = 43."),
    ("Name a river.", "The Danube, which ends in the Black Sea. 🌊"),
)
TEMPERATURE = 0.7
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def pretrained():
    """The model in float32, and its tokenizer."""
    return load(FOLDER, torch.device("cpu"))


@pytest.fixture(scope="module")
def rows_of(pretrained):
    """A function of a dtype: hidden states [N, H], head [V, H] and the tokens that they predict."""
    model, tokenizer = pretrained

    def rows(dtype):
        own = copy.deepcopy(model).to(getattr(torch, dtype))
        states, tokens = [], []
        for question, answer in CHAT:
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            ids = torch.tensor([tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]])
            with torch.no_grad():
                states.append(last_hidden_states(own, input_ids=ids)[0, :-1])
            tokens.append(ids[0, 1:])
        return torch.cat(states), own.lm_head.weight.detach(), torch.cat(tokens)

    return {dtype: rows(dtype) for dtype in ("float32", "bfloat16")}.__getitem__


def exactly(x):
    return x.detach().double().numpy()


def oracle_of(states, weight, ids):
    """The float64 oracle of the head, and of its rows at the temperature."""
    entering = ON_TILES if weight.dtype == torch.bfloat16 else Entering()
    head = LinearHead(exactly(states), exactly(weight), None, None, FLOAT32, entering)
    logits, error = head.logits()
    at = Head(np.full(len(ids), TEMPERATURE))
    return head, Rows(logits, ids.numpy(), at, FLOAT32, error)


def check(found, expected, what):
    """Compare with an expected value whose own bound says something."""
    assert np.linalg.norm(expected.error) < 0.05 * np.linalg.norm(expected.value), what
    assert expected.covers(exactly(found)).all(), what


@BOTH
def test_log_probabilities_are_those_of_float64(rows_of, dtype):
    states, weight, ids = rows_of(dtype)
    _, oracle = oracle_of(states, weight, ids)
    found = fastrl.linear_token_logprobs(states, weight, ids, temperature=TEMPERATURE)
    check(found, oracle.logprobs, "of hidden states")
    logits = states @ weight.T
    at = Head(np.full(len(ids), TEMPERATURE))
    of_logits = Rows(exactly(logits), ids.numpy(), at, FLOAT32).logprobs
    check(fastrl.token_logprobs(logits, ids, temperature=TEMPERATURE), of_logits, "of logits")


@BOTH
def test_the_loss_and_its_gradients_are_those_of_float64(rows_of, dtype):
    """Advantages of 1, ratios near 1, and every fifth above the bound, which has no gradient."""
    states, weight, ids = rows_of(dtype)
    head, oracle = oracle_of(states, weight, ids)
    logprobs, n = oracle.logprobs, len(ids)
    log_ratio = torch.tensor([0.5, 0.05, -0.05, 0.1, -0.1]).repeat(n // 5 + 1)[:n]
    old = torch.from_numpy(logprobs.value).float() - log_ratio
    ratio = exp(logprobs - Bounded(exactly(old), 0.0, FLOAT32))
    clipped = log_ratio.numpy() == 0.5
    leaves = [x.clone().requires_grad_() for x in (states, weight)]
    one, objective = torch.ones(n), Objective(aggregation="token-sum", clip_low=0.2, clip_high=0.2)
    options = {"old_logprobs": old, "temperature": TEMPERATURE, "objective": objective}
    result = fastrl.linear_policy_loss(*leaves, ids, one, one, **options)
    result.loss.backward()
    chosen = [np.where(clipped, x, y) for x, y in ((1.2, ratio.value), (1e-7, ratio.error))]
    check(result.loss, -Bounded(*chosen, FLOAT32).sum(), "loss")
    slope = [np.where(clipped, 0.0, x) for x in (-ratio.value, ratio.error)]
    none = Bounded(np.zeros(n), np.zeros(n), FLOAT32)
    none = Bounded(np.zeros(n), np.zeros(n), FLOAT32)
    want = head.gradients(oracle.gradient(Bounded(*slope, FLOAT32), none, none))
    for name, leaf in zip(("hidden", "weight"), leaves, strict=True):
        check(leaf.grad, stored(want[name], dtype), name)


def test_a_teacher_that_is_the_student_has_no_divergence(rows_of):
    states, weight, ids = rows_of("float32")
    _, oracle = oracle_of(states, weight, ids)
    most = 4 * oracle.z_error.max() * TEMPERATURE  # of log p and log q, each of z and its sum
    for beta in (0.0, 0.5, 1.0):
        same = Teacher.from_logits(states @ weight.T, beta=beta)
        assert fastrl.linear_divergence(states, weight, same).abs().max() < most
        other = same._replace(temperature=1.3)
        assert fastrl.linear_divergence(states, weight, other).mean() > 1e-3


def of_part(states, weight, ids):
    """Log-probability and gradient of the hidden states on a rank that has a part of the head."""
    sizes = (20000, len(weight) - 20000)
    part = weight.split(sizes)[dist.get_rank()]
    return of_head(states, part, ids, vocab_group=dist.group.WORLD)


def of_head(states, weight, ids, **options):
    states = states.clone().requires_grad_()
    logprobs = fastrl.linear_token_logprobs(states, weight, ids, temperature=TEMPERATURE, **options)
    logprobs.sum().backward()
    return logprobs.detach(), states.grad


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_a_split_vocabulary_gives_the_same(rows_of):
    states, weight, ids = rows_of("float32")
    whole = of_head(states, weight, ids)
    for found in on_ranks(2, of_part, states, weight, ids):
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * float(other.abs().max()))


def test_kept_tokens_are_replayed(pretrained):
    model, tokenizer = pretrained
    config = GrpoConfig(top_p=0.9, max_new_tokens=24, attention="sdpa")
    prompts = encode([{"prompt": question} for question, _ in CHAT], tokenizer, config)
    rollout, _ = Sampler(model, tokenizer, config).sample(prompts, 3)
    mask = rollout.mask

    def off(logprobs):
        return float((logprobs - rollout.logprobs)[mask].abs().mean())

    assert off(completion_logprobs(model, rollout, torch.arange(len(mask)), config)) < 1e-5
    with torch.no_grad():
        full = padded(model, rollout)[0].log_softmax(-1)
    own = full.gather(-1, rollout.token_ids[..., None])[..., 0]
    sets = rollout.kept.token_ids.long().split(rollout.kept.counts().tolist())
    pairs = zip(full.flatten(0, 1), sets, strict=True)
    sums = torch.stack([row[tokens].logsumexp(0) for row, tokens in pairs]).view_as(own)
    assert off(own - sums) < 1e-5
    assert off(own) > 1e-2


def test_grpo_logs_the_same_with_fastrl(tmp_path):
    data = needed("datasets").Dataset.from_dict({"prompt": [question for question, _ in CHAT]})
    own = {"train_dataset": data, "processing_class": None, "output_dir": tmp_path}
    shape = {"max_steps": 2, "num_generations": 4, "max_completion_length": 16}
    policy = {"num_iterations": 2, "beta": 0.04, "learning_rate": 1e-3}
    handle, _ = both(FOLDER, model_init_kwargs={"dtype": "float32"}, **own, **shape, **policy)
    assert handle.fused
    assert handle.packed
