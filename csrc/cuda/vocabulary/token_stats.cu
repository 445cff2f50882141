#include "token_stats.cuh"

namespace fastrl::cuda {
cudaError_t token_stats(const TokenStatsParams& params, cudaStream_t stream) {
  DeviceLimits limits;
  const cudaError_t status = device_limits(&limits);
  return status == cudaSuccess ? launch_token_stats(params, limits, stream) : status;
}
}  // namespace fastrl::cuda
