// A number on the device, of any real dtype.
#pragma once

#include <cstdint>

namespace fastrl::cuda {

enum class NumberType : int {  // floats first
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64
};

struct DeviceNumber {
  const void* value;  // null: none
  NumberType type;
};

}  // namespace fastrl::cuda
