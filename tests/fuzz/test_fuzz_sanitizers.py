"""Cases of the fuzzer on the CPU backend built under AddressSanitizer and UBSan."""

import pytest

from tests.gpu import sanitized

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", ["plain", "avx2", "avx512"])
def test_no_access_beyond_a_tensor(capability):
    sanitized.run("cpu", cases=300, FASTRL_CPU_CAPABILITY=capability)
