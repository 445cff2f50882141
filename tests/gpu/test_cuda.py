"""The CUDA operators: what the cases of the fuzzer rarely hit."""

import pytest
import torch

import fastrl
from fastrl import reference
from fastrl.contract import KL_GRADIENTS, LEVELS, SURROGATES, LossArguments
from fastrl.library import operators
from fastrl.ops._autograd import known_gradient
from tests.ops.linear.linear_head import batch, linear
from tests.ops.linear.tensor_cores import tensor_cores  # noqa: F401

pytestmark = [pytest.mark.kernels_alone, pytest.mark.not_on("triton")]  # which has others


@pytest.fixture(autouse=True)
def on_gpu(backend, monkeypatch):
    monkeypatch.setattr(known_gradient, "_on_gpu", lambda factor: True)  # scales by a kernel


def test_a_temperature_near_0_is_refused():
    logits, ids = torch.tensor([[-601.0, -600.0], [-1.0, 3.0]]), torch.zeros(2, dtype=torch.long)
    stats = fastrl.token_stats(
        logits, ids, outputs=("logprobs", "entropy"), temperature=1e-6, backend="cuda"
    )
    assert stats.logprobs.tolist() == [-1e6, -4e6]
    assert stats.entropy.tolist() == [0, 0]
    with pytest.raises(ValueError, match="temperature must be at least 1e-06 on backend 'cuda'"):
        fastrl.token_logprobs(logits, ids, temperature=9e-7, backend="cuda")
    with pytest.raises(ValueError, match="temperature must be at least 6e-05"):
        fastrl.token_logprobs(logits, ids, temperature=5e-5, logit_softcap=30.0, backend="cuda")
    hidden, weight = torch.randn(1, 2, 8), torch.randn(2, 8)
    head, kept = (hidden, weight, ids[None]), fastrl.KeptTokens.from_lists([[0, 1], []])
    given = {"temperature": 9e-7, "backend": "cuda"}
    for call in (
        lambda: fastrl.linear_policy_loss(*head, torch.ones(1), torch.ones(1, 2), **given),
        lambda: fastrl.linear_token_logprobs(*head, **given),
        lambda: fastrl.token_logprobs(logits, ids, kept=kept, **given),
    ):
        with pytest.raises(ValueError, match=r"^temperature must be at least"):
            call()


@pytest.mark.parametrize("bootstrap", [None, "sequence", "token"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_gae_of_many_chunks(rows, bootstrap):
    length = 13_000 // rows  # chunks are of 4,096 tokens
    inputs = {name: torch.randn(rows, length) for name in ("rewards", "values")}
    inputs["mask"] = torch.rand(rows, length) < 0.8
    inputs["mask"][1::2, -40:] = False  # whole runs of a thread, before the end of a sequence
    inputs["truncated"] = torch.rand(rows, length) < 0.001
    if bootstrap:
        shape = (rows,) if bootstrap == "sequence" else (rows, length)
        inputs["bootstrap_values"] = torch.randn(shape)
    result, again = (
        fastrl.gae(**inputs, gamma=1.0, lam=0.99, backend="cuda").advantages for _ in range(2)
    )
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = fastrl.gae(**double, gamma=1.0, lam=0.99, backend="reference").advantages
    # a step rounds by a unit of the value, which fades with lam: 8 deviations of their sum
    atol = 8 * 2**-24 * float(exact.abs().max()) / (1 - 0.99**2) ** 0.5
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=atol)
    assert torch.equal(result, again)


def test_a_nan_stays_in_its_sequence():
    rewards, values = torch.randn(2, 4, 300)
    clean = fastrl.gae(rewards, values, backend="cuda").advantages
    rewards[2, 100] = float("nan")
    bounds = torch.tensor([0, 300, 600, 900, 1200], dtype=torch.int32)
    flat = fastrl.gae(rewards.flatten(), values.flatten(), cu_seqlens=bounds, backend="cuda")
    clean[2, :101] = float("nan")
    for dirty in (fastrl.gae(rewards, values, backend="cuda"), flat):
        found = dirty.advantages.view(4, 300)
        assert torch.equal(found.nan_to_num(7), clean.nan_to_num(7))


@pytest.mark.parametrize(("groups", "size"), [(9, 4), (2, 140), (5, 1), (150, 2)])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_groups_by_id_have_the_bits_of_consecutive_ones(scale, groups, size):
    """By a single block, by a block for each group, and by many blocks."""
    rewards = torch.randn(groups, size) * 10.0 ** torch.randint(-2, 3, (groups, 1)) + 1e3
    rewards[1, 0] = float("nan")  # stays in its group, and is left out of the batch
    rewards = rewards.flatten()
    place = torch.randperm(groups * size)
    names = torch.randint(-(2**62), 2**62, (groups,))  # some of which share an entry
    ids = names.repeat_interleave(size)[place]
    given = {"scale": scale, "singleton": "zero"}
    consecutive = fastrl.group_advantages(rewards, group_size=size, **given, backend="cuda")
    found = fastrl.group_advantages(rewards[place], group_ids=ids, **given, backend="cuda")
    exact = fastrl.group_advantages(rewards.double(), group_size=size, **given, backend="reference")
    for one, other, want in zip(found, consecutive, exact, strict=True):
        assert torch.equal(one.nan_to_num(7), other[place].nan_to_num(7))
        torch.testing.assert_close(other.to(want), want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_rewards_beside_large_ones_keep_their_digits():
    rewards = torch.tensor([-1e3, 1e3, 1e-3, 2e-3])
    given = {"group_size": 4, "scale": "none"}
    found = fastrl.group_advantages(rewards, **given, backend="cuda").advantages.double()
    exact = fastrl.group_advantages(rewards.double(), **given, backend="reference").advantages
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def constants(shape, count, layout):
    """The constants of a loss: per token, per sequence, or some of each."""
    by_sequence = {"token": "", "sequence": "awkep", "mixed": "wp"}[layout]
    return [
        torch.randn(count) if letter in by_sequence else torch.randn(shape) for letter in "awkep"
    ]


def assert_equals_the_reference(logprobs, entropy, mask, loss, objective):
    found = operators("cuda").policy_loss_fwd(logprobs, entropy, mask, *loss, *objective)
    if SURROGATES[objective.surrogate] == "gmpo":
        objective = objective._replace(level=LEVELS.index("sequence"))
    expected = reference.policy_loss(logprobs, entropy, mask, loss, objective)
    for got, want in zip(found, expected, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5, equal_nan=True)
    return found


def objective(surrogate, level="token", **given):
    plain = fastrl.Objective().arguments
    given = {"kl_coef": 0.1, "kl_clamp": 10.0, "entropy_coef": 0.01, **given}
    return plain._replace(
        surrogate=SURROGATES.index(surrogate),
        level=LEVELS.index(level),
        coefficients=plain.coefficients._replace(**given),
    )


@pytest.mark.parametrize("layout", ["sequence", "mixed"])
@pytest.mark.parametrize("level", LEVELS)
def test_constants_per_sequence(level, layout):
    """Of empty sequences at the ends and within, and of one that begins in every quad."""
    bounds = torch.tensor([0, 0, 0, 1, 2, 3, 7, 7, 7, 40, 101, 186, 186], dtype=torch.int32)
    logprobs, old, ref, entropy = (-torch.rand(1, 186) for _ in range(4))
    loss = LossArguments(*constants((1, 186), 12, layout), old, ref, bounds)
    mask = torch.rand(1, 186) < 0.8
    for surrogate in ("ppo_clip", "gmpo", "reinforce"):
        assert_equals_the_reference(logprobs, entropy, mask, loss, objective(surrogate, level))


@pytest.mark.parametrize(("level", "shape"), [("token", (2, 1500)), ("sequence", (1, 9000))])
@pytest.mark.parametrize("offset", [0, 1])  # on and off the boundaries of vectors
def test_many_blocks_and_clusters(level, shape, offset):
    def tokens():
        return torch.randn(shape[0] * shape[1] + offset)[offset:].view(shape) / 9

    loss = LossArguments(*constants(shape, shape[0], "mixed"), tokens(), tokens(), None)
    given = (tokens(), tokens(), tokens() > -0.05, loss, objective("ppo_clip", level))
    for one, other in zip(*(assert_equals_the_reference(*given) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_ratios_and_advantages_at_their_ends(surrogate, level):
    inf = float("inf")
    ratios = torch.tensor([-inf, -300.0, -81.0, -1.0, 0.0, 1.0, 79.0, 88.0, 300.0, inf])
    log_ratio, advantages = (x.clone() for x in torch.broadcast_tensors(
        ratios[:, None], torch.tensor([-2.0, 0.0, 0.5])))  # fmt: skip
    old = torch.full_like(log_ratio, -1.0)
    rows, ones = advantages.numel(), torch.ones(advantages.numel(), 1)
    column = [x.reshape(rows, 1) for x in (old + log_ratio, old, advantages)]
    loss = LossArguments(column[2], ones, None, None, None, column[1], None, None)
    given = objective(surrogate, level, kl_coef=0.0, entropy_coef=0.0)
    assert_equals_the_reference(column[0], None, ones > 0, loss, given)


def test_the_slope_of_the_bias_corrected_k3_is_the_distance():
    """r (dk + k) = -r d for d = ref - logprob, without the terms that cancel."""
    distance, log_ratio = torch.meshgrid(
        torch.tensor([1e-3, 0.5, -2.0, 12.0]), torch.tensor([0.0, 3.0, -3.0]), indexing="ij"
    )
    logprobs = torch.full((4, 3), -1.0)
    old, ref, ones = logprobs - log_ratio, logprobs + distance, torch.ones(4, 3)
    loss = LossArguments(torch.zeros(4, 3), ones, None, None, None, old, ref, None)
    given = objective("ppo_clip", kl_coef=1.0, kl_clamp=float("inf"), entropy_coef=0.0)
    given = given._replace(kl_gradient=KL_GRADIENTS.index("bias-corrected"))
    slope = operators("cuda").policy_loss_fwd(logprobs, None, ones > 0, *loss, *given)[1]
    exact = -(logprobs.double() - old.double()).exp() * (ref.double() - logprobs.double())
    torch.testing.assert_close(slope.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_excluded_token_is_the_most_likely_only_among_excluded_ones(dtype, softcap):
    logits = torch.full((1, 3, 1000), -torch.inf, dtype=dtype)
    logits[0, 1, 7], logits[0, 2] = -1e4, torch.nan
    ids, outputs = torch.full((1, 3), 5), ("is_top1",)
    stats = fastrl.token_stats(logits, ids, outputs=outputs, logit_softcap=softcap, backend="cuda")
    assert stats.is_top1.tolist() == [[True, False, False]]


@pytest.mark.usefixtures("tensor_cores")
def test_nan_at_a_token_without_slope_reaches_the_gradients():
    """Of hidden states and head, where a chunk takes one kernel and products of 16 bits."""
    parameters, tokens, _ = batch(head={"bias": True, "lora": True})
    tokens["mask"][1] = True  # whose advantage is 0
    with torch.no_grad():
        parameters["hidden"][1, 2] = torch.nan
    del tokens["ref_logprobs"]
    result = linear(parameters, fastrl.linear_policy_loss, **tokens, backend="cuda")
    result.loss.backward()
    assert parameters["hidden"].grad.isnan().nonzero()[:, :2].unique(dim=0).tolist() == [[1, 2]]
    for name in ("weight", "bias", "lora_a", "lora_b"):
        assert parameters[name].grad.isnan().all(), name


def test_a_token_is_added_to_the_sum_of_the_others():
    """It may be far ahead; at a high temperature no logit in float16 counts as nothing."""
    logits = torch.randn(3, 5000)
    ids, lead = torch.tensor([0, 2500, 4999]), torch.tensor([20.0, 40.0, 60.0])
    logits[range(3), ids] = logits.amax(1) + lead
    below = logits.double() - logits.double().amax(1, keepdim=True)
    others = below.scatter(1, ids[:, None], -torch.inf).exp().sum(1)
    found = -fastrl.token_logprobs(logits, ids, backend="cuda")
    torch.testing.assert_close(found.double(), others.log1p(), rtol=1e-5, atol=0)
    flat = torch.randn(3, 16, dtype=torch.float16)  # two vectors
    found = fastrl.token_logprobs(flat, ids % 16, temperature=1e6, backend="cuda")
    torch.testing.assert_close(found, torch.full((3,), 1 / 16).log(), rtol=1e-5, atol=0)
