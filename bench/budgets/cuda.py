"""Budgets of the kernels of csrc/cuda; those without one may not spill or compute in double."""

from budgets.target import CudaTarget

# bfloat16, aligned, no softcap; read once and written once
_BF16 = "INS0_8BFloat16ELb1ELb0EL"
# float32 logits whose gradient is bfloat16
_NARROW = "IfLb1ELb0ELi256ENS0_8BFloat16E"

# 65536 registers, in steps of 8, for three blocks of 256 threads
_THREE_BLOCKS = 80

CUDA: tuple[CudaTarget, ...] = (
    CudaTarget(
        f"one_pass_cluster_kernel{_BF16}", 2, 4, 14.0, mufu=2.2, sweeps=2, registers=_THREE_BLOCKS
    ),
    CudaTarget("one_pass_cluster_kernel", 2, 4, registers=_THREE_BLOCKS),
    CudaTarget(f"token_stats_kernel{_BF16}", 2, 2, 9.0, mufu=1.1, sweeps=1),
    CudaTarget(f"token_stats_backward_kernel{_BF16}", 2, 4, 7.0, mufu=1.1, sweeps=1),
    CudaTarget(f"one_pass_plain_kernel{_NARROW}", 4, 6, 16.0, mufu=2.2, sweeps=2),
    CudaTarget(f"token_stats_backward_kernel{_NARROW}", 4, 6, 8.0, mufu=1.1, sweeps=1),
    CudaTarget("scale_kernelINS0_8BFloat16E", 2, 4, 6.0, mufu=0.0, narrow=2),
)
