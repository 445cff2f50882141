#include "gae.cuh"

namespace fastrl::cuda {
cudaError_t gae(const GaeParams& params, cudaStream_t stream) { return launch_gae(params, stream); }
}  // namespace fastrl::cuda
