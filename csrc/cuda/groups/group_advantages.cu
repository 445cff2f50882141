#include "group_advantages.cuh"

namespace fastrl::cuda {
cudaError_t group_advantages(const GroupAdvantagesParams& params, cudaStream_t stream) {
  return launch_group_advantages(params, stream);
}
}  // namespace fastrl::cuda
