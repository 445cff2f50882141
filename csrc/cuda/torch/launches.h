// The launches, each defined beside its kernel in a .cu file that knows nothing of torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../gae/gae.h"
#include "../groups/group_advantages.h"
#include "../tokens/policy_loss.h"
#include "../tokens/sequence_weights.h"
#include "../vocabulary/logits.h"
#include "../vocabulary/scale.h"

namespace fastrl::cuda {

cudaError_t gae(const GaeParams& params, cudaStream_t stream);
cudaError_t group_advantages(const GroupAdvantagesParams& params, cudaStream_t stream);
cudaError_t logits_policy_loss(const LogitsPolicyLossParams& params, cudaStream_t stream);
cudaError_t policy_loss(const PolicyLossParams& params, unsigned blocks, cudaStream_t stream);
cudaError_t scale(const ScaleParams& params, cudaStream_t stream);
cudaError_t weigh_sequences(const SequenceWeightsParams& params, cudaStream_t stream);
cudaError_t token_stats(const TokenStatsParams& params, cudaStream_t stream);
cudaError_t token_stats_backward(const TokenStatsBackwardParams& params, cudaStream_t stream);

}  // namespace fastrl::cuda
