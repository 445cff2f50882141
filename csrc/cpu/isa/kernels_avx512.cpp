// The vector kernels for AVX-512.
#include <cmath>
#include <cstdint>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

// after the standard headers, so that only what follows is compiled for these instructions
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define FASTRL_ISA avx512
#define FASTRL_VEC_BYTES 64
#include "isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
const fastrl::cpu::Kernels* fastrl::cpu::kernels_avx512() { return nullptr; }
#endif
