"""verl's functions of a vocabulary that Megatron's tensor-parallel ranks share, on two ranks."""

import pytest
import torch.distributed

from tests.ops.gloo_ranks import on_ranks
from tests.support import verl_vocabulary_ranks as ranks
from tests.support.importable import importable

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="torch without gloo"
)
missing = importable(ranks.MODULE) is None
PLACES = [
    ranks.stand_in,
    pytest.param(
        ranks.installed, marks=pytest.mark.skipif(missing, reason="needs verl and Megatron")
    ),
]


@pytest.mark.parametrize("place", PLACES, ids=["stand_in", "installed"])
def test_values_and_gradients(place):
    on_ranks(2, ranks.values_and_gradients, place)


@pytest.mark.parametrize("place", PLACES, ids=["stand_in", "installed"])
def test_entropy_and_log_probabilities_of_a_copy_as_in_the_engine(place):
    on_ranks(2, ranks.as_in_the_engine, place)


@pytest.mark.parametrize("place", PLACES, ids=["stand_in", "installed"])
def test_entropy_and_log_probabilities_of_one_tensor(place):
    on_ranks(2, ranks.of_one_tensor, place)


def test_labels_outside_the_vocabulary():
    on_ranks(2, ranks.labels_outside)


def test_the_gradient_of_the_hidden_states_is_the_part_of_each_rank():
    on_ranks(2, ranks.heads_in_parts)


def test_a_group_of_one_rank():
    on_ranks(2, ranks.a_group_of_one)
