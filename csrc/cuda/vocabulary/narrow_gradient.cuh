// The narrow mode: the gradient of float32 logits is bfloat16, in the second half of each row's own
// memory. A cluster has the whole row in shared memory before it stores. Otherwise one block takes
// a row from its last columns to its first. The gradient of column j lies at byte 2 (stride + j) >=
// 4 j of the row, so a step overwrites no columns before its own first one, and every thread has
// loaded the columns of the step before any thread stores.
#pragma once

#include <type_traits>

#include "row_gradient.cuh"

namespace fastrl::cuda {

template <typename T, typename Gradient>
constexpr bool kNarrow = !std::is_same_v<T, Gradient>;

// A vector of the gradient, from two of the logits.
template <bool kSoftcap, bool kLinear>
__device__ __forceinline__ Vec16 narrow_vector(Vec16 low, Vec16 high, uint32_t floor,
                                               const GradientTerms& terms,
                                               const Exponents<kSoftcap>& exponents) {
  low = gradient_vector<float, kSoftcap, kLinear>(low, floor, terms, exponents);
  high = gradient_vector<float, kSoftcap, kLinear>(high, floor, terms, exponents);
  Vec16 y;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    y.word[i] = pack_bf16x2(bits_to_float(low.word[2 * i]), bits_to_float(low.word[2 * i + 1]));
    y.word[i + 2] =
        pack_bf16x2(bits_to_float(high.word[2 * i]), bits_to_float(high.word[2 * i + 1]));
  }
  return y;
}

// A step of a block: `at` is the first column of this thread; with kPartial some columns lie behind
// the end.
template <bool kLinear, bool kPartial, int kThreads, int kAtOnce, bool kAligned, bool kSoftcap>
__device__ __forceinline__ void narrow_step(const float* row,
                                            const Stores<BFloat16, kAligned>& stores, ptrdiff_t at,
                                            uint32_t floor, const GradientTerms& terms,
                                            const Exponents<kSoftcap>& exponents) {
  constexpr ptrdiff_t kStride = kThreads * Element<BFloat16>::kLanes;
  const auto exists = [&](int v) { return !kPartial || at + v * kStride < stores.end; };
  Vec16 x[kAtOnce][2];
#pragma unroll
  for (int v = 0; v < kAtOnce; ++v) {
    if (!exists(v)) continue;
    x[v][0] = load16_once(row + at + v * kStride);
    x[v][1] = load16_once(row + at + v * kStride + Element<float>::kLanes);
  }
  sync_block();
#pragma unroll
  for (int v = 0; v < kAtOnce; ++v) {
    if (!exists(v)) continue;
    store16_once(stores.grad + at + v * kStride,
                 narrow_vector<kSoftcap, kLinear>(x[v][0], x[v][1], floor, terms, exponents));
  }
}

// The row begins at a multiple of 16 bytes, its gradient at one of 8.
template <bool kLinear, int kThreads, bool kAligned, bool kSoftcap>
__device__ __forceinline__ void sweep_narrow_gradient(const float* row,
                                                      const Stores<BFloat16, kAligned>& stores,
                                                      const GradientTerms& terms,
                                                      const Exponents<kSoftcap>& exponents) {
  constexpr int kAtOnce = 2;
  constexpr ptrdiff_t kStep = kAtOnce * kThreads * Element<BFloat16>::kLanes;
  static_assert(kThreads >= 2 * Element<BFloat16>::kLanes,
                "the elements beside need a thread each");
  const uint32_t floor = filled_word<float>(exponents.map.floor);
  const int column = stores.beside(thread_index());
  const float beside = column >= 0 ? load_element(row + column) : 0.0f;
  ptrdiff_t at = stores.head + (stores.end - stores.head) / kStep * kStep +
                 thread_index() * Element<BFloat16>::kLanes;
  narrow_step<kLinear, true, kThreads, kAtOnce>(row, stores, at, floor, terms, exponents);
  for (at -= kStep; at >= stores.head; at -= kStep) {
    narrow_step<kLinear, false, kThreads, kAtOnce>(row, stores, at, floor, terms, exponents);
  }
  if (column >= 0) {
    const float low = exponents.map.floor, x = beside < low ? low : beside;
    const float gradient = gradient_at<kSoftcap, kLinear>(x, terms, exponents);
    store_element(stores.grad + column, Element<BFloat16>::from(gradient));
  }
}

// This thread's part of writing the gradient of a split in shared memory.
template <bool kLinear, int kThreads, bool kAligned, bool kSoftcap>
__device__ __forceinline__ void sweep_staged_gradient(const float* staged,
                                                      const Stores<BFloat16, kAligned>& stores,
                                                      const GradientTerms& terms,
                                                      const Exponents<kSoftcap>& exponents) {
  constexpr int kAtOnce = 2, kLanes = Element<BFloat16>::kLanes;
  constexpr ptrdiff_t kStride = kThreads * kLanes;
  const uint32_t floor = filled_word<float>(exponents.map.floor);
  const auto store = [&](ptrdiff_t at, Vec16 low, Vec16 high) {
    store16_once(stores.grad + at,
                 narrow_vector<kSoftcap, kLinear>(low, high, floor, terms, exponents));
  };
  const auto load = [&](ptrdiff_t at) { return load16_shared(staged + at); };
  ptrdiff_t at = stores.head + thread_index() * kLanes;
  for (; at + (kAtOnce - 1) * kStride < stores.end; at += kAtOnce * kStride) {
    Vec16 x[kAtOnce][2];
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      x[v][0] = load(at + v * kStride);
      x[v][1] = load(at + v * kStride + kLanes / 2);
    }
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) store(at + v * kStride, x[v][0], x[v][1]);
  }
  if (at < stores.end) store(at, load(at), load(at + kLanes / 2));
  const int column = stores.beside(thread_index());
  if (column >= 0) {
    const float low = exponents.map.floor, x = staged[column] < low ? low : staged[column];
    const float gradient = gradient_at<kSoftcap, kLinear>(x, terms, exponents);
    store_element(stores.grad + column, Element<BFloat16>::from(gradient));
  }
}

// The gradient of a split in shared memory; `token` is relative to it.
template <int kThreads, bool kAligned, bool kSoftcap>
__device__ __forceinline__ void write_staged_gradient(const float* staged,
                                                      const Stores<BFloat16, kAligned>& stores,
                                                      int64_t token, const GradientTerms& terms,
                                                      const Exponents<kSoftcap>& exponents) {
  if (terms.linear != 0) {
    sweep_staged_gradient<true, kThreads>(staged, stores, terms, exponents);
  } else {
    sweep_staged_gradient<false, kThreads>(staged, stores, terms, exponents);
  }
  store_token_gradient<kThreads>(stores, token, terms);
}

// The gradient of a whole row; called by every thread of its block.
template <int kThreads, bool kAligned, bool kSoftcap>
__device__ __forceinline__ void write_narrow_gradient(const float* row,
                                                      const Stores<BFloat16, kAligned>& stores,
                                                      int64_t token, const GradientTerms& terms,
                                                      const Exponents<kSoftcap>& exponents) {
  if (terms.linear != 0) {
    sweep_narrow_gradient<true, kThreads>(row, stores, terms, exponents);
  } else {
    sweep_narrow_gradient<false, kThreads>(row, stores, terms, exponents);
  }
  store_token_gradient<kThreads>(stores, token, terms);
}

}  // namespace fastrl::cuda
