// The vector kernels for AVX2.
#include <cmath>
#include <cstdint>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

// after the standard headers, so that only what follows is compiled for these instructions
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define FASTRL_ISA avx2
#define FASTRL_VEC_BYTES 32
#include "isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
const fastrl::cpu::Kernels* fastrl::cpu::kernels_avx2() { return nullptr; }
#endif
