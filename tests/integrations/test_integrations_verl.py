"""verl on fastrl equals its formulas and, where it is installed, verl."""

import sys
import types

import pytest
import torch

import fastrl
from fastrl import native
from fastrl.integrations import verl as ours
from fastrl.integrations.verl import policy_losses as verl_policy_losses
from fastrl.integrations.verl.functions import calculate_sum_pi_squared_from_logits
from tests.support import verl_formulas
from tests.support.importable import importable
from tests.support.verl_cases import (
    FIELDS,
    GLOBAL,
    LOCAL,
    MODES,
    POLICY_LOSSES,
    TOKENS,
    batch,
    close,
    implementations,
    policy_loss,
    same_policy_loss,
    transcribed,
    value_and_gradient,
)


@pytest.fixture(params=implementations(), ids=lambda found: found.name)
def theirs(request):
    """A namespace with verl's functions and `config`: our transcription, or the package."""
    return request.param


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_token_functions(theirs, shape):
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(*shape, 50), torch.randint(50, shape)
    functions = (
        lambda n: lambda x: n.logprobs_from_logits(x, labels),
        lambda n: n.entropy_from_logits,
    )
    for function in functions:
        a, b = (value_and_gradient(function(n), logits) for n in (ours, theirs))
        assert a[0].shape == shape
        close(a[0], b[0])
        close(a[1], b[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_overwrite_no_logits_that_others_have_saved(dtype):
    leaf, labels = (3 * torch.randn(4, 11)).to(dtype), torch.arange(4)

    def both(functions, x):
        logits = x * 1
        entropy = functions.entropy_from_logits(logits)
        return entropy + functions.logprobs_from_logits(logits, labels)

    (found, a, _), (expected, b, _) = (
        value_and_gradient(lambda y, n=n: both(n, y), x)
        for n, x in ((ours, leaf), (verl_formulas, leaf.double()))
    )
    close(found, expected)
    near = 1e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(a, b, rtol=near, atol=near)


def test_log_probabilities_overwrite_the_logits_where_verl_does(monkeypatch):
    flag = types.SimpleNamespace(FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE=True)
    monkeypatch.setitem(sys.modules, "verl.utils.torch_functional", flag)
    leaf = torch.randn(4, 11, requires_grad=True)
    logits = leaf * 1.0
    ours.logprobs_from_logits(logits, torch.arange(4)).sum().backward()
    if fastrl.get_backend() == "auto" and native.missing is None:
        close(logits.detach(), leaf.grad)  # the gradient has overwritten the logits
    logits = leaf * 1.0
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")  # verl asks at each call
    ours.logprobs_from_logits(logits, torch.arange(4)).sum().backward()
    close(logits.detach(), leaf.detach())
    monkeypatch.delenv("VERL_DISABLE_FLASH_ATTN_CE")
    logits = leaf.detach().clone().requires_grad_()  # a leaf keeps its values
    ours.logprobs_from_logits(logits, torch.arange(4)).sum().backward()
    close(logits.detach(), leaf.detach())


def test_chunked_entropy():
    logits = torch.randn(5, 7)
    chunked = ours.entropy_from_logits_with_chunking(logits, chunk_size=2)
    close(chunked, ours.entropy_from_logits(logits))


@pytest.mark.parametrize("name", ["entropy_from_logits", "logprobs_from_logits"])
def test_token_functions_compile_as_in_verls_engines(name):
    labels = (torch.arange(9),) if name == "logprobs_from_logits" else ()
    function = getattr(ours, name)
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (5, 7, 9):
        logits, cut = torch.randn(rows, 33), [x[:rows] for x in labels]
        a, b = (
            value_and_gradient(lambda x, f=f, c=cut: f(x * 1.0, *c), logits)
            for f in (compiled, function)
        )
        close(a[0], b[0])
        close(a[1], b[1])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae(theirs, gamma, lam):
    data = batch()
    arguments = (data.rewards, data.values, data.mask.float(), gamma, lam)
    a, b = (n.compute_gae_advantage_return(*arguments) for n in (ours, theirs))
    close(a[0], b[0], data.mask)
    close(a[1], b[1], data.mask)
    assert a[0][~data.mask].abs().max() == 0


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
@pytest.mark.parametrize("name", ["outcome", "vectorized_outcome"])
def test_group_advantages_of_unequal_groups(theirs, by_std, epsilon, name):
    numpy = pytest.importorskip("numpy")
    data = batch(B=9)
    index = numpy.array(["b", "a", "b", "alone", "a", "c", "a", "c", "a"], dtype=object)
    arguments = (data.rewards, data.mask.float(), index, epsilon, by_std)
    function = f"compute_grpo_{name}_advantage"
    a, b = (getattr(n, function)(*arguments) for n in (ours, theirs))
    close(a[0], b[0])
    close(a[1], b[1])


def test_a_group_of_equal_rewards_gives_exactly_zero():
    rewards = torch.full((3, 1), 0.1)  # where float32 sums give 7e-3 in verl
    advantages, _ = ours.compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), [1, 1, 1])
    assert advantages.abs().max() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
def test_aggregation(theirs, mode, info):
    data = batch()
    a, b = (
        value_and_gradient(
            lambda x, n=n: n.agg_loss(x, data.mask.float(), mode, **info), data.values
        )
        for n in (ours, theirs)
    )
    close(a[0], b[0])
    close(a[1], b[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
def test_value_loss(theirs, mode, info):
    data = batch()
    old, returns = data.values + torch.randn(6, 9), data.rewards

    def loss(n):
        return lambda x: n.compute_value_loss(x, returns, old, data.mask, 0.5, mode, **info)

    a, b = (value_and_gradient(loss(n), data.values) for n in (ours, theirs))
    close(a[0], b[0])
    close(a[1], b[1])
    close(a[2][0], b[2][0])


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_kl_penalty(theirs, kind, plus):
    data = batch(spread=1.5)
    data.log_prob[0, :4] = data.old[0, :4] + torch.tensor([100.0, -90.0, 9.0, -2.6])
    a, b = (
        value_and_gradient(lambda x, n=n: n.kl_penalty(x, data.old, kind + plus), data.log_prob)
        for n in (ours, theirs)
    )
    close(a[0], b[0])
    close(a[1], b[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_the_sum_of_squared_probabilities(dtype, shape):
    torch.manual_seed(0)
    logits = (3 * torch.randn(*shape, 17)).to(dtype).requires_grad_()
    logits.data[..., 2] = -torch.inf
    before = logits.detach().clone()
    found = calculate_sum_pi_squared_from_logits(logits)
    assert (found.shape, found.dtype, found.requires_grad) == (shape, torch.float32, False)
    close(found, logits.detach().double().softmax(-1).square().sum(-1))
    assert torch.equal(logits, before)
    tokens = importable(TOKENS)
    if tokens and dtype == torch.float32:
        close(found, tokens.calculate_sum_pi_squared_from_logits(before))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [LOCAL, GLOBAL], ids=["local", "global"])
def test_policy_losses(theirs, name, mode, info):
    same_policy_loss(name, theirs, batch(), mode, info)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_with_rollout_weights(theirs, name):
    data = batch(seed=1)
    data.weights[0, 0] = 0.0
    same_policy_loss(name, theirs, data, "token-mean", LOCAL, data.weights)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo", "cispo"])
def test_policy_losses_far_from_the_old_policy(theirs, name):
    data = batch(seed=2, spread=2.0)
    data.log_prob[0] = data.old[0] + 15.0  # above gspo's bound of 10
    data.log_prob[2] = data.old[2] - 25.0  # below the bound of -20
    data.log_prob[3, 0] = data.old[3, 0] + 25.0
    data.advantages[0] = -data.advantages[0].abs()
    same_policy_loss(name, theirs, data, "token-mean", LOCAL)


@pytest.mark.parametrize("name", ["vanilla", "cispo"])
def test_lower_bounds_below_zero(theirs, name):
    same_policy_loss(name, theirs, batch(), "token-mean", LOCAL, clip_ratio_low=10.0)


def test_advantages_of_zero_in_the_geometric_mean(theirs):
    data = batch()
    data.advantages[:, ::2] = 0.0
    same_policy_loss("geo_mean", theirs, data, "token-mean", LOCAL)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_tokens_are_inert(name):
    data, poisoned = batch(), batch()
    for field in ("old", "log_prob", "advantages", "weights"):
        getattr(poisoned, field)[~poisoned.mask] = float("nan")
    a, b = (
        policy_loss(
            verl_policy_losses, name, d, "token-mean", LOCAL, d.weights, **FIELDS.get(name, {})
        )
        for d in (data, poisoned)
    )
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert a[2] == b[2]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_mask_gives_zero(name):
    data = batch()
    data.mask[:] = False
    loss, gradient, metrics = policy_loss(
        verl_policy_losses, name, data, "token-mean", LOCAL, **FIELDS.get(name, {})
    )
    assert loss == 0
    assert gradient.abs().max() == 0
    assert set(metrics.values()) <= {0.0}


def test_the_loss_may_be_changed_in_place():
    data = batch()
    log_prob = data.log_prob.clone().requires_grad_()
    config = transcribed(global_batch_info=LOCAL)
    loss, _ = verl_policy_losses.vanilla(
        data.old, log_prob, data.advantages, data.mask, config=config
    )
    loss -= 0.1 * (log_prob * 2).sum()  # as verl's ppo_loss adds its entropy
    loss.backward()
    assert log_prob.grad.abs().sum() > 0


REFUSED = [
    ("logits must be a plain .*got a nested", "logprobs_from_logits", "nested logits"),
    ("loss_agg_mode must be one of .*got 'mean'", "agg_loss", "mode"),
    ("batch_num_tokens is needed .* if dp_size > 1", "agg_loss", "token-mean on two ranks"),
    ("global_batch_size is needed .* if dp_size > 1", "agg_loss", "seq-mean on two ranks"),
    ("kl_penalty must be one of .*got 'full'", "kl_penalty", "full"),
    ("config must be verl's ActorConfig, got None", "vanilla", "no config"),
    ("dual_clip must be above 1, got 0.5", "vanilla", "dual clip"),
    ("lam must be finite and >= 0 and <= 1, got 1.5", "compute_gae_advantage_return", "lam"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("message", "function", "case"), REFUSED, ids=[c for *_, c in REFUSED])
def test_unsupported_arguments_are_refused_by_name(message, function, case):
    x = torch.ones(2, 3)
    arguments = {
        "nested logits": (torch.nested.nested_tensor([x, x]), x),
        "mode": (x, x, "mean"),
        "token-mean on two ranks": (x, x, "token-mean", 2),
        "seq-mean on two ranks": (x, x, "seq-mean-token-mean", 2),
        "full": (x, x, "full"),
        "no config": (x, x, x, x),
        "dual clip": (
            *(x, x, x, x, "token-mean"),
            transcribed(clip_ratio_c=0.5, global_batch_info=LOCAL),
        ),
        "lam": (x, x, x, 1.0, 1.5),
    }[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        getattr(verl_policy_losses if function == "vanilla" else ours, function)(*arguments)
