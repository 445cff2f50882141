// Where the values of a split of a row are read from: global or shared memory, in vectors of 16
// bytes even where the row does not begin on such a boundary.
#pragma once

#include "../device/elements.cuh"

namespace fastrl::cuda {

// The 16 bytes at offset `bytes` (0 to 15) of two consecutive vectors.
__device__ __forceinline__ Vec16 join(Vec16 low, Vec16 high, unsigned bytes) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[i] = low.word[i];
    w[i + 4] = high.word[i];
  }
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
  Vec16 x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.word[i] = shift_pair(w[i], w[i + 1], bytes % 4 * 8);
  return x;
}

__device__ __forceinline__ unsigned misalignment(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) & 15);
}

// Replaces lane `n` and those after it by -inf.
template <typename T>
__device__ __forceinline__ Vec16 keep_lanes(Vec16 x, int n) {
  constexpr int kPerWord = Element<T>::kPerWord, kBits = 32 / kPerWord;
#pragma unroll
  for (int i = 0; i < Element<T>::kLanes; ++i) {
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << kBits) - 1)
                          << (i % kPerWord * kBits);
    const uint32_t excluded = Element<T>::kMinusInfinity << (i % kPerWord * kBits);
    uint32_t& word = x.word[i / kPerWord];
    if (i >= n) word = (word & ~mask) | excluded;
  }
  return x;
}

// `vector(column, shift)`: the values from this column on, -inf beyond the end. With kAligned a
// vector begins at the column; otherwise `shift` is the distance in bytes to the boundary before
// it. Nothing outside the split is read or returned.
template <typename T, bool kAligned, bool kStreaming>
struct GlobalSource {
  const T* data;
  int columns;

  __device__ __forceinline__ unsigned shift(int column) const {
    return kAligned ? 0 : misalignment(data + column);
  }
  __device__ __forceinline__ static Vec16 load(const void* p) {
    return kStreaming ? load16_once(p) : load16(p);
  }
  __device__ __forceinline__ Vec16 vector(ptrdiff_t column, unsigned shift) const {
    const T* at = data + column;
    if constexpr (kAligned) return load(at);
    const auto low = reinterpret_cast<const unsigned char*>(at) - shift;
    const auto end = reinterpret_cast<const unsigned char*>(data + columns);
    const bool inside = low >= reinterpret_cast<const unsigned char*>(data);
    if (inside && shift == 0 && low + 16 <= end) return load(low);
    if (inside && low + 32 <= end) return join(load(low), load(low + 16), shift);
    Vec16 x{};
#pragma unroll
    for (int i = 0; i < Element<T>::kLanes; ++i) {
      constexpr int kPerWord = Element<T>::kPerWord;
      const uint32_t bits = column + i < columns ? Element<T>::bits(load_element(at + i))
                                                 : Element<T>::kMinusInfinity;
      x.word[i / kPerWord] |= bits << (i % kPerWord * (32 / kPerWord));
    }
    return x;
  }
  __device__ __forceinline__ float element(int column) const {
    return Element<T>::value(load_element(data + column));
  }
};

// A split that was copied to shared memory at the same distance from a vector's beginning; without
// kShifted that is 0, wherever the split ends.
template <typename T, bool kAligned, bool kShifted = !kAligned>
struct SharedSource {
  const T* data;
  int columns;

  __device__ __forceinline__ unsigned shift(int column) const {
    return kShifted ? misalignment(data + column) : 0;
  }
  __device__ __forceinline__ Vec16 vector(ptrdiff_t column, unsigned shift) const {
    const T* at = data + column;
    if constexpr (kAligned) return load16_shared(at);
    // the stage has room for a vector after the last
    const auto low = reinterpret_cast<const unsigned char*>(at) - shift;
    const Vec16 x =
        kShifted ? join(load16_shared(low), load16_shared(low + 16), shift) : load16_shared(at);
    const int left = columns - static_cast<int>(column);
    return left >= Element<T>::kLanes ? x : keep_lanes<T>(x, left);
  }
  __device__ __forceinline__ float element(int column) const {
    return Element<T>::value(data[column]);
  }
};

}  // namespace fastrl::cuda
