"""Calls on tensors without values (compiled, recorded, fake), and refused transforms."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fastrl
from fastrl import native
from tests.calls.entries import ENTRIES, sequences_of

LOSSES = ("policy_loss", "logits_policy_loss", "linear_policy_loss")
KERNELS = ["token_stats outputs", "linear_token_logprobs chunk_tokens"]
KERNELS += [f"{name} {objective}" for name in LOSSES for objective in ("ppo", "gspo", "function")]
KERNELS += [f"{name}_policy_loss centered by weights" for name in ("logits", "linear")]
#: the functions that torch's own rules differentiate
PLAIN = ["value_loss mse", "masked_mean", "kl_divergence k3"]


def drawn(name, length=3):
    """An entry point, its leaf and its other inputs."""
    entry = ENTRIES[name]
    inputs = entry.draw(2, length, torch.float32)
    return entry, inputs.pop(entry.leaves[0]), inputs


def reverse(x, inputs):
    """Others of the same shapes."""
    return x.flip(0), {name: y.flip(0) for name, y in inputs.items()}


def total(entry, x, inputs, backend="auto"):
    results = entry.call(backend, {**inputs, entry.leaves[0]: x}).values()
    return sum(y.sum() for y in results if y.requires_grad or y.is_floating_point())


def gradient(entry, x, inputs):
    leaf = x.detach().requires_grad_()
    found = total(entry, leaf * 1, inputs)
    return found, torch.autograd.grad(found, leaf)[0]


def test_a_function_as_objective_from_hidden_states_is_compiled_whole():
    if native.missing is not None:
        pytest.skip(native.missing)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    options = ENTRIES["linear_policy_loss function"].options

    def loss(hidden, inputs):
        return fastrl.linear_policy_loss(hidden, **inputs, objective=options["objective"]).loss

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for length in range(3, 23):
        _, x, inputs = drawn("linear_policy_loss function", length)
        found = []
        for form in (compiled, loss):
            leaf = x.detach().requires_grad_()
            form(leaf, inputs).backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def kinds_of_teacher():
    """A teacher of each kind, of five rows and seven columns."""
    hidden, weight, bias, x = (torch.randn(shape) for shape in ((5, 4), (7, 4), (7,), (5, 7)))
    lora, Teacher = (torch.randn(2, 4), torch.randn(7, 2), 0.5), fastrl.Teacher
    values, ids = x.log_softmax(-1).topk(3)
    for more in ({}, {"bias": bias}, {"lora": lora}, {"bias": bias, "lora": lora}):
        yield Teacher.from_hidden(hidden, weight, **more)
    yield Teacher.from_logits(x)
    for has_tail in (True, False):
        yield Teacher.from_top_k(ids, values, has_tail=has_tail)


def test_each_kind_of_teacher_is_compiled_once():
    if native.missing is not None:
        pytest.skip(native.missing)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fastrl.token_divergence, fullgraph=True, backend=counter)
    for _ in range(3):
        for teacher in kinds_of_teacher():
            x = torch.randn(5, 7)
            expected = fastrl.token_divergence(x, teacher)
            torch.testing.assert_close(compiled(x, teacher), expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 7 < torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("name", KERNELS + PLAIN)
def test_make_fx_records_the_call_and_its_gradient(name):
    entry, x, inputs = drawn(name)
    graph = make_fx(lambda y, given: gradient(entry, y, given))(x, inputs)
    other, another = reverse(x, inputs)  # nothing of the first call is baked in
    expected = gradient(entry, other, another)
    torch.testing.assert_close(graph(other, another), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS + PLAIN)
def test_fake_tensors_get_shapes(name):
    entry, x, inputs = drawn(name)
    with FakeTensorMode() as fake:
        inputs = {name: fake.from_tensor(y) for name, y in inputs.items()}
        loss, grad = gradient(entry, fake.from_tensor(x), inputs)
    assert loss.shape == ()
    assert grad.shape == x.shape


@pytest.mark.parametrize("name", [name for name in KERNELS + PLAIN if "function" not in name])
def test_symbolic_shapes(name):
    entry, x, inputs = drawn(name, 7)
    call = make_fx(lambda y, given: total(entry, y, given), tracing_mode="symbolic")
    graph = call(x[:, :5], sequences_of(inputs, slice(None), 5))
    other, another = reverse(x, inputs)
    expected = total(entry, other, another)
    torch.testing.assert_close(graph(other, another), expected, rtol=1e-5, atol=1e-5)


#: calls that take a size of the trace as a number
SIZED = {
    "group_advantages": lambda x, b: fastrl.group_advantages(x, backend=b).advantages,
    "masked_advantages": lambda x, b: (
        fastrl.group_advantages(x, mask=x > -1, convention="trl", backend=b).advantages
    ),
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
@pytest.mark.parametrize("name", KERNELS)
def test_transforms_of_torch_func_are_refused(name, transform, default):
    """A vmap would silently lose the gradient, a jvp the tangent."""
    if (name, default) == (KERNELS[0], "reference"):
        pytest.skip("torch.func may transform it")
    entry, x, inputs = drawn(name)
    message = "cannot be transformed .* no rule for a gradient that a function computes itself"
    with pytest.raises(RuntimeError, match=message):
        TRANSFORMS[transform](lambda y: total(entry, y, inputs, default), x)


@pytest.mark.parametrize("name", [name for name in KERNELS if "function" not in name])
def test_a_tangent_is_refused(name, default):
    """Also one of a tensor that needs no gradient."""
    if (name, default) == (KERNELS[0], "reference"):
        pytest.skip("it has a tangent")
    entry, x, inputs = drawn(name)
    x = x.detach()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        total(entry, forward_ad.make_dual(x, x.clone()), inputs, default)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_transforms_are_refused_in_compiled_code_too(name, whole):
    """A graph that calls a kernel within a transform would return a gradient of 0."""
    if name == KERNELS[0] and native.missing is not None:
        pytest.skip("the reference may be transformed")
    entry, x, inputs = drawn(name)
    given = entry.arguments(inputs)
    torch._dynamo.reset()

    @torch.compile(fullgraph=whole, backend="aot_eager")
    def slope(x):
        call = entry.function
        return torch.func.grad(lambda y: call(**{**given, entry.leaves[0]: y})[0].sum())(x)

    with pytest.raises(RuntimeError, match="cannot be transformed by torch"):
        slope(x)


OF_SUM = {
    "grad": torch.func.grad,
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(f))(torch.stack([x, 2 * x])),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "hessian": torch.func.hessian,
    "grad of grad": lambda f: torch.func.jacrev(torch.func.grad(f)),
    "compiled grad": lambda f: torch.compile(torch.func.grad(f), backend="aot_eager"),
}


@pytest.mark.parametrize("transform", OF_SUM)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_statistics_of_the_reference_support_transforms(transform, softcap):
    x, ids = torch.randn(2, 3, 11, dtype=torch.float64), torch.randint(11, (2, 3))
    weights = torch.randn(3, 2, 3, dtype=torch.float64)
    temperature = torch.rand(2, 3) + 0.5

    def ours(x):
        stats = fastrl.token_stats(
            x,
            ids,
            outputs=("logprobs", "entropy", "logsumexp"),
            temperature=temperature,
            logit_softcap=softcap,
            backend="reference",
        )
        return (torch.stack(stats[:3]) * weights).sum()

    def torchs(x):
        z = (x if softcap is None else softcap * (x / softcap).tanh()) / temperature[..., None]
        logs = z.log_softmax(-1)
        token, entropy = logs.gather(-1, ids[..., None])[..., 0], -(logs.exp() * logs).sum(-1)
        return (torch.stack([token, entropy, z.logsumexp(-1)]) * weights).sum()

    torch._dynamo.reset()
    came, wanted = (OF_SUM[transform](f)(x) for f in (ours, torchs))
    torch.testing.assert_close(came, wanted, rtol=1e-6, atol=1e-6)
    both = torch.vmap(ours)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(both, torch.stack([ours(x), ours(2 * x)]))


def test_second_derivatives_of_the_reference():
    ids = torch.randint(7, (2, 3))

    def stats(x):
        outputs = ("logprobs", "entropy", "logsumexp")
        return fastrl.token_stats(x, ids, outputs=outputs, backend="reference")[:3]

    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(stats, x, check_fwd_over_rev=True)
    assert torch.autograd.gradcheck(stats, x, check_forward_ad=True)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PLAIN)
def test_transforms_of_plain_torch_functions(name, transform):
    entry, x, inputs = drawn(name)
    found = TRANSFORMS[transform](lambda y: total(entry, y, inputs), x)
    assert all(part.isfinite().all() for part in (found if type(found) is tuple else (found,)))
