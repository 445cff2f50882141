// The recurrence of GAE over a run of tokens, as a map from the state behind the run to the state
// before it: A' = constant + trace A + next V, V' = value. Maps of neighboring runs compose.
#pragma once

#include "../device/block_sum.cuh"

namespace fastrl::cuda {

struct GaeMap {
  // A sequence ends inside the run: nothing from behind enters.
  static constexpr uint32_t kClosed = 1;
  // There are valid tokens before that end; `value` belongs to the first.
  static constexpr uint32_t kSeen = 2;
  // Whether the advantage, and the value, from behind the run enter. If they do not, they may be
  // NaN, so a factor of 0 is not enough.
  static constexpr uint32_t kTrace = 4, kNext = 8;

  float constant, trace, next, value;
  float bootstrap;  // the value after the last valid token of a sequence, if there is one per token
  uint32_t flags;

  __device__ static GaeMap identity() { return {0, 1, 0, 0, 0, kTrace}; }
  __device__ bool has(uint32_t flag) const { return (flags & flag) != 0; }

  // A sequence ends here; `after` follows its last token, unless bootstraps are per token.
  __device__ static GaeMap end_of_sequence(float after, bool per_token) {
    return {0, 0, 0, after, 0, per_token ? kClosed : kClosed | kSeen};
  }

  // Adds one valid token before the run.
  __device__ void precede(float reward, float token_value, bool terminated, bool truncated,
                          bool per_token, float own_bootstrap, float gamma, float decay) {
    const bool cut = terminated || truncated;
    const bool own = per_token && (truncated || (has(kClosed) && !has(kSeen)));
    const bool open = !terminated && !own && !has(kSeen) && !has(kClosed);
    float after = 0.0f;
    if (!terminated && !open) after = own ? own_bootstrap : value;
    constant = reward + gamma * after - token_value + (cut ? 0.0f : decay * constant);
    uint32_t kept = flags & kClosed;
    if (!cut) kept |= flags & (kTrace | kNext);
    trace *= decay;
    next *= decay;
    if (open) {
      kept |= kNext;
      next = gamma;
      bootstrap = own_bootstrap;
    }
    value = token_value;
    flags = kept | kSeen;
  }
};

// `left` comes before `right`.
__device__ __forceinline__ GaeMap compose(const GaeMap& left, const GaeMap& right) {
  using M = GaeMap;
  if (left.has(M::kClosed)) return left;
  GaeMap map = left;
  map.flags = (left.flags | right.flags) & (M::kSeen | M::kClosed);
  if (left.has(M::kTrace)) {
    map.constant += left.trace * right.constant;
    map.trace = left.trace * right.trace;
    map.flags |= right.flags & M::kTrace;
  }
  const bool known = right.has(M::kSeen) || right.has(M::kClosed);
  if (left.has(M::kNext)) {
    if (known) {
      map.constant += left.next * (right.has(M::kSeen) ? right.value : left.bootstrap);
    } else {
      map.flags |= M::kNext;
    }
  }
  if (right.has(M::kNext)) {
    map.next = left.trace * right.next;
    map.bootstrap = right.bootstrap;
    if (left.has(M::kTrace)) map.flags |= M::kNext;
  }
  if (!left.has(M::kSeen)) map.value = right.value;
  return map;
}

// Each lane receives the composition of its map and the maps of the lanes after it.
__device__ __forceinline__ GaeMap compose_lanes(GaeMap map) {
  const int lane = thread_index() % kWarp;
  FASTRL_UNROLL
  for (int by = 1; by < kWarp; by *= 2) {
    const GaeMap after = shuffled(map, [&](uint32_t word) { return shuffle_down(word, by); });
    if (lane + by < kWarp) map = compose(map, after);
  }
  return map;
}

}  // namespace fastrl::cuda
