// What the operators on logits hand to their kernels. No torch.
#pragma once

#include <cstdint>

#include "../../objectives.h"

namespace fastrl::cuda {

enum LogitsType : int { kFloat, kBFloat16, kHalf };

// Rows [batch, tokens] of logits; element strides, row = b * tokens + t. Rows are contiguous.
struct LogitsParams {
  LogitsType type;
  const void* logits;
  int64_t batch, tokens, vocabulary, stride_b, stride_t;
  // [batch, tokens], contiguous; without `temperatures` all rows have the one temperature
  const int64_t* token_ids;
  const bool* active;
  const float* temperatures;
  double temperature, logit_scale, logit_softcap;  // no softcap: 0
};

// Where the gradient goes: to the logits themselves, or to a buffer of the same type.
struct GradientParams {
  void* grad_logits;
  int64_t stride_b, stride_t;
};

// [batch, tokens], contiguous; a statistic that is not wanted is 0.
struct TokenStatsParams {
  LogitsParams in;
  bool with_entropy, with_sum_sq_probs;
  float *logprobs, *entropy, *logsumexp, *sum_sq_probs;
  bool* is_top1;
  float *row_max, *log_sum;
};

// [batch, tokens], contiguous; the gradients that flow back may be null.
struct TokenStatsBackwardParams {
  LogitsParams in;
  GradientParams out;
  const float *row_max, *log_sum, *entropy;  // as the forward returned them
  const float *grad_logprobs, *grad_entropy, *grad_logsumexp;
};

// [batch, tokens], contiguous. Null: of `kl_weights` and `entropy_weights`, they are `weights`; of
// the others, there are none. GMPO is not a function of one token.
struct LogitsPolicyLossParams {
  LogitsParams in;
  GradientParams out;
  const float *advantages, *weights, *kl_weights, *entropy_weights, *old_logprobs, *ref_logprobs;
  Ratio ratio;
  KlEstimator kl_estimator;
  KlGradient kl_gradient;
  Coefficients<float> coefficients;
  float *logprobs, *entropy;
};

}  // namespace fastrl::cuda
