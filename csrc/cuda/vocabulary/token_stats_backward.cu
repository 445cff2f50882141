#include "token_stats_backward.cuh"

namespace fastrl::cuda {
cudaError_t token_stats_backward(const TokenStatsBackwardParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  const cudaError_t status = device_limits(&limits);
  return status == cudaSuccess ? launch_token_stats_backward(params, limits, stream) : status;
}
}  // namespace fastrl::cuda
