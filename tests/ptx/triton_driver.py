"""Triton's own path to a launch, on CPU tensors: it compiles for sm_90 and stops at PTX.

Its JIT chooses and caches the specialisations as on a GPU; `launch` gets what its launcher would.
"""

import collections

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

Loaded = collections.namedtuple("Loaded", "name ptx shared")


class Machine(DriverBase):
    """What Triton asks of a driver and its C module, for a machine that executes PTX."""

    def __init__(self, launch):
        self.launch = launch
        self.utils = self

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError(ty)

    def get_benchmarker(self):
        raise NotImplementedError("there are no times here")

    def get_active_torch_device(self):
        return "cpu"

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name, ptx, shared, device):
        return None, Loaded(name, ptx.decode(), shared), 32, 0, 1024

    def launcher_cls(self, src, metadata):
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
        assert metadata.num_ctas == 1

        def run(x, y, z, stream, loaded, packed, launch_metadata, enter, leave, *arguments):
            values = [*_flat(tuple(src.signature.values()), arguments), 0, 0]  # without scratch
            self.launch(loaded, (x, y, z), 32 * metadata.num_warps, values)

        return run


def _flat(types, arguments):
    """Yield the arguments that are no constants, out of their tuples."""
    for kind, given in zip(types, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, given)
        elif kind != "constexpr":
            yield given


def _stop_at_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """Replace the assembler; asked without stages, say what identifies that in caches."""
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return "ptx", "ptx"


def activate(launch):
    triton.knobs.runtime.add_stages_inspection_hook = _stop_at_ptx
    triton.runtime.driver.set_active(Machine(launch))
