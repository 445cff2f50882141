// Generalized advantage estimation as a scan over all tokens of the batch, last to first.
//
// Sequences follow one another, so one scan covers them all. A block scans a chunk, whatever
// sequences it holds, and composes the maps of the chunks behind it in their order, so the bits do
// not depend on which block was first.
#pragma once

#include "gae_map.cuh"
#include "gae_run.cuh"

namespace fastrl::cuda {

static_assert(sizeof(GaeMap) == kGaeMapBytes, "the operator allocates the maps");

template <int kThreads>
struct GaeShared {
  Vec16 staged[kThreads * kVectors];
  GaeMap warps[kThreads / kWarp];
  GaeMap behind;  // the map of everything behind the chunk
  uint32_t chunk;
};

// The tokens of one thread.
template <bool kPerToken>
struct GaeTokens {
  float reward[kRun], value[kRun], bootstrap[kPerToken ? kRun : 1];
  uint32_t active, terminated, truncated, ends;  // a bit per token; ends: the last of a sequence
  uint32_t sequence;                             // of the last token

  __device__ __forceinline__ void find_ends(const GaeParams& p, int64_t first) {
    ends = 0;
    sequence = 0;
    if (first >= p.sequences.tokens) return;
    const int64_t last =
        first + kRun <= p.sequences.tokens ? first + kRun - 1 : p.sequences.tokens - 1;
    sequence = static_cast<uint32_t>(p.sequences.of(last));
    // not so if cu_seqlens end too early
    const bool inside = sequence < p.sequences.count;
    if (inside && p.sequences.begin(sequence + 1) == last + 1) ends |= 1u << (last - first);
    for (int64_t s = sequence; s > 0; --s) {
      const int64_t begin = p.sequences.begin(s);
      if (begin <= first) break;
      if (begin <= last) ends |= 1u << (begin - 1 - first);  // where cu_seqlens rise
    }
  }
  __device__ __forceinline__ bool is_plain() const {
    return active == 0xffffu && (terminated | truncated | ends) == 0;
  }

  // Composes the run with `map` behind it; `at` gets the advantage of every token.
  template <typename At>
  __device__ __forceinline__ GaeMap scan(const GaeParams& p, int64_t first, GaeMap map,
                                         const At& at) const {
    if (is_plain()) return scan_plain(p, map, at);
    int64_t s = sequence;
    FASTRL_UNROLL
    for (int k = kRun - 1; k >= 0; --k) {
      if (ends >> k & 1) {
        while (s > 0 && p.sequences.begin(s) > first + k) --s;
        const bool has_after = p.in.bootstrap == Bootstrap::kSequence && s < p.sequences.count;
        const float after = has_after ? p.in.bootstrap_values[s] : 0.0f;
        map = GaeMap::end_of_sequence(after, kPerToken);
      }
      if (active >> k & 1) {
        map.precede(reward[k], value[k], terminated >> k & 1, truncated >> k & 1, kPerToken,
                    bootstrap[kPerToken ? k : 0], p.gamma, p.decay);
      }
      at(k, map.constant);
    }
    return map;
  }

  // The same if all tokens are valid and no sequence ends.
  template <typename At>
  __device__ __forceinline__ GaeMap scan_plain(const GaeParams& p, GaeMap map, const At& at) const {
    map.precede(reward[kRun - 1], value[kRun - 1], false, false, kPerToken,
                bootstrap[kPerToken ? kRun - 1 : 0], p.gamma, p.decay);
    at(kRun - 1, map.constant);
    FASTRL_UNROLL
    for (int k = kRun - 2; k >= 0; --k) {
      const float delta = reward[k] + p.gamma * value[k + 1] - value[k];
      map.constant = delta + p.decay * map.constant;
      map.trace *= p.decay;
      map.next *= p.decay;
      at(k, map.constant);
    }
    map.value = value[0];
    return map;
  }
};

// The composition of all chunks behind `chunk`, up to the end of a sequence; by one warp.
__device__ __forceinline__ GaeMap look_behind(const GaeParams& p, int64_t chunk, int64_t chunks) {
  const GaeMap* maps = static_cast<const GaeMap*>(p.maps);
  const uint32_t* flags = p.ticket_and_flags + 1;
  GaeMap behind = GaeMap::identity();
  int window = 1;  // most often a sequence ends in the very next chunk
  for (int64_t next = chunk + 1; next < chunks; next += window, window = kWarp) {
    const int lane = thread_index() % kWarp;
    GaeMap map = GaeMap::identity();
    if (lane < window && next + lane < chunks) {
      while (load_acquire(flags + next + lane) == 0) pause();
      map = maps[next + lane];
    }
    sync_warp();
    map = compose_lanes(map);
    map = shuffled(map, [](uint32_t word) { return shuffle(word, 0); });
    behind = compose(behind, map);
    if (behind.has(GaeMap::kClosed)) break;
  }
  return behind;
}

// The map of everything behind this thread's run: later runs of the block, then the other chunks.
template <int kThreads>
__device__ __forceinline__ GaeMap scan_block(const GaeParams& p, const GaeMap& own, int64_t chunk,
                                             int64_t chunks, GaeShared<kThreads>* shared) {
  constexpr int kWarps = kThreads / kWarp;
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const GaeMap from_here = compose_lanes(own);
  GaeMap behind = shuffled(from_here, [](uint32_t word) { return shuffle_down(word, 1); });
  if (lane == kWarp - 1) behind = GaeMap::identity();
  if (lane == 0) shared->warps[warp] = from_here;
  sync_block();
  if (warp == 0) {
    if (chunks > 1 && lane == 0) {
      GaeMap whole = GaeMap::identity();
      for (int w = kWarps - 1; w >= 0; --w) whole = compose(shared->warps[w], whole);
      static_cast<GaeMap*>(p.maps)[chunk] = whole;
      store_release(p.ticket_and_flags + 1 + chunk, 1u);
    }
    sync_warp();
    const GaeMap other_chunks = look_behind(p, chunk, chunks);
    if (lane == 0) shared->behind = other_chunks;
  }
  sync_block();
  GaeMap other_warps = shared->behind;
  for (int w = kWarps - 1; w > warp; --w) other_warps = compose(shared->warps[w], other_warps);
  return compose(behind, other_warps);
}

template <int kThreads, bool kPerToken>
__global__ void __launch_bounds__(kThreads, kPerToken ? 2 : 3)
    gae_scan(const __grid_constant__ GaeParams p) {
  GaeShared<kThreads>* shared = shared_memory<GaeShared<kThreads>>();
  const int64_t chunks = num_blocks();
  int64_t chunk = 0;
  if (chunks > 1) {
    // tickets ensure that the chunks that this one waits for are already in progress
    if (thread_index() == 0) shared->chunk = atomic_add(p.ticket_and_flags, 1u);
    sync_block();
    chunk = chunks - 1 - shared->chunk;
  }
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const int64_t of_warp = kWarp * kRun, warp_first = chunk * (kThreads * kRun) + warp * of_warp;
  const Run run{p, warp_first + lane * kRun,
                p.aligned && warp_first + of_warp <= p.sequences.tokens,
                shared->staged + warp * (kWarp * kVectors)};
  GaeTokens<kPerToken> tokens;
  const Run::Fetched rewards = run.fetch(p.in.rewards), values = run.fetch(p.in.values);
  tokens.active = run.load_bits(p.in.mask, true) & run.existing();
  tokens.terminated = run.load_bits(p.in.terminated, false);
  tokens.truncated = run.load_bits(p.in.truncated, false);
  if constexpr (kPerToken) run.unpack(run.fetch(p.in.bootstrap_values), tokens.bootstrap);
  run.unpack(rewards, tokens.reward);
  run.unpack(values, tokens.value);
  tokens.find_ends(p, run.first);

  const GaeMap own = tokens.scan(p, run.first, GaeMap::identity(), [](int, float) {});
  const GaeMap behind = scan_block<kThreads>(p, own, chunk, chunks, shared);
  float result[kRun];
  tokens.scan(p, run.first, behind, [&](int k, float advantage) {
    result[k] = tokens.active >> k & 1 ? advantage : 0.0f;
  });
  run.store(p.advantages, result);
  FASTRL_UNROLL
  for (int k = 0; k < kRun; ++k) {
    result[k] = tokens.active >> k & 1 ? result[k] + tokens.value[k] : 0.0f;
  }
  run.store(p.returns, result);
}

inline bool on_vector_boundaries(const GaeParams& p) {
  uintptr_t bits = 0;
  const void* per_token = p.in.bootstrap == Bootstrap::kToken ? p.in.bootstrap_values : nullptr;
  const void* all[] = {p.in.rewards,   p.in.values,  p.in.mask, p.in.terminated,
                       p.in.truncated, p.advantages, p.returns, per_token};
  for (const void* tokens : all) bits |= reinterpret_cast<uintptr_t>(tokens);
  return bits % 16 == 0;
}

// Scratch and ticket_and_flags are for gae_chunks(...) chunks.
template <int kThreads = kGaeChunk / kRun>
Status launch_gae(GaeParams params, Stream stream) {
  if (params.sequences.tokens == 0) return kSuccess;
  const int64_t chunk = kThreads * kRun;
  LaunchShape shape{static_cast<unsigned>((params.sequences.tokens + chunk - 1) / chunk), kThreads};
  shape.shared_bytes = sizeof(GaeShared<kThreads>);
  params.aligned = on_vector_boundaries(params);
  return launch(params.in.bootstrap == Bootstrap::kToken ? gae_scan<kThreads, true>
                                                         : gae_scan<kThreads, false>,
                shape, params, stream);
}

}  // namespace fastrl::cuda
