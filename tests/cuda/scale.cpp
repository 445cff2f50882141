// Scaling a gradient in place: each element is multiplied once, and none where the factor is 1.
#include "cuda/vocabulary/scale.cuh"

#include <cstdio>

#include "host/program.h"

using namespace fastrl::cuda;
using fastrl::cuda::host::AlignedCopy;
using fastrl::cuda::host::Random;

constexpr int kThreads = 2 * kWarp;

FASTRL_SIZE_OF(ScaleParams)
FASTRL_WATCH

extern "C" {

int scale(const ScaleParams* params) {
  const DeviceLimits limits{9, 2, 227 << 10, 228 << 10, 1 << 20};  // few SMs: blocks take turns
  return launch_scale<kThreads>(*params, limits, 0);
}

bool segments_of(int dims, int64_t* sizes, int64_t* strides, ScaleParams* params) {
  return find_segments(dims, sizes, strides, params);
}

}  // extern "C"

// Segments that end with their buffer, so that AddressSanitizer sees a step beyond it.
bool agrees(int segments, int length, int stride, int offset, Random random) {
  const size_t count = static_cast<size_t>(segments - 1) * stride + length;
  AlignedCopy memory(2 * count, 2 * offset);
  BFloat16* gradient = reinterpret_cast<BFloat16*>(memory.data());
  std::vector<float> before(count);
  for (size_t i = 0; i < count; ++i) {
    gradient[i] = Element<BFloat16>::from(random.normal());
    before[i] = Element<BFloat16>::value(gradient[i]);
  }
  const float factor = 0.3f;
  const ScaleParams p{kBFloat16, gradient, segments,
                      length,    stride,   {&factor, NumberType::kFloat32}};
  bool ok = scale(&p) == kSuccess;
  for (size_t i = 0; i < count; ++i) {
    const bool inside = static_cast<int>(i % stride) < length;
    const float want =
        inside ? Element<BFloat16>::value(Element<BFloat16>::from(before[i] * factor)) : before[i];
    ok &= Element<BFloat16>::value(gradient[i]) == want;
  }
  if (!ok) std::fprintf(stderr, "%d segments of %d are wrong\n", segments, length);
  return ok;
}

int main() {
  bool ok = true;
  ok &= agrees(1, 5000, 5000, 0, Random(1));
  ok &= agrees(3, 1001, 1003, 3, Random(2));
  ok &= agrees(40, 3, 5, 1, Random(3));
  ok &= agrees(2, 512, 520, 0, Random(4));
  return ok ? 0 : 1;
}
