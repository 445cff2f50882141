// What the operator of the policy loss hands to its kernel. No torch.
#pragma once

#include <cstdint>

#include "../../objectives.h"

namespace fastrl::cuda {

constexpr int kNumMetrics = 12;
constexpr int64_t kPolicyPartBytes = 80;  // the sums of one block
constexpr unsigned kMostRanks = 8;        // blocks of a cluster

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
  // a block works on this many tokens, at the sequence levels a cluster of so many blocks on this
  // many sequences; every block leaves a part of the sums
  int64_t per_block;
  unsigned ranks;
  void* parts;
  uint32_t* arrived;  // 0 before and after; not used where there is one block
  bool aligned;       // set by the launch: tokens may be read four at a time
};

// Sets per_block and ranks and returns the number of blocks: functions of the shape alone, so that
// the order of summation is, and few enough for one block to add the parts up.
inline unsigned policy_loss_blocks(PolicyLossParams* params) {
  constexpr int64_t kMostParts = 2048, kFewestTokens = 2048, kTokensOfRank = 4096;
  const bool by_token = params->level == Level::kToken;
  const int64_t work = by_token ? params->tokens : params->sequences;
  const int64_t fewest = by_token ? kFewestTokens : 1;
  params->per_block = fewest * ((work + fewest * kMostParts - 1) / (fewest * kMostParts));
  params->ranks = 1;
  if (work <= 0) return 1;
  // sequences so few that they would leave most of the device idle, and long
  while (!by_token && params->ranks < kMostRanks && work * params->ranks < 128 &&
         params->tokens / work > kTokensOfRank * params->ranks) {
    params->ranks *= 2;
  }
  const int64_t teams = (work + params->per_block - 1) / params->per_block;
  return static_cast<unsigned>(teams) * params->ranks;
}

}  // namespace fastrl::cuda
