// The logits argument of the vocabulary kernels: which rows count and where they lie, how a row is
// split, and how its values become exponents of two.
#pragma once

#include <cmath>

#include "../device/elements.cuh"
#include "logits.h"

namespace fastrl::cuda {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// In the one-pass kernel a block holds two splits in shared memory behind a header, and an SM of
// sm_90 or sm_100, which has 228 KB and keeps 1 KB for each block, holds three blocks.
constexpr int kBlocksPerSm = 3;
constexpr int64_t kClusterHeader = 768;
#if !defined(FASTRL_SPLIT_BYTES)  // tests have small ones, for many splits of short rows
#define FASTRL_SPLIT_BYTES (((228 << 10) / kBlocksPerSm - 1024 - kClusterHeader) / 2 / 128 * 128)
#endif
constexpr int64_t kMaxSplitBytes = FASTRL_SPLIT_BYTES;
constexpr int64_t kLargeSplitBytes = 3 * kMaxSplitBytes;  // one block per SM
constexpr int kMaxCluster = 16;

// A row is split at whole vectors. Each split is reduced on its own, and the splits are combined in
// order, whichever block works on them, so a result depends on the size of the vocabulary and on
// the dtype alone.
struct Splits {
  int count;
  int columns;  // of every split but the last
};
inline Splits split_row(int64_t vocabulary, int64_t element_size) {
  const int64_t whole = 128 / element_size;  // splits begin at multiples of 128 bytes of the row
  const auto columns = [&](int64_t splits) {
    return (vocabulary + splits * whole - 1) / (splits * whole) * whole;
  };
  for (const int64_t limit : {kMaxSplitBytes, kLargeSplitBytes}) {
    for (int splits = limit == kMaxSplitBytes ? 1 : kMaxCluster; splits <= kMaxCluster;
         splits *= 2) {
      if (columns(splits) * element_size <= limit) {
        return {splits, static_cast<int>(columns(splits))};
      }
    }
  }
  const int64_t most = kMaxSplitBytes / element_size;
  return {static_cast<int>((vocabulary + most - 1) / most), static_cast<int>(most)};
}

__device__ __forceinline__ bool row_counts(const LogitsParams& p, unsigned row, int64_t token_id) {
  return p.mask.at(row) & (token_id != p.ignore_index);
}

// Where the rows of the logits and of their gradient lie.
struct RowGeometry {
  const unsigned char* logits;
  unsigned char* grad;                                       // null: none
  int64_t stride_b, stride_t, grad_stride_b, grad_stride_t;  // bytes
  int64_t vocabulary;
  unsigned rows, tokens;
  Splits splits;
  bool aligned;  // every row begins and ends at a multiple of 16 bytes, here and in the gradient

  __device__ __forceinline__ const unsigned char* row(unsigned row) const {
    return logits + (row / tokens) * stride_b + (row % tokens) * stride_t;
  }
  __device__ __forceinline__ unsigned char* grad_row(unsigned row) const {
    return grad + (row / tokens) * grad_stride_b + (row % tokens) * grad_stride_t;
  }
  __device__ __forceinline__ int columns(int split) const {
    const int64_t rest = vocabulary - static_cast<int64_t>(split) * splits.columns;
    return static_cast<int>(rest < splits.columns ? (rest < 0 ? 0 : rest) : splits.columns);
  }
};

// z = gain * x; with a softcap gain * (v + 1/2) for v = -1 / (1 + 2^(squash * x)), since
// tanh(y) = 1 - 2 / (1 + e^2y).
struct LogitMap {
  float binary_gain;  // gain log2(e), for exponents of two
  float gain;         // dz/dv
  float squash;
  float raw_gain;  // dz/dx at x = 0
  float floor;     // logits at or below it count as -inf; products with it do not overflow
};

struct Scaling {
  const float* temperatures;
  float scale, squash, raw_gain;  // divided by the temperature if all rows share one

  static Scaling of(const LogitsParams& p) {
    const double temperature = p.temperatures ? 1.0 : p.temperature;
    const bool capped = p.logit_softcap > 0;
    const double squash = capped ? 2 * double{kLog2E} * p.logit_scale / p.logit_softcap : 0.0;
    return {p.temperatures,
            static_cast<float>((capped ? 2 * p.logit_softcap : p.logit_scale) / temperature),
            static_cast<float>(squash), static_cast<float>(p.logit_scale / temperature)};
  }
  template <typename T>
  __device__ __forceinline__ LogitMap map(float temperature) const {
    const float gain = temperatures ? scale / temperature : scale;
    const float binary_gain = gain * kLog2E;
    // below this, the rounding error of a product would overflow when exponentiated
    const float low = std::fmax(-1e9f / binary_gain, Element<T>::kLowest);
    const float finite = Element<T>::value(Element<T>::from(low));
    const float floor = squash > 0 ? -INFINITY : finite;  // a softcap bounds all but -inf
    return {binary_gain, gain, squash, temperatures ? raw_gain / temperature : raw_gain, floor};
  }
};

inline RowGeometry geometry(const LogitsParams& p, const GradientParams* grad) {
  const int64_t size = bytes_of(p.type);
  RowGeometry g{};
  g.logits = static_cast<const unsigned char*>(p.logits);
  g.stride_b = p.stride_b * size;
  g.stride_t = p.stride_t * size;
  if (grad) {
    g.grad = static_cast<unsigned char*>(grad->grad_logits);
    g.grad_stride_b = grad->stride_b * bytes_of(grad->type);
    g.grad_stride_t = grad->stride_t * bytes_of(grad->type);
  }
  g.vocabulary = p.vocabulary;
  g.rows = static_cast<unsigned>(p.batch * p.tokens);
  g.tokens = static_cast<unsigned>(p.tokens);
  g.splits = split_row(p.vocabulary, size);
  int64_t bits = reinterpret_cast<intptr_t>(g.logits) | reinterpret_cast<intptr_t>(g.grad);
  bits |= p.vocabulary * (grad ? bytes_of(grad->type) : size);  // the shorter of the two rows
  if (g.rows > g.tokens) bits |= g.stride_b | g.grad_stride_b;
  if (g.tokens > 1) bits |= g.stride_t | g.grad_stride_t;
  g.aligned = bits % 16 == 0;
  return g;
}

// Indices of rows and columns have 31 bits; no memory holds more rows.
inline bool fits(const LogitsParams& p) {
  return p.batch >= 0 && p.tokens >= 0 && p.vocabulary > 0 &&
         p.batch * p.tokens < (int64_t{1} << 31) && p.vocabulary < (int64_t{1} << 31);
}

}  // namespace fastrl::cuda
