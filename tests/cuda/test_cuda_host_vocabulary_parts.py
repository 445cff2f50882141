"""A split vocabulary as GPUs run it, on the CUDA kernels in their host build."""

import torch

from tests.ops.gloo_ranks import on_ranks
from tests.support.cuda_host import library
from tests.support.vocabulary_ranks_gpu import gpu_on_ranks


def test_the_loss_and_its_gradients_agree_with_float64():
    for family in ("vocabulary", "policy_loss", "sequence_weights", "scale"):
        library(family)  # compiled once, not by every rank
    first, second = on_ranks(2, gpu_on_ranks, "cuda")
    for one, two in zip(first, second, strict=True):
        assert all(map(torch.equal, one, two))
