#include "sequence_weights.cuh"

namespace fastrl::cuda {
static_assert(kChunk == kTokensOfChunk, "the operator allocates scratch for chunks of this size");

cudaError_t weigh_sequences(const SequenceWeightsParams& params, cudaStream_t stream) {
  return launch_sequence_weights(params, stream);
}
}  // namespace fastrl::cuda
