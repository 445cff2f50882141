// The sources of the values of a split of a row: global or shared memory, read in vectors of 16
// bytes even if the row does not begin on such a boundary.
#pragma once

#include "../device/elements.cuh"

namespace fastrl::cuda {

// The 16 bytes at offset `bytes` (0 to 15) of two consecutive vectors, where an element begins.
template <typename T>
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
  for (int i = 0; i < 4; ++i) {
    x.word[i] = sizeof(T) == 4 ? w[i] : shift_pair(w[i], w[i + 1], bytes % 4 * 8);
  }
  return x;
}

__device__ __forceinline__ unsigned misalignment(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) & 15);
}

// Calls f(shift), in a branch for each number of whole words in the shift of a source, so that the
// compiler knows which words of two vectors to join, and needs no selection.
template <typename Source, typename F>
__device__ __forceinline__ void with_known_words(unsigned shift, const F& f) {
  if constexpr (!Source::kShifted) return f(0u);
  const unsigned within = shift % 4;
  switch (shift / 4) {
    case 0:
      return f(within);
    case 1:
      return f(4 | within);
    case 2:
      return f(8 | within);
    default:
      return f(12 | within);
  }
}

// Replaces the lanes for which `excluded` is true by -inf.
template <typename T, typename Excluded>
__device__ __forceinline__ Vec16 exclude_lanes(Vec16 x, const Excluded& excluded) {
  constexpr int kPerWord = Element<T>::kPerWord, kBits = 32 / kPerWord;
#pragma unroll
  for (int i = 0; i < Element<T>::kLanes; ++i) {
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << kBits) - 1)
                          << (i % kPerWord * kBits);
    const uint32_t infinity = Element<T>::kMinusInfinity << (i % kPerWord * kBits);
    uint32_t& word = x.word[i / kPerWord];
    if (excluded(i)) word = (word & ~mask) | infinity;
  }
  return x;
}

// Replaces lane `n` and those after it by -inf.
template <typename T>
__device__ __forceinline__ Vec16 keep_lanes(Vec16 x, int n) {
  return exclude_lanes<T>(x, [n](int lane) { return lane >= n; });
}

// `vector(column, shift)`: the values from this column on, all inside the split. With kAligned a
// vector begins at the column. Otherwise `shift` is the distance in bytes to the boundary before
// it, and the two vectors that hold the values are joined; outside the split, only the rest of the
// 16-byte vectors with its first and last column is read. `last_vector`: the same, with -inf beyond
// the end.
template <typename T, bool kAligned, bool kStreaming>
struct GlobalSource {
  static constexpr bool kShifted = !kAligned;
  static constexpr int kStores = 4;  // vectors of the gradient in one step
  const T* data;
  int columns;

  __device__ __forceinline__ unsigned shift(int column) const {
    return kAligned ? 0 : misalignment(data + column) & (16 - sizeof(T));
  }
  __device__ __forceinline__ Vec16 vector(ptrdiff_t column, unsigned shift) const {
    // without a shift, the next vector may lie beyond the split
    return joined(data + column, shift, shift == 0 ? 0 : 16);
  }
  __device__ __forceinline__ Vec16 last_vector(ptrdiff_t column, unsigned shift) const {
    if constexpr (kAligned) return joined(data + column, 0, 0);
    const int left = columns - static_cast<int>(column);
    const int wanted = static_cast<int>(shift) + left * static_cast<int>(sizeof(T));
    return keep_lanes<T>(joined(data + column, shift, wanted > 16 ? 16 : 0), left);
  }
  __device__ __forceinline__ float element(int column) const {
    return Element<T>::value(load_element(data + column));
  }

 private:
  __device__ __forceinline__ Vec16 joined(const T* at, unsigned shift, ptrdiff_t second) const {
    if constexpr (kAligned) return kStreaming ? load16_once(at) : load16(at);
    const auto low = reinterpret_cast<const unsigned char*>(at) - shift;
    const T* end = data + columns;
    return join<T>(load16_within<kStreaming>(low, data, end),
                   load16_within<kStreaming>(low + second, data, end), shift);
  }
};

// A split copied to shared memory at the same distance from the beginning of a vector; without
// kShifts this is 0, wherever the split ends.
template <typename T, bool kAligned, bool kShifts = !kAligned>
struct SharedSource {
  static constexpr bool kShifted = kShifts;
  // joined vectors take two loads each, so more than two would leave no registers
  static constexpr int kStores = kShifts ? 2 : 4;
  const T* data;
  int columns;

  __device__ __forceinline__ unsigned shift(int column) const {
    return kShifted ? misalignment(data + column) & (16 - sizeof(T)) : 0;
  }
  __device__ __forceinline__ Vec16 vector(ptrdiff_t column, unsigned shift) const {
    const T* at = data + column;
    if constexpr (!kShifted) return load16_shared(at);
    // the stage has room for a vector after the last
    const auto low = reinterpret_cast<const unsigned char*>(at) - shift;
    return join<T>(load16_shared(low), load16_shared(low + 16), shift);
  }
  __device__ __forceinline__ Vec16 last_vector(ptrdiff_t column, unsigned shift) const {
    const Vec16 x = vector(column, shift);
    return kAligned ? x : keep_lanes<T>(x, columns - static_cast<int>(column));
  }
  __device__ __forceinline__ float element(int column) const {
    return Element<T>::value(data[column]);
  }
};

}  // namespace fastrl::cuda
