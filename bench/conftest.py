import pytest
import torch

from fastrl.bench.case import BOTH, FORWARD
from fastrl.bench.cases import SELECTIONS, cases


def pytest_addoption(parser):
    parser.addoption("--selection", choices=SELECTIONS, default="smoke", help="of fastrl bench")


def pytest_generate_tests(metafunc):
    if {"case", "provider"} <= set(metafunc.fixturenames):
        sizes = SELECTIONS[metafunc.config.getoption("--selection")]
        pairs = [
            pytest.param(case, provider, id=f"{case.name}, {provider.name}")
            for case in cases(sizes, (FORWARD, BOTH), torch.device("cpu"), None, None)
            for provider in case.providers
        ]
        metafunc.parametrize(("case", "provider"), pairs)
