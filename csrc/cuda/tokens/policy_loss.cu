#include "policy_loss.cuh"

namespace fastrl::cuda {
cudaError_t policy_loss(const PolicyLossParams& params, unsigned blocks, cudaStream_t stream) {
  DeviceLimits limits;
  const cudaError_t status = device_limits(&limits);
  return status == cudaSuccess ? launch_policy_loss(params, blocks, limits, stream) : status;
}
}  // namespace fastrl::cuda
