// Sums over a block and over a grid: in a fixed order, compensated for rounding.
#pragma once

#include <cstring>

#include "primitives.cuh"

namespace fastrl::cuda {

// A float and the rounding error of its sum, computed without arithmetic in double.
struct Sum {
  float high, low;

  __device__ void add(float x) {
    const float total = high + x, grown = total - high;
    low += (high - (total - grown)) + (x - grown);
    high = total;
  }
  __device__ void add(const Sum& other) {
    add(other.high);
    low += other.low;
  }
  // the error of an infinite or NaN sum is NaN
  __device__ float total() const { return high - high == 0.0f ? high + low : high; }
};

// Shuffles move one word; this moves a struct of words.
template <typename T, typename Shuffle>
__device__ __forceinline__ T shuffled(const T& x, const Shuffle& shuffle_word) {
  static_assert(sizeof(T) % sizeof(uint32_t) == 0, "whole words");
  uint32_t words[sizeof(T) / sizeof(uint32_t)];
  memcpy(words, &x, sizeof(T));
  FASTRL_UNROLL
  for (uint32_t& word : words) word = shuffle_word(word);
  T result;
  memcpy(&result, words, sizeof(T));
  return result;
}

// Lane 0 receives the sum over its warp.
template <typename T>
__device__ __forceinline__ T sum_warp(T x) {
  FASTRL_UNROLL
  for (int by = kWarp / 2; by > 0; by /= 2) {
    x.add(shuffled(x, [&](uint32_t word) { return shuffle_down(word, by); }));
  }
  return x;
}

// Every thread receives the sum over the block; `shared` holds one T per warp. T{} adds nothing.
template <int kThreads, typename T>
__device__ __forceinline__ T sum_block(T x, T* shared) {
  constexpr int kWarps = kThreads / kWarp;
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  x = sum_warp(x);
  sync_block();  // every thread has read the previous sum
  if (lane == 0) shared[warp] = x;
  sync_block();
  if (warp == 0) {
    x = T{};
    for (int w = lane; w < kWarps; w += kWarp) x.add(shared[w]);
    x = sum_warp(x);
    if (lane == 0) shared[0] = x;
  }
  sync_block();
  return shared[0];
}

// True in the block that arrives last; earlier writes of all blocks are visible to it. `arrived` is
// 0 before the launch.
__device__ __forceinline__ bool last_block(uint32_t* arrived, uint32_t* shared) {
  sync_block();
  if (thread_index() == 0) {
    *shared = add_acquire_release(arrived, 1u) == num_blocks() - 1;
  }
  sync_block();
  return *shared != 0;
}

}  // namespace fastrl::cuda
