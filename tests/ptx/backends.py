"""The backends of GPUs on CPU tensors: compiled for sm_90, and executed by the machine."""

import functools

import fastrl


@functools.cache
def prepare(name):
    """Compile and register what launches of a backend need, for as long as the process runs."""
    if name == "cuda":
        from tests.ptx import cuda_operators

        cuda_operators.load()
    else:
        from tests.ptx import triton_driver
        from tests.ptx.machine import machine

        run = machine().launch
        triton_driver.activate(
            lambda loaded, grid, threads, values: run(
                loaded.ptx, loaded.name, grid, threads, values, shared=loaded.shared
            )
        )


def use(name, put_item, put_attribute, module=fastrl.backend):
    """Let CPU tensors use a backend of GPUs; the functions put a value in its place."""
    prepare(name)
    put_item(module._DEVICES, name, ("cpu", "cuda"))
    unavailable = module.unavailable
    put_attribute(
        module, "unavailable", lambda asked: None if asked == name else unavailable(asked)
    )
