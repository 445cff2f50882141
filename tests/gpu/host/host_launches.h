// What csrc/cuda/torch/launches.h declares, on the host machine.
//
// Blocks are smaller than a GPU's, so that small inputs take many, and so are the chunks of which
// the callers make scratch memory; that is made here.
#pragma once

#include <vector>

#include "cuda/gae/gae.cuh"
#include "cuda/groups/group_advantages.cuh"
#include "cuda/tokens/policy_loss.cuh"
#include "cuda/tokens/sequence_weights.cuh"
#include "cuda/vocabulary/logits_policy_loss.cuh"
#include "cuda/vocabulary/scale.cuh"
#include "cuda/vocabulary/token_stats.cuh"
#include "cuda/vocabulary/token_stats_backward.cuh"

namespace fastrl::cuda {

namespace host {
constexpr int kThreads = 2 * kWarp;
inline bool clusters = true;  // whether the device has them
inline DeviceLimits limits(int sms) {
  return {clusters ? 9 : 8, sms, 227 << 10, 228 << 10, 1 << 20};
}
}  // namespace host

inline Status gae(const GaeParams& given, Stream stream) {
  GaeParams p = given;
  const int64_t chunks = (p.sequences.tokens + host::kThreads * kRun - 1) / (host::kThreads * kRun);
  std::vector<GaeMap> maps(chunks);
  std::vector<uint32_t> ticket_and_flags(chunks + 1);
  if (chunks > 1) p.maps = maps.data(), p.ticket_and_flags = ticket_and_flags.data();
  return launch_gae<host::kThreads>(p, stream);
}
inline Status weigh_sequences(const SequenceWeightsParams& given, Stream stream) {
  SequenceWeightsParams p = given;
  const int64_t chunks = (p.sequences.tokens + kChunk - 1) / kChunk;
  std::vector<uint32_t> before_chunk(chunks + 1), words(chunks * kWarp), before_word(words.size());
  p.before_chunk = before_chunk.data();
  if (p.words) p.words = words.data(), p.before_word = before_word.data();
  return launch_sequence_weights<host::kThreads>(p, stream);
}
inline Status group_advantages(const GroupAdvantagesParams& p, Stream stream) {
  return launch_group_advantages<host::kThreads, 2 * host::kThreads>(p, stream);
}
inline Status policy_loss(const PolicyLossParams& p, unsigned blocks, Stream stream) {
  return launch_policy_loss<host::kThreads, host::kThreads>(p, blocks, host::limits(132), stream);
}
inline Status scale(const ScaleParams& p, Stream stream) {
  return launch_scale<host::kThreads>(p, host::limits(2), stream);  // so that blocks take turns
}
inline Status token_stats(const TokenStatsParams& p, Stream stream) {
  return launch_token_stats<host::kThreads>(p, host::limits(40), stream);
}
inline Status token_stats_backward(const TokenStatsBackwardParams& p, Stream stream) {
  return launch_token_stats_backward<host::kThreads>(p, host::limits(40), stream);
}
inline Status logits_policy_loss(const LogitsPolicyLossParams& p, Stream stream) {
  return launch_logits_policy_loss<host::kThreads>(p, host::limits(40), stream);
}

}  // namespace fastrl::cuda
