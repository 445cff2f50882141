"""What the C++ sources ask of a compiler, the oldest that are supported have: g++ 11, clang 13."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cpu").rglob("*.cpp"))
#: For `__builtin_cpu_supports`; a name that came later is an error, as "f16c" before clang 17.
KNOWN_FEATURES = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
COMPILERS = [f"clang++-{version}" for version in range(13, 17)] + ["g++-11"]


def test_no_feature_is_asked_for_by_a_name_that_old_compilers_lack():
    asked = {
        name
        for path in SOURCES
        for line in path.read_text().splitlines()
        for name in re.findall(r'__builtin_cpu_supports\("(\w+)"\)', line.partition("//")[0])
    }
    assert asked
    assert asked <= KNOWN_FEATURES


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_old_compiler_takes_the_sources(compiler):
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    places = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [flag for place in places for flag in ("-isystem", place)]
    done = subprocess.run(
        [*command, *map(str, SOURCES)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
