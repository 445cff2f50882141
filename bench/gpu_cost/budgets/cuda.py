"""Budgets of the kernels of csrc/cuda; those without one may not spill or compute in double."""

from budgets.target import Target

# bfloat16, aligned, no softcap; read once and written once
_BF16 = "INS0_8BFloat16ELb1ELb0EL"
_BF16_SOFTCAP = "INS0_8BFloat16ELb1ELb1EL"
# the same for rows that begin or end within a vector: at most 1.3 times the instructions
_BF16_UNALIGNED = "INS0_8BFloat16ELb0ELb0EL"
_BF16_UNALIGNED_SOFTCAP = "INS0_8BFloat16ELb0ELb1EL"
# float32 logits whose gradient is bfloat16, and the same where rows end within a vector
_NARROW = "IfLb1ELb0ELi256ENS0_8BFloat16E"
_NARROW_UNALIGNED = "IfLb0ELb0ELi256ENS0_8BFloat16E"

# 80 of 65536 registers, in steps of 8: three blocks of 256 threads share a multiprocessor
_CLUSTER = {"registers": 80, "persistent": True}
# four times a step, one of the two vectors that are joined may be loaded in part, by words
_WORDS = {"narrow": 4, "narrowest": 4}

CUDA = [
    Target(
        f"{kernel}_kernel{variant}",
        element_bytes=4 if variant.startswith("If") else 2,
        bytes_per_element=moved,
        instructions=instructions,
        mufu=mufu,
        sweeps=sweeps,
        **others,
    )
    for kernel, variant, moved, instructions, mufu, sweeps, others in (
        ("one_pass_cluster", _BF16, 4, 14.1, 2.2, 2, _CLUSTER),
        ("one_pass_cluster", _BF16_SOFTCAP, 4, 29.0, 6.3, 2, _CLUSTER),
        ("one_pass_cluster", _BF16_UNALIGNED, 4, 15.9, 2.2, 2, _CLUSTER),
        ("one_pass_cluster", _BF16_UNALIGNED_SOFTCAP, 4, 30.0, 6.3, 2, _CLUSTER),
        ("one_pass_cluster", _NARROW, 6, 16.0, 2.2, 2, _CLUSTER),
        ("one_pass_cluster", _NARROW_UNALIGNED, 6, 15.0, 2.2, 2, _CLUSTER),
        ("one_pass_cluster", "", 4, None, None, 0, _CLUSTER),
        ("token_stats", _BF16, 2, 9.0, 1.1, 1, {}),
        ("token_stats_backward", _BF16, 4, 7.0, 1.1, 1, {}),
        ("token_stats", _BF16_UNALIGNED, 2, 9.5, 1.1, 1, _WORDS),
        ("token_stats_backward", _BF16_UNALIGNED, 4, 7.6, 1.1, 1, _WORDS),
        ("one_pass_plain", _NARROW, 6, 16.0, 2.2, 2, {}),
        ("token_stats_backward", _NARROW, 6, 8.0, 1.1, 1, {}),
    )
]
