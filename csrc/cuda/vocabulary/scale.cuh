// Scales a gradient in place by a number on the device: the gradient of a loss by the upstream
// gradient of the loss. It is usually 1, and then no element is touched.
#pragma once

#include "../device/number.cuh"
#include "dispatch.cuh"
#include "row_gradient.cuh"
#include "scale.h"

namespace fastrl::cuda {

template <typename T>
__device__ __forceinline__ Vec16 scaled(Vec16 x, float factor) {
  using E = Element<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float pair[2];
    E::unpack(x.word[i], pair);
#pragma unroll
    for (int j = 0; j < E::kPerWord; ++j) pair[j] *= factor;
    x.word[i] = E::pack(pair);
  }
  return x;
}

// Elements of a segment that a block scales at once.
constexpr int kScaleVectors = 4;  // per thread
template <typename T, int kThreads>
constexpr int kScaleChunk = kScaleVectors * kThreads * Element<T>::kLanes;

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, 4) scale_kernel(const __grid_constant__ ScaleParams p) {
  constexpr int kChunk = kScaleChunk<T, kThreads>;
  const float factor = as_float(p.factor);
  if (factor == 1.0f) return;
  const unsigned chunks = static_cast<unsigned>((p.length + kChunk - 1) / kChunk);
  const unsigned tasks = static_cast<unsigned>(p.segments) * chunks;
  for (unsigned task = block_index(); task < tasks; task += num_blocks()) {
    const int64_t segment = task / chunks, first = int64_t{task % chunks} * kChunk;
    const int64_t rest = p.length - first;
    const Stores<T, false> part(static_cast<T*>(p.gradient) + segment * p.stride + first,
                                static_cast<int>(rest < kChunk ? rest : kChunk));
    Vec16 x[kScaleVectors];
    const auto at = [&](int v) {
      return part.head + (v * kThreads + thread_index()) * Element<T>::kLanes;
    };
#pragma unroll
    for (int v = 0; v < kScaleVectors; ++v) {
      if (at(v) < part.end) x[v] = load16_once(part.grad + at(v));
    }
#pragma unroll
    for (int v = 0; v < kScaleVectors; ++v) {
      if (at(v) < part.end) store16_once(part.grad + at(v), scaled<T>(x[v], factor));
    }
    const int column = part.beside(thread_index());
    if (column >= 0) {
      const float value = Element<T>::value(load_element(part.grad + column));
      store_element(part.grad + column, Element<T>::from(value * factor));
    }
  }
}

// Returns kInvalid if the number of tasks does not fit 31 bits, which only very short segments can
// cause.
template <int kThreads = kVocabularyThreads>
Status launch_scale(const ScaleParams& p, const DeviceLimits& limits, Stream stream) {
  if (p.segments == 0 || p.length == 0) return kSuccess;
  return with_element(p.type, [&](auto element) {
    using T = decltype(element);
    constexpr int64_t kChunk = kScaleChunk<T, kThreads>;
    const int64_t chunks = (p.length + kChunk - 1) / kChunk;
    if (p.segments > INT32_MAX / chunks) return kInvalid;
    // as many as run at once, which is few enough to return quickly
    const int64_t resident = int64_t{4} * limits.sms, tasks = p.segments * chunks;
    const LaunchShape shape{static_cast<unsigned>(tasks < resident ? tasks : resident), kThreads};
    return launch(scale_kernel<T, kThreads>, shape, p, stream);
  });
}

}  // namespace fastrl::cuda
