// The value of a number on the device, as a float.
#pragma once

#include "elements.cuh"
#include "number.h"

namespace fastrl::cuda {

// A double as the nearest float, without arithmetic in double. Subnormal numbers are 0.
__device__ __forceinline__ float float_of_double(uint64_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits >> 32) & 0x80000000u;
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023 + 127;
  const uint64_t fraction = bits & 0xfffffffffffffull;
  if (exponent >= 255) {  // NaN, infinity, or beyond the largest float
    const bool nan = exponent == 0x7ff - 1023 + 127 && fraction != 0;
    return bits_to_float(sign | (nan ? 0x7fc00000u : 0x7f800000u));
  }
  if (exponent <= 0) return bits_to_float(sign);
  const uint64_t rounding = 0xfffffffull + (fraction >> 29 & 1);  // ties to even; may carry
  const uint64_t magnitude = (uint64_t(exponent) << 52 | fraction) + rounding;
  return bits_to_float(sign | static_cast<uint32_t>(magnitude >> 29));
}

__device__ __forceinline__ float as_float(const DeviceNumber& number) {
  const auto at = [&](auto zero) { return *static_cast<const decltype(zero)*>(number.value); };
  switch (number.type) {
    case NumberType::kFloat32:
      return at(float{});
    case NumberType::kFloat64:
      return float_of_double(at(uint64_t{}));
    case NumberType::kFloat16:
      return Element<Half>::value(at(Half{}));
    case NumberType::kBFloat16:
      return Element<BFloat16>::value(at(BFloat16{}));
    case NumberType::kInt8:
      return static_cast<float>(at(int8_t{}));
    case NumberType::kInt16:
      return static_cast<float>(at(int16_t{}));
    case NumberType::kInt32:
      return static_cast<float>(at(int32_t{}));
    case NumberType::kInt64:
      return static_cast<float>(at(int64_t{}));
    case NumberType::kUInt8:
      return static_cast<float>(at(uint8_t{}));
    case NumberType::kUInt16:
      return static_cast<float>(at(uint16_t{}));
    case NumberType::kUInt32:
      return static_cast<float>(at(uint32_t{}));
    case NumberType::kUInt64:
      return static_cast<float>(at(uint64_t{}));
  }
  return 0.0f;
}

}  // namespace fastrl::cuda
