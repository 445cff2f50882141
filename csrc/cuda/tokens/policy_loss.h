// Arguments of the kernel of the policy loss. No torch.
#pragma once

#include <cstdint>

#include "../device/sequences.h"

namespace fastrl::cuda {

constexpr int64_t kTokenSumsBytes = 80;  // the sums of one block
constexpr unsigned kMostRanks = 8;       // blocks of a cluster

struct PolicyLossParams {
  const float *logprobs, *entropy;  // [B, T]; entropy may be null
  const bool* mask;
  LossConstants constants;
  Objective<float> objective;
  Sequences sequences;
  float *loss, *slope, *entropy_slope;  // entropy_slope may be null
  Metrics* metrics;
  // A block works on this many tokens; at the sequence levels a cluster of `ranks` blocks works on
  // this many sequences. Every block writes its sums to `partial_sums`.
  int64_t per_block;
  unsigned ranks;
  void* partial_sums;
  uint32_t* arrived;  // 0 before the launch; not used by a single block
  // set by the launch
  bool aligned;      // tokens may be read four at a time
  bool by_sequence;  // some constant is per sequence
};

// Sets per_block and ranks, and returns the number of blocks. They depend on the shape alone, and
// so does the order of summation; the blocks are few enough for one block to add up all sums.
inline unsigned policy_loss_blocks(PolicyLossParams* params) {
  constexpr int64_t kMostBlocks = 2048, kFewestTokens = 1024, kTokensOfRank = 4096;
  const bool by_token = params->objective.level == Level::kToken;
  const int64_t tokens = params->sequences.tokens;
  const int64_t work = by_token ? tokens : params->sequences.count;
  const int64_t fewest = by_token ? kFewestTokens : 1;
  params->per_block = fewest * ((work + fewest * kMostBlocks - 1) / (fewest * kMostBlocks));
  params->ranks = 1;
  if (work <= 0) return 1;
  // few long sequences, which would leave most of the device idle
  while (!by_token && params->ranks < kMostRanks && work * params->ranks < 128 &&
         tokens / work > kTokensOfRank * params->ranks) {
    params->ranks *= 2;
  }
  const int64_t teams = (work + params->per_block - 1) / params->per_block;
  return static_cast<unsigned>(teams) * params->ranks;
}

}  // namespace fastrl::cuda
