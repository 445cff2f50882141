// Advantages of rewards relative to their group, in one launch.
//
// Consecutive groups: a warp or a block takes one. Arbitrary ids: one block gathers the groups in a
// hash table. With the deviation of the whole batch, the block that finishes last divides by it.
#pragma once

#include "group_advantages.h"
#include "group_moments.cuh"

namespace fastrl::cuda {

// What the members of a group share.
struct GroupOf {
  Extent extent;
  FixedPoint fixed;
  long long mean_fixed;
  float mean, std;

  __device__ GroupOf(const Extent& range, const FixedPoint& point, long long sum, long long squares,
                     float correction)
      : extent(range), fixed(point) {
    const float n = static_cast<float>(extent.count);
    mean_fixed = sum / static_cast<long long>(extent.count);
    mean = extent.low() + fixed.real(mean_fixed);
    std = fixed.root(squares, n - correction);
    if (!extent.finite()) {
      mean = extent.low() + extent.high();  // the infinity or NaN that is there
      std = bits_to_float(0x7fc00000u);
    }
  }
};

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
  if (p.kinds.scale == Scale::kGroup && (advantage != 0.0f || !finite)) {  // 0 / 0 is 0 here
    advantage /= group.std + p.eps;
  }
  if (alone) advantage = raw ? reward : 0.0f * reward;
  p.advantages[i] = advantage;
  p.mean[i] = group.mean;
  p.std[i] = group.std;
  p.informative[i] = finite && (alone ? raw : group.extent.high() != group.extent.low());
}

// Divides by the deviation of all rewards whose group is finite; by one block.
template <int kThreads, typename Alone>
__device__ __forceinline__ void divide_by_batch(const GroupAdvantagesParams& p, Extent* shared,
                                                const Alone& alone) {
  FixedSum* shared_sum = reinterpret_cast<FixedSum*>(shared);
  const auto for_each_known = [&](const auto& body) {
    for (int64_t i = thread_index(); i < p.count; i += kThreads) {
      if (p.mean[i] - p.mean[i] == 0.0f) body(p.rewards[i]);
    }
  };
  Extent extent{};
  for_each_known([&](float x) { extent.add(Extent::of(x)); });
  extent = sum_block<kThreads>(extent, shared);
  float std = 0.0f;
  if (extent.count) {
    const FixedPoint fixed(extent, extent.count);
    FixedSum sum{}, squares{};
    for_each_known([&](float x) { sum.value += fixed.above_lowest(x); });
    sum = sum_block<kThreads>(sum, shared_sum);
    const long long mean = sum.value / static_cast<long long>(extent.count);
    for_each_known([&](float x) { squares.value += fixed.square(fixed.above_lowest(x) - mean); });
    squares = sum_block<kThreads>(squares, shared_sum);
    std = fixed.root(squares.value, static_cast<float>(extent.count) - p.correction);
  }
  for (int64_t i = thread_index(); i < p.count; i += kThreads) {
    const bool finite = p.mean[i] - p.mean[i] == 0.0f;
    if (alone(i) || (p.advantages[i] == 0.0f && finite)) continue;
    p.advantages[i] /= std + p.eps;
  }
}

// --- consecutive groups; a team is a warp, or the whole block

template <int kThreads, bool kWholeBlock, typename T>
__device__ __forceinline__ T sum_team(T x, Extent* shared) {
  if (kWholeBlock) return sum_block<kThreads>(x, reinterpret_cast<T*>(shared));
  return shuffled(sum_warp(x), [](uint32_t word) { return shuffle(word, 0); });
}

template <int kThreads, bool kWholeBlock>
__global__ void __launch_bounds__(kThreads)
    advantages_of_consecutive(const __grid_constant__ GroupAdvantagesParams p) {
  constexpr int kTeam = kWholeBlock ? kThreads : kWarp, kTeams = kThreads / kTeam;
  Extent* shared = shared_memory<Extent>();
  const int64_t g = int64_t{block_index()} * kTeams + thread_index() / kTeam;
  if (g * p.group_size < p.count) {
    const int64_t begin = g * p.group_size, end = begin + p.group_size;
    const int64_t first = begin + thread_index() % kTeam;
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
  }
  if (p.kinds.scale != Scale::kBatch) return;
  if (num_blocks() > 1 && !last_block(p.arrived, reinterpret_cast<uint32_t*>(shared))) return;
  sync_block();
  divide_by_batch<kThreads>(p, shared, [&](int64_t) { return p.group_size == 1; });
}

// --- arbitrary ids

// The entry of a reward's group, claimed by whichever member comes first.
__device__ __forceinline__ uint32_t find_entry(const GroupAdvantagesParams& p, uint32_t i) {
  const int64_t id = p.group_ids[i];
  uint64_t hash = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 32;
  const uint32_t mask = static_cast<uint32_t>(p.num_entries - 1);
  for (uint32_t at = static_cast<uint32_t>(hash) & mask;; at = (at + 1) & mask) {
    const uint32_t owner = atomic_compare_and_swap(&p.entries[at].owner, kNobody, i);
    if (owner == kNobody || p.group_ids[owner] == id) return at;
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    advantages_of_ids(const __grid_constant__ GroupAdvantagesParams p) {
  Extent* shared = shared_memory<Extent>();
  const int64_t first = thread_index();
  const auto extent_of = [&](const GroupEntry& entry) {
    return Extent{entry.highest, entry.not_lowest, entry.count};
  };
  for (int64_t e = first; e < p.num_entries; e += kThreads) p.entries[e] = {kNobody, 0, 0, 0, 0, 0};
  sync_block();
  for (int64_t i = first; i < p.count; i += kThreads) {
    const uint32_t at = find_entry(p, static_cast<uint32_t>(i));
    const Extent own = Extent::of(p.rewards[i]);
    p.entry_of[i] = at;
    atomic_max(&p.entries[at].highest, own.highest);
    atomic_max(&p.entries[at].not_lowest, own.not_lowest);
    atomic_add(&p.entries[at].count, 1u);
  }
  sync_block();
  for (int64_t i = first; i < p.count; i += kThreads) {
    GroupEntry& entry = p.entries[p.entry_of[i]];
    const Extent extent = extent_of(entry);
    if (!extent.finite()) continue;
    const FixedPoint fixed(extent, p.count);
    atomic_add(&entry.sum, static_cast<unsigned long long>(fixed.above_lowest(p.rewards[i])));
  }
  sync_block();
  for (int64_t i = first; i < p.count; i += kThreads) {
    GroupEntry& entry = p.entries[p.entry_of[i]];
    const Extent extent = extent_of(entry);
    if (!extent.finite()) continue;
    const FixedPoint fixed(extent, p.count);
    const long long mean = static_cast<long long>(entry.sum) / entry.count;
    const long long square = fixed.square(fixed.above_lowest(p.rewards[i]) - mean);
    atomic_add(&entry.squares, static_cast<unsigned long long>(square));
  }
  sync_block();
  for (int64_t i = first; i < p.count; i += kThreads) {
    const GroupEntry& entry = p.entries[p.entry_of[i]];
    const Extent extent = extent_of(entry);
    const GroupOf group(extent, FixedPoint(extent, p.count), static_cast<long long>(entry.sum),
                        static_cast<long long>(entry.squares), p.correction);
    write_reward(p, i, group);
  }
  if (p.kinds.scale != Scale::kBatch) return;
  sync_block();
  divide_by_batch<kThreads>(p, shared,
                            [&](int64_t i) { return p.entries[p.entry_of[i]].count == 1; });
}

// The size from which a consecutive group gets a whole block; smaller ones get a warp.
template <int kThreads>
constexpr int64_t kWholeBlockFrom = 4 * kThreads;

template <int kThreads = 256, int kThreadsOfIds = 1024>
Status launch_group_advantages(const GroupAdvantagesParams& p, Stream stream) {
  if (p.count == 0) return kSuccess;
  LaunchShape shape{1, kThreadsOfIds};
  auto* kernel = advantages_of_ids<kThreadsOfIds>;
  if (!p.group_ids) {
    const bool whole_block = p.group_size >= kWholeBlockFrom<kThreads>;
    const int64_t groups = p.count / p.group_size, teams = whole_block ? 1 : kThreads / kWarp;
    shape.blocks = static_cast<unsigned>((groups + teams - 1) / teams);
    shape.threads = kThreads;
    kernel = whole_block ? advantages_of_consecutive<kThreads, true>
                         : advantages_of_consecutive<kThreads, false>;
  }
  shape.shared_bytes = shape.threads / kWarp * (sizeof(Extent) + sizeof(FixedSum));
  return launch(kernel, shape, p, stream);
}

}  // namespace fastrl::cuda
