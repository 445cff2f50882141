"""How the program of a launch that finishes last is found; it adds up what all of them left."""

import torch
import triton
import triton.language as tl


@triton.jit
def is_last(finished):
    """Say whether all other programs have finished; what they stored can then be read."""
    # all threads have stored what they leave before another program is told
    tl.debug_barrier()
    return tl.atomic_add(finished, 1) == tl.num_programs(0) - 1


def count_of_finished(device):
    """Return a zero for one launch; one kept for the next would not survive a private pool."""
    return torch.zeros(1, dtype=torch.int32, device=device)
