"""The C++ sources compile with the oldest supported compilers: g++ 11 and clang 13."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cpu").rglob("*.cpp"))
#: For `__builtin_cpu_supports`; compilers reject later names, such as "f16c" before clang 17.
KNOWN_FEATURES = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
COMPILERS = [f"clang++-{version}" for version in range(13, 17)] + ["g++-11"]


def test_old_compilers_know_every_cpu_feature():
    asked = {
        name
        for path in SOURCES
        for line in path.read_text().splitlines()
        for name in re.findall(r'__builtin_cpu_supports\("(\w+)"\)', line.partition("//")[0])
    }
    assert asked
    assert asked <= KNOWN_FEATURES


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_old_compiler_compiles_the_sources(compiler):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    places = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    command = [compiler, "-std=c++17", "-fsyntax-only", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", "-Werror"]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [flag for place in places for flag in ("-isystem", place)]
    done = subprocess.run(
        [*command, *map(str, SOURCES)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
