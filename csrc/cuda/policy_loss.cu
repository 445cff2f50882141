#include "policy_loss.cuh"

namespace fastrl::cuda {
cudaError_t policy_loss(const PolicyLossParams& params, unsigned blocks, cudaStream_t stream) {
  return launch_policy_loss(params, blocks, stream);
}
}  // namespace fastrl::cuda
