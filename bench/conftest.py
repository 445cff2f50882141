"""`pytest bench`: one pytest-benchmark case per shape, dtype and provider."""

import pytest
from shapes import SELECTIONS


def pytest_addoption(parser):
    parser.addoption("--shapes", choices=SELECTIONS, default="smoke", help="see bench/shapes.py")


def pytest_generate_tests(metafunc):
    if {"case", "provider"} <= set(metafunc.fixturenames):
        pairs = [
            pytest.param(case, provider, id=f"{case.label} {case.work} {provider.name}")
            for case in metafunc.module.cases(metafunc.config.getoption("--shapes"))
            for provider in case.providers
        ]
        metafunc.parametrize(("case", "provider"), pairs)
