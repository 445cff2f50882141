"""Calls on tensors without values (compiled, recorded, fake), and refused transforms."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastrl
from fastrl import native

V, H = 11, 4


def surrogate(new, old, ref, advantages):
    return -(new - old).exp() * advantages


def from_hidden(hidden, batch, **options):
    arguments = (batch["weight"], batch["ids"], batch["advantages"], batch["mask"])
    old = batch["old"]
    return fastrl.linear_policy_loss(hidden, *arguments, old_logprobs=old, **options).loss


def from_logits(logits, batch, **options):
    arguments = (batch["ids"], batch["advantages"], batch["mask"])
    return fastrl.logits_policy_loss(logits, *arguments, old_logprobs=batch["old"], **options).loss


def from_logprobs(logprobs, batch, **options):
    arguments = (batch["advantages"], batch["mask"])
    return fastrl.policy_loss(logprobs, *arguments, old_logprobs=batch["old"], **options).loss


#: the width of the first argument, and the call
FORMS = {
    "token_stats": (V, lambda x, b: fastrl.token_stats(x, b["ids"], mask=b["mask"]).entropy),
    "linear_token_logprobs": (
        H,
        lambda x, b: fastrl.linear_token_logprobs(x, b["weight"], b["ids"], mask=b["mask"]),
    ),
    "policy_loss": (None, from_logprobs),
    "policy_loss, function": (None, lambda x, b: from_logprobs(x, b, objective=surrogate)),
    "logits_policy_loss": (V, from_logits),
    "logits_policy_loss, gspo": (V, lambda x, b: from_logits(x, b, objective="gspo")),
    "logits_policy_loss, function": (V, lambda x, b: from_logits(x, b, objective=surrogate)),
    "linear_policy_loss": (H, from_hidden),
    "linear_policy_loss, function": (H, lambda x, b: from_hidden(x, b, objective=surrogate)),
}
#: the functions that torch's own rules differentiate
PLAIN = {
    "value_loss": lambda x, b: fastrl.value_loss(x, b["old"], b["mask"]).loss,
    "masked_mean": lambda x, b: fastrl.masked_mean(x, b["mask"]),
    "kl_divergence": lambda x, b: fastrl.kl_divergence(x, b["old"]),
}
CALLS = {**FORMS, **{name: (None, call) for name, call in PLAIN.items()}}


def batch_of(length, *, fake=None):
    batch = {
        "ids": torch.randint(V, (2, length)),
        "mask": torch.rand(2, length) > 0.3,
        "advantages": torch.randn(2),
        "old": torch.randn(2, length) - 2,
        "weight": torch.randn(V, H),
    }
    return batch if fake is None else {k: fake.from_tensor(v) for k, v in batch.items()}


def first_of(width, length):
    return torch.randn(2, length) - 2 if width is None else torch.randn(2, length, width)


def gradient(call, x, batch):
    leaf = x.detach().requires_grad_()
    total = call(leaf * 1, batch).sum()
    return total, torch.autograd.grad(total, leaf)[0]


def test_a_function_as_objective_from_hidden_states_is_compiled_whole():
    if native.missing is not None:
        pytest.skip(native.missing)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(from_hidden, fullgraph=True, backend=counter)
    for length in range(3, 23):
        x, batch = first_of(H, length), batch_of(length)
        found, wanted = (
            gradient(lambda y, b, form=form: form(y, b, objective=surrogate), x, batch)
            for form in (compiled, from_hidden)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", CALLS)
def test_make_fx_records_the_call_and_its_gradient(name):
    width, call = CALLS[name]
    x, batch = first_of(width, 3), batch_of(3)
    graph = make_fx(lambda y, b: gradient(call, y, b))(x, batch)
    other, another = first_of(width, 3), batch_of(3)  # nothing of the first call is baked in
    expected = gradient(call, other, another)
    torch.testing.assert_close(graph(other, another), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_get_shapes(name):
    width, call = CALLS[name]
    with FakeTensorMode() as fake:
        loss, grad = gradient(call, fake.from_tensor(first_of(width, 3)), batch_of(3, fake=fake))
    assert loss.shape == ()
    assert grad.shape == first_of(width, 3).shape


@pytest.mark.parametrize("name", [n for n in CALLS if "function" not in n])
def test_symbolic_shapes(name):
    width, call = CALLS[name]
    x, batch = first_of(width, 5), batch_of(5)
    graph = make_fx(lambda y, b: call(y, b), tracing_mode="symbolic")(x, batch)
    other, another = first_of(width, 7), batch_of(7)
    torch.testing.assert_close(graph(other, another), call(other, another), rtol=1e-5, atol=1e-6)


#: calls that take a size of the trace as a number
SIZED = {
    "group_advantages": lambda x, b: fastrl.group_advantages(x, backend=b).advantages,
    "group_size": lambda x, b: (
        fastrl.group_advantages(x[:, 0], group_size=x.shape[0] // 2, backend=b).advantages
    ),
    "normalizer": lambda x, b: (
        fastrl.policy_loss(
            x, x[:, 0], torch.ones_like(x), normalizer=x.shape[0] * x.shape[1], backend=b
        ).loss
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_a_symbolic_size_is_a_number(backend, name):
    graph = make_fx(lambda x: SIZED[name](x, backend), tracing_mode="symbolic")(torch.randn(6, 5))
    for x in (torch.randn(4, 7), torch.randn(8, 2)):
        torch.testing.assert_close(graph(x), SIZED[name](x, backend))


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x])),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
}


@pytest.fixture
def default(backend):
    """Make a backend the default one."""
    before = fastrl.get_backend()
    fastrl.set_backend(backend)
    yield backend
    fastrl.set_backend(before)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FORMS)
def test_transforms_of_torch_func_are_refused(name, transform, default):
    """A vmap would silently lose the gradient, a jvp the tangent."""
    if (name, default) == ("token_stats", "reference"):
        pytest.skip("its gradient is made of torch's operators")
    width, call = FORMS[name]
    batch = batch_of(3)
    message = "cannot be transformed .* no rule for a gradient that a function computes itself"
    with pytest.raises(RuntimeError, match=message):
        TRANSFORMS[transform](lambda x: call(x, batch), first_of(width, 3))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_transforms_are_refused_in_compiled_code_too(name, whole):
    """A graph that calls a kernel within a transform would return a gradient of 0."""
    width, call = FORMS[name]
    batch = batch_of(3)
    torch._dynamo.reset()

    @torch.compile(fullgraph=whole, backend="aot_eager")
    def slope(x):
        return torch.func.grad(lambda y: call(y, batch).sum())(x)

    with pytest.raises(RuntimeError, match="cannot be transformed by torch"):
        slope(first_of(width, 3))


def test_statistics_of_the_reference_support_transforms():
    batch, x = batch_of(3), first_of(V, 3)

    def logprobs(x):
        return fastrl.token_logprobs(x, batch["ids"], backend="reference")

    leaf = x.clone().requires_grad_()
    logprobs(leaf).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: logprobs(x).sum())(x), leaf.grad)
    both = torch.vmap(logprobs)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(both, torch.stack([logprobs(x), logprobs(2 * x)]))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PLAIN)
def test_transforms_of_plain_torch_functions(name, transform):
    batch = batch_of(3)
    found = TRANSFORMS[transform](lambda x: PLAIN[name](x, batch), first_of(None, 3))
    assert all(part.isfinite().all() for part in (found if type(found) is tuple else (found,)))
