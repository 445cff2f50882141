"""A split vocabulary as GPUs run it, on kernels compiled for one."""

import pytest
import torch

from tests.gpu.parts_on_gpus import gpu_on_ranks
from tests.ops.ranks.gloo_ranks import on_ranks
from tests.ops.ranks.test_vocabulary_parts import assert_split, drawn

pytestmark = pytest.mark.kernels_alone  # tests/ops/ranks/test_vocabulary_parts.py has theirs


@pytest.mark.not_on("cuda")
@pytest.mark.parametrize("name", ["token_stats", "logits_policy_loss"])
def test_equal_to_the_whole_vocabulary(backend, name):
    assert_split(backend, [((1, 310), line) for line in drawn(backend, name, 3)])


def test_the_loss_and_its_gradients_agree_with_float64(backend):
    first, second = on_ranks(2, gpu_on_ranks, backend)
    for one, two in zip(first, second, strict=True):
        assert all(map(torch.equal, one, two))
