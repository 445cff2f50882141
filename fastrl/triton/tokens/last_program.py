"""Detection of the program of a launch that finishes last and adds up all results."""

import torch
import triton
import triton.language as tl


@triton.jit
def is_last(finished):
    """Return whether all other programs have finished, so that their results can be read."""
    # all threads must have stored their results before other programs learn of it
    tl.debug_barrier()
    return tl.atomic_add(finished, 1) == tl.num_programs(0) - 1


def count_of_finished(device):
    """Return a zero counter for one launch; a private memory pool could reuse a kept one."""
    return torch.zeros(1, dtype=torch.int32, device=device)
