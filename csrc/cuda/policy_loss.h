// What the operator of the policy loss hands to its kernel. No torch.
#pragma once

#include <cstdint>

#include "../objectives.h"

namespace fastrl::cuda {

constexpr int kNumMetrics = 12;
constexpr int64_t kPolicyPartBytes = 80;  // the sums of one block

struct PolicyLossParams {
  // per token; those that may be absent are null
  const float *logprobs, *advantages, *weights, *kl_weights, *entropy_weights;
  const float *old_logprobs, *ref_logprobs, *entropy;
  const bool* mask;
  float *slope, *loss, *metrics;
  const int32_t* cu_seqlens;  // null where a sequence is a row of `row_length` tokens
  int64_t tokens, sequences, row_length;
  Level level;
  Ratio ratio;
  KlEstimator kl_estimator;
  KlGradient kl_gradient;
  Coefficients<float> coefficients;
  // a block works on this many tokens (level token) or sequences, and leaves a part of the sums
  int64_t per_block;
  void* parts;
  uint32_t* arrived;  // 0 before and after; not used where there is one block
  bool aligned;       // set by the launch: tokens may be read four at a time
};

// Sets per_block and returns the number of blocks: a function of the shape alone, so that the
// order of summation is, and few enough for one block to add the parts up.
inline unsigned policy_loss_blocks(PolicyLossParams* params) {
  constexpr int64_t kMostParts = 2048, kFewestTokens = 2048;
  const bool by_token = params->level == Level::kToken;
  const int64_t work = by_token ? params->tokens : params->sequences;
  const int64_t fewest = by_token ? kFewestTokens : 1;
  params->per_block = fewest * ((work + fewest * kMostParts - 1) / (fewest * kMostParts));
  if (work <= 0) return 1;
  return static_cast<unsigned>((work + params->per_block - 1) / params->per_block);
}

}  // namespace fastrl::cuda
