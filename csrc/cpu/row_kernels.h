// What the drivers know of the vector code: a table of functions per instruction set.
#pragma once

#include <cstdint>

namespace fastrl::cpu {

// Columns of a row are reduced in blocks of this many, whatever the shape or number of threads.
constexpr int64_t kBlock = 4096;

enum LogitsType : int { kFloat, kBFloat16, kHalf, kNumLogitsTypes };

// From a raw logit to an exponent of two: multiplier * x, or multiplier * tanh(squash * x) with a
// softcap.
struct LogitMap {
  float multiplier;
  float squash;  // logit_scale / softcap, 0 without a softcap
};

// Sums over one block, with t = exponent of two relative to the block's largest logit.
struct BlockPartial {
  float max;                  // largest raw logit
  double sum, sum_t, sum_sq;  // sum 2^t, sum t 2^t, sum 2^2t
};

// gradient_j = (constant + linear * t_j) * 2^t_j [* (1 - tanh^2)], t relative to `max`.
struct GradientTerms {
  float max;
  float constant, linear;
};

struct RowKernels {
  const char* capability;
  // [softcap][entropy][squares]
  using Partial = void (*)(const void* x, int64_t n, const LogitMap& map, BlockPartial* partial);
  Partial partial[kNumLogitsTypes][2][2][2];
  // [softcap][linear term]; grad may be x.
  using Gradient = void (*)(const void* x, void* grad, int64_t n, const LogitMap& map,
                            const GradientTerms& terms);
  Gradient gradient[kNumLogitsTypes][2][2];
  // tanh as the kernels compute it
  float (*tanh)(float x);
};

// Null where the compiler's target has no such instructions.
const RowKernels* row_kernels_avx512();
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_plain();

// The best that this machine runs, or the one that FASTRL_CPU_CAPABILITY names.
const RowKernels& row_kernels();

}  // namespace fastrl::cpu
