// The operator scale_ on CUDA tensors.
#include "launches.h"
#include "logits_operator.h"

namespace fastrl::cuda {
namespace {

void scale_(const Tensor& gradient, const Tensor& factor) {
  const Call call(gradient, "gradient");
  check_device(factor, gradient, "factor", "gradient");
  STD_TORCH_CHECK(factor.numel() == 1, "factor must have one element, got shape ",
                  shape_text(factor));
  constexpr int64_t kMostDims = 8;
  const int64_t dims = gradient.dim();
  STD_TORCH_CHECK(dims <= kMostDims, "gradient must have at most 8 dimensions, got ", dims);
  if (gradient.numel() == 0) return;
  ScaleParams params{};
  params.type = logits_type(gradient, "gradient");
  params.gradient = gradient.mutable_data_ptr();
  params.factor = number_of(factor, "factor");
  STD_TORCH_CHECK(params.factor.type <= NumberType::kBFloat16,
                  "factor must be of a float dtype, got ",
                  torch::headeronly::toString(factor.scalar_type()));
  int64_t sizes[kMostDims], strides[kMostDims];
  for (int64_t i = 0; i < dims; ++i) {
    sizes[i] = gradient.size(i);
    strides[i] = gradient.stride(i);
  }
  STD_TORCH_CHECK(find_segments(static_cast<int>(dims), sizes, strides, &params),
                  "gradient must consist of contiguous segments at a constant distance");
  check_launch(scale(params, call.stream()), "scale");
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("scale_", fastrl::boxed<fastrl::cuda::scale_>);
}
