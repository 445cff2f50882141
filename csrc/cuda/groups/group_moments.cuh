// Mean and deviation of a group in fixed point. Integers give the same sum in any order and lose no
// digits of a float, so neither atomics nor the shape of a launch change a bit.
#pragma once

#include <cmath>

#include "../device/block_sum.cuh"

namespace fastrl::cuda {

// Maps floats to integers in the same order; NaN lies beyond the infinities.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = float_to_bits(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t key) {
  return bits_to_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The range of some rewards; all 0 if there are none.
struct Extent {
  uint32_t highest, not_lowest, count;

  __device__ static Extent of(float x) { return {ordered(x), ~ordered(x), 1}; }
  __device__ void add(const Extent& other) {
    highest = other.highest > highest ? other.highest : highest;
    not_lowest = other.not_lowest > not_lowest ? other.not_lowest : not_lowest;
    count += other.count;
  }
  __device__ float high() const { return unordered(highest); }
  __device__ float low() const { return unordered(~not_lowest); }
  __device__ bool finite() const { return high() - high() == 0.0f && low() - low() == 0.0f; }
};

struct FixedSum {
  long long value;
  __device__ void add(const FixedSum& other) { value += other.value; }
};

// Halves of rewards, as multiples of 2^(exponent - bits) above half the lowest: halves, because the
// distance of two floats may overflow.
struct FixedPoint {
  float half_low;
  int exponent, bits;

  // `total`: how many terms can be added without overflow.
  __device__ FixedPoint(const Extent& extent, int64_t total) : half_low(0.5f * extent.low()) {
    const float half_range = 0.5f * extent.high() - half_low;
    exponent = static_cast<int>(float_to_bits(half_range) >> 23) - 127;
    bits = 61;
    while (bits > 0 && (total >> (61 - bits)) != 0) --bits;
  }
  __device__ static long long rounded_down(float x, int shift) {
    return static_cast<long long>(std::ldexp(x, shift));
  }
  __device__ long long above_lowest(float reward) const {
    const float x = 0.5f * reward, y = -half_low;
    const float sum = x + y, grown = sum - x;
    const float lost = (x - (sum - grown)) + (y - grown);
    return rounded_down(sum, bits - exponent) + rounded_down(lost, bits - exponent);
  }
  __device__ float real(long long value) const {
    return std::ldexp(static_cast<float>(value), exponent + 1 - bits);
  }
  // The square of a deviation in fixed point, and the root of a mean of such squares.
  __device__ long long square(long long deviation) const {
    const float x = std::ldexp(static_cast<float>(deviation), -bits);
    return rounded_down(x * x, bits);
  }
  __device__ float root(long long squares, float freedom) const {
    if (!(freedom > 0.0f)) return 0.0f;
    const float mean = std::ldexp(static_cast<float>(squares), -bits) / freedom;
    return std::ldexp(std::sqrt(mean), exponent + 1);
  }
};

// The values that the members of a group share.
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

}  // namespace fastrl::cuda
