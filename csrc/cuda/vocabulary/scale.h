// Arguments of the kernel that scales a gradient. No torch.
#pragma once

#include <cstdint>

#include "../device/number.h"
#include "logits.h"

namespace fastrl::cuda {

// Segments of `length` elements, `stride` elements apart.
struct ScaleParams {
  LogitsType type;
  void* gradient;
  int64_t segments, length, stride;
  DeviceNumber factor;
};

// Finds the segments of a tensor in memory order; false if there are none, or if elements share
// memory. Sorts `sizes` and `strides`.
inline bool find_segments(int dims, int64_t* sizes, int64_t* strides, ScaleParams* p) {
  for (int i = 1; i < dims; ++i) {
    for (int j = i; j > 0 && strides[j - 1] > strides[j]; --j) {
      const int64_t size = sizes[j], stride = strides[j];
      sizes[j] = sizes[j - 1], strides[j] = strides[j - 1];
      sizes[j - 1] = size, strides[j - 1] = stride;
    }
  }
  p->segments = p->length = 1;
  p->stride = 0;
  for (int i = 0; i < dims; ++i) {
    if (sizes[i] == 1) continue;
    if (p->segments == 1 && strides[i] == p->length) {
      p->length *= sizes[i];
    } else if (p->segments == 1 && strides[i] > p->length) {
      p->segments = sizes[i];
      p->stride = strides[i];
    } else if (p->segments > 1 && strides[i] == p->segments * p->stride) {
      p->segments *= sizes[i];
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace fastrl::cuda
