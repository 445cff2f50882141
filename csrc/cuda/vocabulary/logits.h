// Arguments of the kernels on logits. No torch.
#pragma once

#include <cstdint>

#include "../device/mask.h"
#include "../device/sequences.h"

namespace fastrl::cuda {

enum LogitsType : int { kFloat, kBFloat16, kHalf };
inline int64_t bytes_of(LogitsType type) { return type == kFloat ? 4 : 2; }

// Rows [batch, tokens] of logits; element strides, row = b * tokens + t. Rows are contiguous.
struct LogitsParams {
  LogitsType type;
  const void* logits;
  int64_t batch, tokens, vocabulary, stride_b, stride_t;
  // [batch, tokens], contiguous; without `temperatures` one temperature applies to all rows
  const int64_t* token_ids;
  Mask mask;
  int64_t ignore_index;
  const float* temperatures;
  double temperature, logit_scale, logit_softcap;  // a softcap of 0 is none
};

// Where the gradient is written: over the logits, or into a buffer. It has the dtype of the logits,
// except in narrow mode: bfloat16 in the second half of each float32 row.
struct GradientParams {
  LogitsType type;
  void* grad_logits;
  int64_t stride_b, stride_t;  // elements of `type`
};

inline GradientParams narrow_gradient(const LogitsParams& p) {
  unsigned char* memory = static_cast<unsigned char*>(const_cast<void*>(p.logits));
  return {kBFloat16, memory + 2 * p.stride_t, 2 * p.stride_b, 2 * p.stride_t};
}
inline bool is_narrow(const LogitsParams& p, const GradientParams& grad) {
  return p.type == kFloat && grad.type == kBFloat16;
}

// [batch, tokens], contiguous; unrequested statistics are 0.
struct TokenStatsParams {
  LogitsParams in;
  bool with_entropy, with_sum_sq_probs;
  RowStatsOut out;
};

// [batch, tokens], contiguous; the gradients that flow back may be null.
struct TokenStatsBackwardParams {
  LogitsParams in;
  GradientParams out;
  const float *row_max, *log_sum, *entropy;  // from the forward
  const float *grad_logprobs, *grad_entropy, *grad_logsumexp;
};

// The objective is at token level, which excludes gmpo.
struct LogitsPolicyLossParams {
  LogitsParams in;
  GradientParams out;
  LossConstants constants;
  Objective<float> objective;
  Sequences sequences;
  float *logprobs, *entropy;
  uint32_t* ticket;  // 0 when the launch begins, and used up by it
};

}  // namespace fastrl::cuda
