"""A model that transformers splits over two ranks (`tp_plan="auto"`) trains like a whole one."""

import pytest
import torch
import torch.distributed

from tests.support.gloo_ranks import on_ranks
from tests.support.tensor_parallel_models import compared_on_ranks, save

#: size of the vocabulary, and whether the head is the embedding
MODELS = [(50, False), (51, False), (50, True)]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
@pytest.mark.parametrize(("vocabulary", "tied"), MODELS)
def test_log_probabilities_and_gradients_inside_the_forward(tmp_path, vocabulary, tied):
    save(tmp_path, vocabulary, tied=tied)
    for worst in on_ranks(2, compared_on_ranks, str(tmp_path)):
        assert worst <= 1e-5
