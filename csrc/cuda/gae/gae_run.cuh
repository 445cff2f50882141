// Loads and stores of the tokens of GAE's threads. Each thread has sixteen consecutive tokens, but
// a warp moves 512 contiguous bytes at a time, and exchanges vectors through shared memory.
#pragma once

#include <cstring>

#include "../device/primitives.cuh"
#include "gae.h"

namespace fastrl::cuda {

constexpr int kRun = 16;  // consecutive tokens of a thread; as bools they are one vector
constexpr int kVectors = kRun / 4;

// Sixteen tokens from `first` on.
struct Run {
  const GaeParams& p;
  int64_t first;
  bool whole_warp;  // all tokens of the warp's runs exist and lie on 16-byte boundaries
  Vec16* staged;    // the warp's buffer

  // The rotation avoids bank conflicts where each thread reads its own vectors.
  __device__ __forceinline__ int own_place(int j) const {
    const int lane = thread_index() % kWarp;
    return lane * kVectors + (j + lane / 2) % kVectors;
  }
  __device__ __forceinline__ static int striped_place(int j) {
    const int vector = j * kWarp + thread_index() % kWarp, owner = vector / kVectors;
    return owner * kVectors + (vector + owner / 2) % kVectors;
  }
  __device__ __forceinline__ int64_t striped_token(int j) const {
    const int lane = thread_index() % kWarp;
    return first - lane * kRun + (j * kWarp + lane) * 4;
  }

  // Loads in flight: fetch all tensors before unpacking any, as unpacking waits.
  struct Fetched {
    const float* values;
    Vec16 vectors[kVectors];
  };
  __device__ __forceinline__ Fetched fetch(const float* values) const {
    Fetched fetched;
    fetched.values = values;
    if (whole_warp) {
      FASTRL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        fetched.vectors[j] = load16_once(values + striped_token(j));
      }
    }
    return fetched;
  }
  __device__ __forceinline__ void unpack(const Fetched& fetched, float (&x)[kRun]) const {
    if (whole_warp) {
      FASTRL_UNROLL
      for (int j = 0; j < kVectors; ++j) staged[striped_place(j)] = fetched.vectors[j];
      sync_warp();
      FASTRL_UNROLL
      for (int j = 0; j < kVectors; ++j) memcpy(x + 4 * j, &staged[own_place(j)], 16);
      sync_warp();
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kRun; ++k) {
        x[k] = first + k < p.sequences.tokens ? fetched.values[first + k] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void store(float* values, const float (&x)[kRun]) const {
    if (whole_warp) {
      FASTRL_UNROLL
      for (int j = 0; j < kVectors; ++j) memcpy(&staged[own_place(j)], x + 4 * j, 16);
      sync_warp();
      FASTRL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        store16_once(values + striped_token(j), staged[striped_place(j)]);
      }
      sync_warp();
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kRun; ++k) {
        if (first + k < p.sequences.tokens) values[first + k] = x[k];
      }
    }
  }
  __device__ __forceinline__ uint32_t existing() const {
    const int64_t left = p.sequences.tokens - first;
    return left >= kRun ? 0xffffu : left > 0 ? (1u << left) - 1u : 0u;
  }
  // One bit per token; missing tokens are `otherwise`, and so are all if `bools` is null.
  __device__ __forceinline__ uint32_t load_bits(const bool* bools, bool otherwise) const {
    if (!bools) return otherwise ? 0xffffu : 0u;
    uint32_t bits = 0;
    if (whole_warp) {
      const Vec16 loaded = load16_once(bools + first);
      FASTRL_UNROLL
      for (int k = 0; k < kRun; ++k) bits |= (loaded.word[k / 4] >> (8 * (k % 4)) & 1u) << k;
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kRun; ++k) {
        bits |= uint32_t{first + k < p.sequences.tokens ? bools[first + k] : otherwise} << k;
      }
    }
    return bits;
  }
};

}  // namespace fastrl::cuda
