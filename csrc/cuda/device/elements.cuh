// The element types of logits: conversion of vectors of 16 bytes to floats and back.
#pragma once

#include "primitives.cuh"

namespace fastrl::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <typename T>
struct Element;

template <>
struct Element<float> {
  static constexpr int kLanes = 4, kPerWord = 1;
  static constexpr float kLowest = -3.402823466e38f;
  static constexpr uint32_t kMinusInfinity = 0xff800000;

  __device__ __forceinline__ static uint32_t bits(float x) { return float_to_bits(x); }
  __device__ __forceinline__ static float value(float x) { return x; }
  __device__ __forceinline__ static void unpack(uint32_t word, float* x) {
    x[0] = bits_to_float(word);
  }
  __device__ __forceinline__ static uint32_t pack(const float* x) { return float_to_bits(x[0]); }
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    return float_to_bits(max_nan(bits_to_float(a), bits_to_float(b)));
  }
  __device__ __forceinline__ static float from(float x) { return x; }
};

template <>
struct Element<BFloat16> {
  static constexpr int kLanes = 8, kPerWord = 2;
  static constexpr float kLowest = -3.3895314e38f;
  static constexpr uint32_t kMinusInfinity = 0xff80;

  __device__ __forceinline__ static uint32_t bits(BFloat16 x) { return x.bits; }
  __device__ __forceinline__ static float value(BFloat16 x) {
    return bits_to_float(static_cast<uint32_t>(x.bits) << 16);
  }
  __device__ __forceinline__ static void unpack(uint32_t word, float* x) {
    x[0] = bits_to_float(word << 16);
    x[1] = bits_to_float(word & 0xffff0000u);
  }
  __device__ __forceinline__ static uint32_t pack(const float* x) {
    return pack_bf16x2(x[0], x[1]);
  }
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    return max_nan_bf16x2(a, b);
  }
  __device__ __forceinline__ static BFloat16 from(float x) {
    return {static_cast<uint16_t>(pack_bf16x2(x, x))};
  }
};

template <>
struct Element<Half> {
  static constexpr int kLanes = 8, kPerWord = 2;
  static constexpr float kLowest = -65504.0f;
  static constexpr uint32_t kMinusInfinity = 0xfc00;

  __device__ __forceinline__ static uint32_t bits(Half x) { return x.bits; }
  __device__ __forceinline__ static float value(Half x) { return unpack_f16(x.bits); }
  __device__ __forceinline__ static void unpack(uint32_t word, float* x) {
    x[0] = unpack_f16(static_cast<uint16_t>(word));
    x[1] = unpack_f16(static_cast<uint16_t>(word >> 16));
  }
  __device__ __forceinline__ static uint32_t pack(const float* x) { return pack_f16x2(x[0], x[1]); }
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    return max_nan_f16x2(a, b);
  }
  __device__ __forceinline__ static Half from(float x) {
    return {static_cast<uint16_t>(pack_f16x2(x, x))};
  }
};

// `word` with the value in every place.
template <typename T>
__device__ __forceinline__ uint32_t filled_word(float x) {
  const float both[2] = {x, x};
  return Element<T>::pack(both);
}

}  // namespace fastrl::cuda
