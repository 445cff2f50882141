import torch

from fastrl.bench.case import BOTH, FORWARD
from fastrl.bench.cases import SELECTIONS, cases


def pytest_addoption(parser):
    parser.addoption("--selection", choices=SELECTIONS, default="smoke", help="of fastrl bench")


def pytest_generate_tests(metafunc):
    if {"size", "step", "name"} <= set(metafunc.fixturenames):
        # not the cases themselves: pytest would keep all of them, and what they hold
        found = {
            f"{case.name}, {provider.name}": (size, step, provider.name)
            for size in SELECTIONS[metafunc.config.getoption("--selection")]
            for step in (FORWARD, BOTH)
            for case in cases([size], [step], torch.device("cpu"))
            for provider in case.providers
        }
        metafunc.parametrize(("size", "step", "name"), found.values(), ids=found.keys())
