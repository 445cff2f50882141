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


_counts: dict[tuple[int, int], torch.Tensor] = {}


def count_of_finished(device):
    """Return a zero that every kernel leaves at zero: one per stream, one per captured graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counts:
        _counts[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counts[key]
