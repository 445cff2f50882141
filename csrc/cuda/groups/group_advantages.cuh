// Advantages of rewards relative to their group, in phases that the whole grid must finish in
// order: one launch per phase, or a single block for few rewards.
//
// Consecutive groups: a warp or a block takes one. Arbitrary ids: a hash table gathers the groups.
// Sums over several blocks are integers, so their order does not matter.
#pragma once

#include "group_advantages.h"
#include "group_moments.cuh"

namespace fastrl::cuda {

// Writes all results of one reward; a batch deviation divides later.
__device__ __forceinline__ void write_reward(const GroupAdvantagesParams& p, int64_t i,
                                             const GroupOf& group) {
  const float reward = p.rewards[i], n = static_cast<float>(group.extent.count);
  const bool alone = group.extent.count == 1, finite = group.extent.finite();
  const bool raw = p.kinds.singleton == Singleton::kRaw;
  float advantage = reward;
  if (p.kinds.baseline != Baseline::kNone) {
    advantage = finite ? group.fixed.real(group.fixed.above_lowest(reward) - group.mean_fixed)
                       : reward - group.mean;
    if (p.kinds.baseline == Baseline::kLeaveOneOut && !alone) advantage *= n / (n - 1.0f);
  }
  const bool by_mean = p.kinds.scale == Scale::kMean;
  if ((p.kinds.scale == Scale::kGroup || by_mean) && (advantage != 0.0f || !finite)) {
    advantage /= (by_mean ? group.mean : group.std) + p.eps;  // 0 / 0 is 0 here
  }
  if (alone) advantage = raw ? reward : 0.0f * reward;
  p.advantages[i] = advantage;
  p.mean[i] = group.mean;
  p.std[i] = group.std;
  p.informative[i] = finite && (alone ? raw : group.extent.high() != group.extent.low());
}

__device__ __forceinline__ bool is_finite(float x) { return x - x == 0.0f; }

__device__ __forceinline__ Extent extent_of(const GroupEntry& entry) {
  return {entry.highest, entry.not_lowest, entry.count};
}
__device__ __forceinline__ void add_to(GroupEntry* entry, const Extent& extent) {
  atomic_max(&entry->highest, extent.highest);
  atomic_max(&entry->not_lowest, extent.not_lowest);
  atomic_add(&entry->count, extent.count);
}

// The rewards of this thread.
template <int kThreads>
__device__ __forceinline__ int64_t first_of_thread() {
  return int64_t{block_index()} * kThreads + thread_index();
}
template <int kThreads>
__device__ __forceinline__ int64_t step_of_grid() {
  return int64_t{num_blocks()} * kThreads;
}
template <int kThreads, typename Body>
__device__ __forceinline__ void for_each_reward(const GroupAdvantagesParams& p, const Body& body) {
  for (int64_t i = first_of_thread<kThreads>(); i < p.count; i += step_of_grid<kThreads>()) body(i);
}

// --- consecutive groups; a team is a warp, or the whole block

template <int kThreads, bool kWholeBlock, typename T>
__device__ __forceinline__ T sum_team(T x, Extent* shared) {
  if (kWholeBlock) return sum_block<kThreads>(x, reinterpret_cast<T*>(shared));
  return shuffled(sum_warp(x), [](uint32_t word) { return shuffle(word, 0); });
}

// Adds the rewards that the threads of a block have seen to those of the batch.
template <int kThreads>
__device__ __forceinline__ void extend_batch(const GroupAdvantagesParams& p, Extent extent,
                                             Extent* shared) {
  extent = sum_block<kThreads>(extent, shared);
  if (thread_index() == 0 && extent.count) add_to(p.entries + p.num_entries, extent);
}

template <int kThreads, bool kWholeBlock>
__device__ __forceinline__ void consecutive_groups(const GroupAdvantagesParams& p, Extent* shared) {
  constexpr int kTeam = kWholeBlock ? kThreads : kWarp, kTeams = kThreads / kTeam;
  const int member = thread_index() % kTeam;
  Extent batch{};
  for (int64_t g = int64_t{block_index()} * kTeams + thread_index() / kTeam;
       g * p.group_size < p.count; g += int64_t{num_blocks()} * kTeams) {
    const int64_t begin = g * p.group_size, end = begin + p.group_size, first = begin + member;
    Extent extent{};
    for (int64_t i = first; i < end; i += kTeam) extent.add(Extent::of(p.rewards[i]));
    extent = sum_team<kThreads, kWholeBlock>(extent, shared);
    FixedSum sum{}, squares{};
    const FixedPoint fixed(extent, p.group_size);
    if (extent.finite()) {
      for (int64_t i = first; i < end; i += kTeam) sum.value += fixed.above_lowest(p.rewards[i]);
      sum = sum_team<kThreads, kWholeBlock>(sum, shared);
      const long long mean = sum.value / p.group_size;
      for (int64_t i = first; i < end; i += kTeam) {
        squares.value += fixed.square(fixed.above_lowest(p.rewards[i]) - mean);
      }
      squares = sum_team<kThreads, kWholeBlock>(squares, shared);
    }
    const GroupOf group(extent, fixed, sum.value, squares.value, p.correction);
    for (int64_t i = first; i < end; i += kTeam) write_reward(p, i, group);
    if (member == 0 && is_finite(group.mean)) batch.add(extent);
  }
  if (p.kinds.scale == Scale::kBatch) extend_batch<kThreads>(p, batch, shared);
}

// --- arbitrary ids

// The entry of a reward's group, claimed by the first member that arrives.
__device__ __forceinline__ uint32_t find_entry(const GroupAdvantagesParams& p, uint32_t i) {
  const int64_t id = p.group_ids[i];
  uint64_t hash = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 32;
  const uint32_t mask = static_cast<uint32_t>(p.num_entries - 1);
  for (uint32_t at = static_cast<uint32_t>(hash) & mask;; at = (at + 1) & mask) {
    const uint32_t owner = atomic_compare_and_swap(&p.entries[at].owner, 0u, i + 1);
    if (owner == 0 || p.group_ids[owner - 1] == id) return at;
  }
}

// Every reward in a group that is finite, in the fixed point of that group.
template <int kThreads, typename Body>
__device__ __forceinline__ void for_each_finite(const GroupAdvantagesParams& p, const Body& body) {
  for_each_reward<kThreads>(p, [&](int64_t i) {
    GroupEntry& entry = p.entries[p.entry_of[i]];
    const Extent extent = extent_of(entry);
    if (!extent.finite()) return;
    const FixedPoint fixed(extent, p.count);
    body(entry, fixed, fixed.above_lowest(p.rewards[i]));
  });
}

// --- the phases

enum class Phase {
  kClear,
  kConsecutiveOfWarps,
  kConsecutiveOfBlocks,
  kFindGroups,
  kSumGroups,
  kSquareGroups,
  kWrite,
  // with Scale::kBatch: the deviation of all rewards whose group is finite
  kSumBatch,
  kSquareBatch,
  kDivide
};
template <Phase kPhase>
constexpr bool kOfBatch = kPhase >= Phase::kSumBatch;

template <Phase kPhase, int kThreads>
__device__ __forceinline__ void run_phase(const GroupAdvantagesParams& p, Extent* shared) {
  if (kOfBatch<kPhase> && p.kinds.scale != Scale::kBatch) return;
  FixedSum* shared_sum = reinterpret_cast<FixedSum*>(shared);
  GroupEntry* batch = p.entries + p.num_entries;
  if constexpr (kPhase == Phase::kClear) {
    for (int64_t e = first_of_thread<kThreads>(); e <= p.num_entries;
         e += step_of_grid<kThreads>()) {
      p.entries[e] = {};
    }
  } else if constexpr (kPhase == Phase::kConsecutiveOfWarps) {
    consecutive_groups<kThreads, false>(p, shared);
  } else if constexpr (kPhase == Phase::kConsecutiveOfBlocks) {
    consecutive_groups<kThreads, true>(p, shared);
  } else if constexpr (kPhase == Phase::kFindGroups) {
    for_each_reward<kThreads>(p, [&](int64_t i) {
      const uint32_t at = find_entry(p, static_cast<uint32_t>(i));
      p.entry_of[i] = at;
      add_to(p.entries + at, Extent::of(p.rewards[i]));
    });
  } else if constexpr (kPhase == Phase::kSumGroups) {
    for_each_finite<kThreads>(p, [&](GroupEntry& entry, const FixedPoint&, long long x) {
      atomic_add(&entry.sum, static_cast<unsigned long long>(x));
    });
  } else if constexpr (kPhase == Phase::kSquareGroups) {
    for_each_finite<kThreads>(p, [&](GroupEntry& entry, const FixedPoint& fixed, long long x) {
      const long long mean = static_cast<long long>(entry.sum) / entry.count;
      atomic_add(&entry.squares, static_cast<unsigned long long>(fixed.square(x - mean)));
    });
  } else if constexpr (kPhase == Phase::kWrite) {
    Extent finite{};
    for_each_reward<kThreads>(p, [&](int64_t i) {
      const GroupEntry& entry = p.entries[p.entry_of[i]];
      const Extent extent = extent_of(entry);
      const GroupOf group(extent, FixedPoint(extent, p.count), static_cast<long long>(entry.sum),
                          static_cast<long long>(entry.squares), p.correction);
      write_reward(p, i, group);
      if (is_finite(group.mean)) finite.add(Extent::of(p.rewards[i]));
    });
    if (p.kinds.scale == Scale::kBatch) extend_batch<kThreads>(p, finite, shared);
  } else {
    const Extent extent = extent_of(*batch);
    const FixedPoint fixed(extent, extent.count);
    if constexpr (kPhase == Phase::kDivide) {
      const float freedom = static_cast<float>(extent.count) - p.correction;
      const float std = fixed.root(static_cast<long long>(batch->squares), freedom);
      for_each_reward<kThreads>(p, [&](int64_t i) {
        const bool alone = p.group_ids ? p.entries[p.entry_of[i]].count == 1 : p.group_size == 1;
        if (alone || (p.advantages[i] == 0.0f && is_finite(p.mean[i]))) return;
        p.advantages[i] /= std + p.eps;
      });
    } else {
      constexpr bool kSquares = kPhase == Phase::kSquareBatch;
      const long long mean =
          kSquares && extent.count ? static_cast<long long>(batch->sum) / extent.count : 0;
      FixedSum sum{};
      for_each_reward<kThreads>(p, [&](int64_t i) {
        if (!is_finite(p.mean[i])) return;
        const long long x = fixed.above_lowest(p.rewards[i]);
        sum.value += kSquares ? fixed.square(x - mean) : x;
      });
      sum = sum_block<kThreads>(sum, shared_sum);
      if (thread_index() == 0) {
        atomic_add(kSquares ? &batch->squares : &batch->sum,
                   static_cast<unsigned long long>(sum.value));
      }
    }
  }
}

// --- launches

// A launch of one phase, or, by a single block, of several.
template <int kThreads, Phase... kPhases>
__global__ void __launch_bounds__(kThreads)
    group_advantages_kernel(const __grid_constant__ GroupAdvantagesParams p) {
  Extent* shared = shared_memory<Extent>();
  ((run_phase<kPhases, kThreads>(p, shared), sync_block()), ...);
}

// The size from which a consecutive group gets a whole block; smaller groups get a warp.
template <int kThreads>
constexpr int64_t kWholeBlockFrom = 4 * kThreads;

// The most rewards that a single block takes.
template <int kThreads>
constexpr int64_t kSingleBlockTo = 8 * kThreads;

template <int kThreads, Phase kPhase>
Status launch_phase(const GroupAdvantagesParams& p, Stream stream) {
  const bool batch = p.kinds.scale == Scale::kBatch;
  if (kOfBatch<kPhase> && !batch) return kSuccess;
  if (kPhase == Phase::kClear && !batch && !p.group_ids) return kSuccess;
  constexpr int64_t kMostBlocks = 1024;  // each adds to the batch
  int64_t blocks = (p.count + kThreads - 1) / kThreads;
  blocks = blocks < kMostBlocks ? blocks : kMostBlocks;
  const int64_t groups = p.group_ids ? 0 : p.count / p.group_size;
  if (kPhase == Phase::kConsecutiveOfBlocks) blocks = groups;
  if (kPhase == Phase::kConsecutiveOfWarps) {
    blocks = (groups + kThreads / kWarp - 1) / (kThreads / kWarp);
  }
  const LaunchShape shape{static_cast<unsigned>(blocks), kThreads, 1,
                          kThreads / kWarp * (sizeof(Extent) + sizeof(FixedSum))};
  return launch(group_advantages_kernel<kThreads, kPhase>, shape, p, stream);
}

template <int kThreads, int kThreadsAlone, Phase... kPhases>
Status launch_phases(const GroupAdvantagesParams& p, bool single_block, Stream stream) {
  if (single_block) {
    const LaunchShape shape{1, kThreadsAlone, 1,
                            kThreadsAlone / kWarp * (sizeof(Extent) + sizeof(FixedSum))};
    return launch(group_advantages_kernel<kThreadsAlone, kPhases...>, shape, p, stream);
  }
  Status status = kSuccess;
  ((status = status == kSuccess ? launch_phase<kThreads, kPhases>(p, stream) : status), ...);
  return status;
}

template <int kThreads = 256, int kThreadsAlone = 512>
Status launch_group_advantages(const GroupAdvantagesParams& p, Stream stream,
                               int64_t single_block_to = kSingleBlockTo<kThreadsAlone>) {
  if (p.count == 0) return kSuccess;
  // consecutive groups alone are one launch anyway
  const bool phases = p.group_ids || p.kinds.scale == Scale::kBatch;
  const bool single_block = phases && p.count <= single_block_to;
  if (p.group_ids) {
    return launch_phases<kThreads, kThreadsAlone, Phase::kClear, Phase::kFindGroups,
                         Phase::kSumGroups, Phase::kSquareGroups, Phase::kWrite, Phase::kSumBatch,
                         Phase::kSquareBatch, Phase::kDivide>(p, single_block, stream);
  }
  if (p.group_size < kWholeBlockFrom<kThreads>) {
    return launch_phases<kThreads, kThreadsAlone, Phase::kClear, Phase::kConsecutiveOfWarps,
                         Phase::kSumBatch, Phase::kSquareBatch, Phase::kDivide>(p, single_block,
                                                                                stream);
  }
  return launch_phases<kThreads, kThreadsAlone, Phase::kClear, Phase::kConsecutiveOfBlocks,
                       Phase::kSumBatch, Phase::kSquareBatch, Phase::kDivide>(p, single_block,
                                                                              stream);
}

}  // namespace fastrl::cuda
