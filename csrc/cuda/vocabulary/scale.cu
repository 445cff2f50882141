#include "scale.cuh"

namespace fastrl::cuda {
cudaError_t scale(const ScaleParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  const cudaError_t status = device_limits(&limits);
  return status == cudaSuccess ? launch_scale(params, limits, stream) : status;
}
}  // namespace fastrl::cuda
