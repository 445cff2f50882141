// Reductions over a warp and a block in an order that depends on nothing but the thread's index.
#pragma once

#include "primitives.cuh"

namespace fastrl::cuda {

// `combine(mine, theirs)`, theirs from the lane above. The result is in lane 0.
template <typename T, typename Combine>
__device__ __forceinline__ T reduce_warp(T x, const Combine& combine) {
  for (int by = kWarp / 2; by > 0; by /= 2) x = combine(x, shuffle_down(x, by));
  return x;
}

// The result is in thread 0; `scratch` in shared memory holds one T per warp, and is free again
// after the next barrier.
template <int kThreads, typename T, typename Combine>
__device__ __forceinline__ T reduce_block(T x, T* scratch, const Combine& combine) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0, "whole warps");
  x = reduce_warp(x, combine);
  if (thread_index() % kWarp == 0) scratch[thread_index() / kWarp] = x;
  sync_block();
  if (thread_index() == 0) {
    for (int warp = 1; warp < kWarps; ++warp) x = combine(x, scratch[warp]);
  }
  return x;
}

}  // namespace fastrl::cuda
