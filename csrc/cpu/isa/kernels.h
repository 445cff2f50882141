// The interface of the vector code: one table of functions per instruction set.
#pragma once

#include <cstdint>

#include "../../contract.h"

namespace fastrl::cpu {

// Rows are reduced in blocks of this many columns, whatever the shape or number of threads.
constexpr int64_t kBlock = 4096;

enum LogitsType : int { kFloat, kBFloat16, kHalf, kNumLogitsTypes };

// Maps a raw logit to an exponent of two: binary_gain * x, or binary_gain * tanh(squash * x) with a
// softcap.
struct LogitMap {
  float binary_gain;
  float squash;  // logit_scale / softcap, 0 without a softcap
};

// Sums over one block, with t = exponent of two relative to the block's largest logit.
struct BlockPartial {
  float max;  // largest raw logit
  // sum 2^t without the 1 of the largest, next to which a small term would lose its digits;
  // sum t 2^t, sum 2^2t
  double rest, sum_t, sum_sq;
};

// gradient_j = (constant + linear * t_j) * 2^t_j [* (1 - tanh^2)], t relative to `max`.
struct GradientTerms {
  float max;
  float constant, linear;
};

// Two rows that are compared, a student's and a teacher's. Values are logits, or tanh of them under
// a softcap; a binary_gain makes exponents of two of them.
struct DivergenceMap {
  float binary_gain, max, log2_sum;  // of the student; log2_sum is relative to max
  float teacher_binary_gain, teacher_max, teacher_log2_sum;
  float max_difference, max_difference_error;  // max - teacher_max, and its rounding error
  float offset;                                // log2_sum - teacher_log2_sum
  float beta, student_share;                   // 1 - beta is exact in double
};

// The divergence of a row, the sum of q times the derivative by ln q, and whether the same column
// is the largest in both rows.
struct DivergenceSums {
  double value, slope;
  bool agrees;
};

// dL/dz_j = divergence * (slope_j - q_j mean) + q_j (constant + linear log2 q_j)
struct DivergenceSlopes {
  float divergence, mean, constant, linear;
};

// The tokens of a policy loss; absent inputs are null.
struct TokenInputs {
  const float *logprobs, *entropy;
  const bool* mask;
  LossConstants constants;
  float *slope, *entropy_slope;
  Objective<float> objective;
};

// For a sequence that shares one ratio: the mean of its log-ratios, the part of the slope that each
// of its tokens receives, and whether it has a single token, which then does not share its ratio.
struct SharedRatio {
  float mean, slope;
  bool alone;
};

// Tokens [begin, end) of one sequence, or at token level of several sequences, unless a constant is
// per sequence.
struct Segment {
  int64_t begin, end, sequence;
  SharedRatio shared;
};

// Sums over active tokens.
struct TokenSums {
  double policy, weighted_kl, weighted_entropy, kl, kl_old, entropy, ratio;
  float ratio_max, ratio_min;
  int64_t active, clip_low, clip_high, zero_grad;
};

struct Kernels {
  const char* capability;
  // [softcap][entropy][squares]
  using Partial = void (*)(const void* x, int64_t n, const LogitMap& map, BlockPartial* partial);
  Partial partial[kNumLogitsTypes][2][2][2];
  // [softcap][linear term]; grad may be x
  using Gradient = void (*)(const void* x, void* grad, int64_t n, const LogitMap& map,
                            const GradientTerms& terms);
  Gradient gradient[kNumLogitsTypes][2][2];
  // tanh(by x) as the kernels compute it
  float (*tanh)(float x, float by);

  // Products of a vector of `width` floats with the rows of a matrix that `ids` names; see
  // gathered_rows.h.
  using Gathered = void (*)(const float* x, const void* rows, int64_t stride, const int32_t* ids,
                            int64_t count, int64_t width, float* out);
  Gathered gathered_dots[kNumLogitsTypes], gathered_sum[kNumLogitsTypes];

  // [softcap]; see divergence_blocks.h. Rows of floats that block_values has written, or slopes.
  using Values = void (*)(const void* x, int64_t n, float squash, float* out);
  Values values[kNumLogitsTypes][2];
  using Slopes = void (*)(const void* x, const float* slopes, int64_t n, float squash,
                          float raw_gain, void* grad);
  Slopes slopes[kNumLogitsTypes][2];
  // [forward KL, reverse KL, Jensen-Shannon]
  void (*divergence[3])(const float* u, const float* v, int64_t n, const DivergenceMap& map,
                        DivergenceSums* sums);
  void (*divergence_slopes[3])(const float* u, const float* v, int64_t n, const DivergenceMap& map,
                               const DivergenceSlopes& by, float* slopes);

  // Loss, slope and metrics of the tokens of these segments.
  void (*token_losses)(const TokenInputs& in, const Segment* segments, int64_t count,
                       TokenSums* sums);
  // Sum and number of the log-ratios that a sequence averages.
  void (*sum_log_ratios)(const TokenInputs& in, const Segment& sequence, double* sum,
                         int64_t* count);
  // Sum over a sequence of the derivatives with respect to its mean log-ratio: w f' and the ratio
  // slope of the KL, which for a single token is part of its own slope.
  double (*sum_slopes)(const TokenInputs& in, const Segment& sequence, int64_t active);
};

// Null where the compiler's target lacks the instructions.
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_plain();

// The best table for this machine, or the one that FASTRL_CPU_CAPABILITY names.
const Kernels& kernels();

}  // namespace fastrl::cpu
