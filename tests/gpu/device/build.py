"""The extensions and tests/gpu/device/launches.cpp, compiled for the GPU present: `make gpu-build`.

Nothing is compiled where all of it loads: so build on a machine without a GPU, for the one in
TORCH_CUDA_ARCH_LIST, and take along fastrl/*.so and build/gpu-driver.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("launches.cpp")
DRIVERS = ROOT / "build" / "gpu-driver"
#: Where the toolkit's programs are if not in CUDA_HOME or PATH.
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/cuda/bin")
PROFILERS = ("/opt/nvidia/nsight-compute/*", "/usr/local/cuda/compute-sanitizer")
CAPABILITY = "import torch; print('%d.%d' % torch.cuda.get_device_capability())"
EXTENSIONS = (
    "import sys; from fastrl import native; sys.exit(native.cuda_missing or native.missing)"
)


def path_with_tools() -> str:
    """Return PATH with the folders of the CUDA toolkit."""
    home = os.environ.get("CUDA_HOME")
    usual = [folder for pattern in (*FOLDERS, *PROFILERS) for folder in sorted(glob(pattern))[::-1]]
    return os.pathsep.join([*([f"{home}/bin"] if home else []), os.environ["PATH"], *usual])


def driver() -> Path:
    """Return the file of the driver; where it is, the extension was made of these sources, too."""
    digest = hashlib.sha256()
    sources = (SOURCE, SOURCE.with_name("launch_tensors.h"), *sorted((ROOT / "csrc").rglob("*.*")))
    for path in (ROOT / "setup.py", *sources):
        digest.update(path.read_bytes())
    return DRIVERS / f"launches-{digest.hexdigest()[:16]}"


def why_not() -> str:
    """Return why what is there cannot be used on this machine, or ''."""
    if not driver().exists():
        return "there is no build of these sources"
    driver().chmod(0o755)  # copies may lose it
    for command in ([sys.executable, "-c", EXTENSIONS], [str(driver()), "clusters"]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return ""


def main() -> int:
    os.environ["PATH"] = path_with_tools()
    reason = why_not()
    if not reason:
        print("the extensions and the driver load: nothing is compiled")
        return 0
    ask = [sys.executable, "-c", CAPABILITY]
    here = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", here)
    print(f"{reason}; compiling for TORCH_CUDA_ARCH_LIST='{archs}'", flush=True)
    shutil.rmtree(DRIVERS, ignore_errors=True)
    objects = str(DRIVERS / "objects")
    Path(objects).mkdir(parents=True)
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--build-temp", objects]
    environment = {**os.environ, "FASTRL_BUILD": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode == 0:
        _compile_driver(objects)
        shutil.rmtree(objects)
    return done.returncode


def _compile_driver(objects: str) -> None:
    """Link the driver with the kernels that setup.py has compiled."""
    os.environ["FASTRL_BUILD"], sys.argv = "none", ["setup.py", "--name"]
    os.chdir(ROOT)
    setup = runpy.run_path("setup.py")
    nvcc, compiled = setup["nvcc"](), f"{objects}/launches.o"
    own = [*setup["arch_flags"](nvcc), "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-x", "cu"]
    subprocess.run([nvcc, *own, "-c", str(SOURCE), "-o", compiled], check=True)
    kernels = setup["compile_kernels"](objects)
    subprocess.run([nvcc, compiled, *kernels, "-o", str(driver())], check=True)


if __name__ == "__main__":
    sys.exit(main())
