"""The CUDA kernels under the sanitizers: no race, no access beyond a buffer."""

import re

import pytest

from tests.support import sanitized
from tests.support.cuda_host import ROOT, assert_program_passes
from tests.support.cuda_structs import POINTER, Struct


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_vocabulary_kernels(sanitizer, warp):
    assert_program_passes("rows", sanitizer, warp=warp)


def test_every_pointer_that_a_kernel_takes():
    sanitized.run("cuda", cases=300)


def test_the_structs_have_every_pointer_of_the_headers():
    """So that the test above asks for each of them."""
    headers = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc" / "cuda").glob("*/*.h")]
    a_struct = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
    found, mirrored = {}, {}
    for header in headers:
        for struct, body in a_struct.findall(re.sub(r"//.*", "", header.read_text())):
            declared = [part for part in body.split(";") if "(" not in part]
            if pointers := [name for part in declared for name in re.findall(r"\*\s*(\w+)", part)]:
                found[struct] = pointers
    for struct in Struct.__subclasses__():
        if pointers := [name for name, kind in struct._fields_ if kind is POINTER]:
            mirrored[struct.__name__] = pointers
    assert found == mirrored
