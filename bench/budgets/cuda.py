"""Budgets of the kernels of csrc/cuda; those without one may not spill or compute in double."""

from budgets.target import CudaTarget

# bfloat16, aligned, no softcap; read once and written once
_BF16 = "INS0_8BFloat16ELb1ELb0EL"
_BF16_SOFTCAP = "INS0_8BFloat16ELb1ELb1EL"
# the same for rows that begin or end within a vector: at most 1.3 times the instructions
_BF16_UNALIGNED = "INS0_8BFloat16ELb0ELb0EL"
_BF16_UNALIGNED_SOFTCAP = "INS0_8BFloat16ELb0ELb1EL"
# float32 logits whose gradient is bfloat16, and the same where rows end within a vector
_NARROW = "IfLb1ELb0ELi256ENS0_8BFloat16E"
_NARROW_UNALIGNED = "IfLb0ELb0ELi256ENS0_8BFloat16E"


def one_pass(
    variant: str, instructions: float | None = None, mufu: float | None = None
) -> CudaTarget:
    """Return the budget of a variant of the kernel of which three blocks share a multiprocessor."""
    registers = 80  # of 65536, in steps of 8, for three blocks of 256 threads
    sweeps = 0 if instructions is None else 2
    kernel = f"one_pass_cluster_kernel{variant}"
    read = 4 if variant.startswith("If") else 2
    moved = read + 2
    return CudaTarget(
        kernel, read, moved, instructions, mufu, 0, sweeps, registers, persistent=True
    )


def unaligned(kernel: str, bytes_per_element: float, instructions: float) -> CudaTarget:
    """Return the budget of a kernel that reads unaligned rows from global memory.

    Four times a step, one of the two vectors that are joined may be loaded in part, by words.
    """
    return CudaTarget(
        f"{kernel}{_BF16_UNALIGNED}",
        2,
        bytes_per_element,
        instructions,
        mufu=1.1,
        narrow=4,
        sweeps=1,
        narrowest=4,
    )


CUDA: tuple[CudaTarget, ...] = (
    one_pass(_BF16, 14.1, mufu=2.2),
    one_pass(_BF16_SOFTCAP, 29.0, mufu=6.3),
    one_pass(_BF16_UNALIGNED, 15.8, mufu=2.2),
    one_pass(_BF16_UNALIGNED_SOFTCAP, 30.0, mufu=6.3),
    one_pass(_NARROW, 16.0, mufu=2.2),
    one_pass(_NARROW_UNALIGNED, 15.0, mufu=2.2),
    one_pass(""),
    CudaTarget(f"token_stats_kernel{_BF16}", 2, 2, 9.0, mufu=1.1, sweeps=1),
    CudaTarget(f"token_stats_backward_kernel{_BF16}", 2, 4, 7.0, mufu=1.1, sweeps=1),
    unaligned("token_stats_kernel", 2, 9.5),
    unaligned("token_stats_backward_kernel", 4, 7.6),
    CudaTarget(f"one_pass_plain_kernel{_NARROW}", 4, 6, 16.0, mufu=2.2, sweeps=2),
    CudaTarget(f"token_stats_backward_kernel{_NARROW}", 4, 6, 8.0, mufu=1.1, sweeps=1),
)
