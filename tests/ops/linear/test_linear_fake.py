"""The linear forms on tensors without memory: shapes, strides and dtypes of the GPU's branches.

On the meta device every torch operator checks what its CUDA kernel would be given; where torch was
built with CUDA, the same on fake CUDA tensors, which choose the CUDA overloads.
"""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl import Objective
from fastrl.contract import LossArguments
from fastrl.ops._arguments import (
    ALL_TOKENS,
    NO_SAMPLER,
    NO_SOURCE,
    NO_TEACHER,
    RowInputs,
    SamplerArguments,
    ScalingArguments,
    Source,
    flat,
)
from fastrl.ops._rows import operators
from fastrl.ops._vocabulary_parts.parts import UNSPLIT, VocabularyParts

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, WIDTH, VOCABULARY, RANK = 20, 24, 37, 3
#: dtypes of hidden states, weight and the operands of GEMMs
PRECISIONS = {
    "bf16": (BF16, BF16, BF16),
    "fp16": (F16, F16, F16),
    "fp32 weight under bf16 autocast": (BF16, F32, BF16),
    "fp32 under fp16 autocast": (F32, F32, F16),
    "fp32": (F32, F32, None),
    "bf16 beside fp32": (BF16, F32, None),
}
HEADS = ("plain", "bias", "lora", "bias and lora", "transposed")
NEEDS = {
    "everything": [True] * 5,
    "a frozen head": [True, False, False, False, False],
    "the head alone": [False, True, True, True, True],
    "adapters": [True, False, False, True, True],
    "nothing": [False] * 5,
}


#: which gradients are needed, rows of a chunk, backend
CALLS = [*((needs, 7, "cuda") for needs in NEEDS), ("everything", None, "triton")]


@pytest.fixture(params=["meta"] if torch.version.cuda is None else ["meta", "cuda"])
def device(request, monkeypatch):
    """A device of tensors without memory, inside of whatever mode makes these."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode() if request.param == "cuda" else contextlib.nullcontext():
        yield request.param


def call(device, precision, head, chunk_tokens, backend, teacher=None, parts=UNSPLIT):
    of_hidden, of_weight, operand = PRECISIONS[precision]

    def tensor(*shape, dtype=F32):
        return torch.empty(shape, dtype=dtype, device=device)

    weight = tensor(VOCABULARY, WIDTH, dtype=of_weight)
    if head == "transposed":
        weight = tensor(WIDTH, VOCABULARY, dtype=of_weight).t()
    source = Source(
        logits=None,
        hidden=tensor(ROWS, WIDTH, dtype=of_hidden),
        weight=weight,
        bias=tensor(VOCABULARY) if "bias" in head else None,
        lora_a=tensor(RANK, WIDTH) if "lora" in head else None,
        lora_b=tensor(VOCABULARY, RANK, dtype=of_weight) if "lora" in head else None,
        lora_scale=0.5,
        operand_dtype=operand,
    )
    inputs = RowInputs(
        source,
        token_ids=tensor(1, ROWS, dtype=torch.int64),
        active=tensor(1, ROWS, dtype=torch.bool),
        scaling=ScalingArguments(tensor(1, ROWS), 1.0, 1.0, 0.0),
        with_entropy=True,
        with_sum_sq_probs=True,
        chunk_tokens=chunk_tokens,
        compact=False,
        backend=backend,
        parts=parts,
        kept=ALL_TOKENS,
        teacher=teacher_of(teacher, tensor, of_hidden, of_weight, operand),
        sampler=NO_SAMPLER,
    )
    return inputs, tensor(1, ROWS)


def teacher_of(kind, tensor, of_hidden, of_weight, operand):
    """A teacher of another width, or the logits or some tokens of one."""
    if kind is None:
        return NO_TEACHER
    given = NO_TEACHER._replace(beta=0.4, has_tail=True)
    if kind == "tokens":
        ids, logprobs = tensor(ROWS, 5, dtype=torch.int64), tensor(ROWS, 5)
        return given._replace(token_ids=ids, logprobs=logprobs)
    source = NO_SOURCE._replace(logits=tensor(1, ROWS, VOCABULARY))
    if kind == "hidden":
        source = NO_SOURCE._replace(
            hidden=tensor(ROWS, 16, dtype=of_hidden),
            weight=tensor(VOCABULARY, 16, dtype=of_weight),
            bias=tensor(VOCABULARY),
            operand_dtype=operand,
        )
    return given._replace(source=source, scaling=ScalingArguments(tensor(1, ROWS), 1.0, 1.0, 0.0))


def assert_same(found, name, arguments):
    """Compare the results of a loop with what its schema's fake promises."""
    promised = getattr(torch.ops.fastrl, f"rows_{name}")(*arguments)
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(promised), strict=True)
    for one, other in pairs:
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert one.device.type == other.device.type


def skip_without_fake_of_addmm(precision):
    old = torch.__version__.startswith(("2.10.", "2.11."))  # 2.11 takes out_dtype for beta
    if old and PRECISIONS[precision][-1] is not None:
        pytest.skip("torch 2.10 and 2.11 have no fake of addmm with out_dtype")


@pytest.mark.parametrize(("needs", "chunk_tokens", "backend"), CALLS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loops_of_a_gpu(device, precision, head, needs, chunk_tokens, backend):
    skip_without_fake_of_addmm(precision)
    assert_as_promised(*call(device, precision, head, chunk_tokens, backend), needs)


@pytest.mark.parametrize("teacher", ["hidden", "logits", "tokens"])
@pytest.mark.parametrize("head", ["plain", "bias and lora"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loops_of_a_gpu_with_a_teacher(device, precision, head, teacher):
    skip_without_fake_of_addmm(precision)
    for backend, needs in (("triton", "everything"), ("cuda", "a frozen head")):
        arguments, token = call(device, precision, head, 7, backend, teacher)
        assert_as_promised(arguments, token, needs, teacher=True)


@pytest.mark.parametrize("teacher", [None, "hidden", "tokens"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_loops_of_a_gpu_with_score_centering(device, precision, teacher):
    skip_without_fake_of_addmm(precision)
    for backend, needs in (("triton", "everything"), ("cuda", "a frozen head")):
        inputs, token = call(device, precision, "plain", 7, backend, teacher)
        ids = torch.zeros(ROWS, 4, dtype=torch.int64, device=token.device)
        sampler = SamplerArguments(ids, token.new_zeros(ROWS, 4), [])
        given = inputs._replace(sampler=sampler)
        assert_as_promised(given, token, needs, teacher=teacher is not None)


@pytest.fixture
def two_ranks():
    """The second of two ranks whose collectives do nothing, with the larger part."""
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    parts = VocabularyParts(torch.distributed.group.WORLD.group_name, 1, [20, VOCABULARY], True)
    yield parts
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("needs", "chunk_tokens", "backend"), CALLS[::5])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("precision", ["fp16", "fp32 weight under bf16 autocast", "fp32"])
def test_the_loops_of_a_gpu_on_a_part(
    device, two_ranks, precision, head, needs, chunk_tokens, backend
):
    if torch.__version__.startswith("2.10."):
        pytest.skip("torch 2.10 has no fake of all_gather")
    skip_without_fake_of_addmm(precision)
    given = call(device, precision, head, chunk_tokens, backend, parts=two_ranks)
    assert_as_promised(*given, needs)


def assert_as_promised(inputs, token, needs, *, teacher=False):
    """Run the three loops; `token` is a value of each row."""
    present = [x is not None for x in inputs.source.trainable()]
    wanted = [need and there for need, there in zip(NEEDS[needs], present, strict=True)]
    arguments = flat(inputs)
    assert_same(operators.stats_fwd(*arguments), "stats_fwd", arguments)
    for name, more in with_gradients(inputs, token, wanted, teacher=teacher):
        assert_same(getattr(operators, name)(*more), name, more)


def with_gradients(inputs, token, wanted, *, teacher=False):
    """The operators that compute gradients, and their arguments."""
    compared = ([token] * 3, token) if teacher else ([], None)
    centered = token if inputs.sampler.given() else None
    slopes = (token, token, token, token, None, token, *compared, centered)
    backward = (*flat(inputs), *slopes, wanted)
    objective = Objective.preset("grpo", kl_coef=0.1, entropy_coef=0.01).arguments.flat()
    loss = LossArguments(token, token, None, None, None, token, token, None)
    weights = (token if teacher else None, centered)
    forward = (*flat(inputs), *loss, *objective, *weights, wanted, True)
    return ("stats_bwd", backward), ("loss_fwd", forward)


class Peak(TorchDispatchMode):
    """The most bytes that existed at once, by operator, of what was allocated since."""

    def __init__(self):
        super().__init__()
        self._alive, self.bytes = {}, Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        given = [
            x.untyped_storage()._cdata
            for x in pytree.arg_tree_leaves(arguments, options)
            if isinstance(x, torch.Tensor)
        ]
        result = function(*arguments, **(options or {}))
        for made in pytree.tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in given:
                storage = made.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        bytes_now = sum(size for _, size in self._alive.values())
        self.bytes |= Counter({function.overloadpacket.__name__: bytes_now})
        return result


@pytest.mark.parametrize("teacher", [None, "hidden"])
@pytest.mark.parametrize("needs", ["everything", "a frozen head"])
def test_a_chunk_and_the_rounded_gradient_of_the_weight_take_turns(needs, teacher, monkeypatch):
    """A chunk fills the memory of the 16-bit copy, or 512 MiB, without adding to the peak."""
    skip_without_fake_of_addmm("bf16")
    rows, width, vocabulary = 8192, 4096, 128256
    for name, size in {"ROWS": rows, "WIDTH": width, "VOCABULARY": vocabulary}.items():
        monkeypatch.setitem(globals(), name, size)
    inputs, token = call("meta", "bf16", "plain", None, "cuda", teacher)
    trained, wanted = needs == "everything", [*NEEDS[needs][:2], False, False, False]
    of_weight = 2 * vocabulary * width
    steady = 2 * rows * width + (2 * of_weight if trained else 0)
    chunk = of_weight if trained else 2**29
    for name, more in with_gradients(inputs, token, wanted, teacher=teacher is not None):
        with Peak() as peak:
            getattr(operators, name)(*more)
        of_gemms = max(size for name, size in peak.bytes.items() if name.endswith("mm"))
        assert 0.85 * chunk <= of_gemms - steady, name
        assert max(peak.bytes.values()) - steady <= chunk + 2**22, name
