#include "logits_policy_loss.cuh"

namespace fastrl::cuda {
cudaError_t logits_policy_loss(const LogitsPolicyLossParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  const cudaError_t status = device_limits(&limits);
  return status == cudaSuccess ? launch_logits_policy_loss(params, limits, stream) : status;
}
}  // namespace fastrl::cuda
