"""A split vocabulary as GPUs run it, on the interpreted kernels."""

import pytest
import torch

from fastrl.triton.runtime.registration import INTERPRETED
from tests.ops.gloo_ranks import on_ranks
from tests.ops.test_vocabulary_parts import DTYPES, SPLITS
from tests.ops.vocabulary_ranks import logits_on_ranks
from tests.support.vocabulary_ranks_gpu import gpu_on_ranks

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("scaling", ["scale, softcap, temperature", "temperature per row"])
def test_equal_to_the_whole_vocabulary(backend, scaling):
    sizes, losses = (1, 310), ("sequences",)
    given = (sizes, backend, DTYPES[0], SPLITS[sizes], (scaling,), losses)
    first, second = on_ranks(2, logits_on_ranks, *given)
    for one, two in zip(first, second, strict=True):
        assert all(map(torch.equal, one, two))


def test_the_loss_and_its_gradients_agree_with_float64(backend):
    first, second = on_ranks(2, gpu_on_ranks, backend)
    for one, two in zip(first, second, strict=True):
        assert all(map(torch.equal, one, two))
