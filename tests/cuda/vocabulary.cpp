// The vocabulary kernels on the host machine, for the tests in Python.
#define FASTRL_SPLIT_BYTES 2048
#include "cuda/vocabulary/logits_policy_loss.cuh"
#include "cuda/vocabulary/token_stats.cuh"
#include "cuda/vocabulary/token_stats_backward.cuh"
#include "host/program.h"

using namespace fastrl::cuda;

FASTRL_SIZE_OF(TokenStatsParams)
FASTRL_SIZE_OF(TokenStatsBackwardParams)
FASTRL_SIZE_OF(LogitsPolicyLossParams)
FASTRL_WATCH

namespace {

constexpr int kThreads = 16;

// Of a device with clusters and of one without.
DeviceLimits limits(bool clusters) { return {clusters ? 9 : 8, 40, 227 << 10, 228 << 10, 1 << 20}; }

}  // namespace

extern "C" {

int token_stats(const TokenStatsParams* params, bool clusters) {
  return launch_token_stats<kThreads>(*params, limits(clusters), 0);
}
int token_stats_backward(const TokenStatsBackwardParams* params) {
  return launch_token_stats_backward<kThreads>(*params, limits(true), 0);
}
int logits_policy_loss(const LogitsPolicyLossParams* params, bool clusters) {
  return launch_logits_policy_loss<kThreads>(*params, limits(clusters), 0);
}
}  // extern "C"
