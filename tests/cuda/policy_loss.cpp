// The policy loss of tokens and of sequences: the same bits whoever comes first, and the sum.
#include "cuda/tokens/policy_loss.cuh"

#include <cstdio>

#include "host/program.h"

using namespace fastrl;
using namespace fastrl::cuda;
using fastrl::cuda::host::Random;

// With `fewest` tokens or sequences per block the grid is of many blocks on small inputs, too.
extern "C" int policy_loss(const float* logprobs, const float* advantages, const bool* mask,
                           const float* weights, const float* kl_weights,
                           const float* entropy_weights, const float* old_logprobs,
                           const float* ref_logprobs, const float* entropy,
                           const int32_t* cu_seqlens, int64_t tokens, int64_t sequences,
                           int64_t level, int64_t ratio, int64_t kl_estimator, int64_t kl_gradient,
                           const float* coefficients, int64_t fewest, int64_t ranks, float* loss,
                           float* slope, float* metrics) {
  PolicyLossParams p{};
  p.logprobs = logprobs, p.advantages = advantages, p.mask = mask;
  p.weights = weights;
  p.kl_weights = kl_weights ? kl_weights : weights;
  p.entropy_weights = entropy_weights ? entropy_weights : weights;
  p.old_logprobs = old_logprobs, p.ref_logprobs = ref_logprobs, p.entropy = entropy;
  p.cu_seqlens = cu_seqlens;
  p.slope = slope, p.loss = loss, p.metrics = metrics;
  p.tokens = tokens, p.sequences = sequences;
  p.row_length = sequences ? tokens / sequences : 0;
  p.level = static_cast<Level>(level), p.ratio = static_cast<Ratio>(ratio);
  p.kl_estimator = static_cast<KlEstimator>(kl_estimator);
  p.kl_gradient = static_cast<KlGradient>(kl_gradient);
  std::memcpy(&p.coefficients, coefficients, sizeof(p.coefficients));
  unsigned blocks = policy_loss_blocks(&p);
  if (fewest) {
    const int64_t work = p.level == Level::kToken ? tokens : sequences;
    p.per_block = fewest;
    p.ranks = p.level == Level::kToken ? 1 : static_cast<unsigned>(ranks);
    blocks = static_cast<unsigned>(work ? (work + fewest - 1) / fewest : 1) * p.ranks;
  }
  std::vector<TokenSums> parts(blocks);
  uint32_t arrived = 0;
  p.parts = parts.data(), p.arrived = &arrived;
  const DeviceLimits hopper{9, 132, 228 << 10, 228 << 10, 50 << 20};
  const int status = launch_policy_loss<2 * kWarp, 2 * kWarp>(p, blocks, hopper, 0);
  return status != kSuccess || arrived != 0;
}

bool agrees(int64_t rows, int64_t length, int64_t level, Random random) {
  const int64_t n = rows * length;
  const float infinity = std::numeric_limits<float>::infinity();
  const float coefficients[] = {0.2f, 0.2f, infinity, infinity, 1.0f, 1.05f,
                                0.1f, 10,   infinity, infinity, 0.01f};
  std::vector<float> logprobs(n), old(n), ref(n), advantages(n), weights(n), entropy(n), slope(n);
  host::AlignedCopy mask(n);
  for (int64_t i = 0; i < n; ++i) {
    logprobs[i] = -random.uniform(), old[i] = -random.uniform(), ref[i] = -random.uniform();
    advantages[i] = random.normal(), weights[i] = random.uniform(), entropy[i] = random.uniform();
    mask.data()[i] = random.below(4) != 0;
  }
  float loss[2], metrics[2][kNumMetrics];
  double from_slope = 0, from_metrics = 0;
  for (int run = 0; run < 2; ++run) {
    policy_loss(logprobs.data(), advantages.data(), reinterpret_cast<bool*>(mask.data()),
                weights.data(), nullptr, nullptr, old.data(), ref.data(), entropy.data(), nullptr,
                n, rows, level, 4, 1, 0, coefficients, level == 0 ? 24 : 1, 1 + level, &loss[run],
                slope.data(), metrics[run]);
  }
  // reinforce with k2: slope = w (0.1 (logprob - ref) - A), policy loss = -sum w A logprob
  for (int64_t i = 0; i < n; ++i) {
    if (!mask.data()[i]) continue;
    from_metrics -= double(weights[i]) * advantages[i] * logprobs[i];
    from_slope += slope[i] - weights[i] * (0.1 * (logprobs[i] - ref[i]) - advantages[i]);
  }
  const bool same = loss[0] == loss[1] && !std::memcmp(metrics[0], metrics[1], sizeof(metrics[0]));
  const bool right = std::fabs(from_metrics - metrics[0][0]) < 1e-4 && std::fabs(from_slope) < 1e-4;
  if (same && right) return true;
  std::printf("%d x %d, level %d: %g %g\n", int(rows), int(length), int(level),
              from_metrics - metrics[0][0], from_slope);
  return false;
}

// At token level each log-probability is read once and each slope written once, 16 bytes at a time.
bool moves_each_token_once() {
  constexpr int64_t n = 400;
  const float infinity = std::numeric_limits<float>::infinity();
  const float coefficients[] = {0.2f, 0.2f, infinity, infinity, 1, 1, 0, 1, infinity, infinity, 0};
  host::AlignedCopy logprobs(4 * n), slope(4 * n), mask(n);
  std::memset(logprobs.data(), 0, 4 * n);
  std::memset(mask.data(), 1, n);
  // the other inputs lie elsewhere, so that only this one is counted
  host::AlignedCopy others(4 * n, 0, logprobs.data());
  std::vector<unsigned char> loads(4 * n), stores(4 * n);
  host::watched[0] = {logprobs.data(), 4 * n, loads.data(), nullptr};
  host::watched[1] = {slope.data(), 4 * n, nullptr, stores.data()};
  const auto floats = [](host::AlignedCopy& x) { return reinterpret_cast<float*>(x.data()); };
  float loss, metrics[kNumMetrics];
  policy_loss(floats(logprobs), floats(others), reinterpret_cast<bool*>(mask.data()),
              floats(others), nullptr, nullptr, floats(others), nullptr, nullptr, nullptr, n, 1, 0,
              0, 0, 0, coefficients, 128, 1, &loss, floats(slope), metrics);
  host::watched[0] = host::watched[1] = {};
  const std::vector<unsigned char> once(4 * n, 1);
  if (loads == once && stores == once) return true;
  std::printf("a token is not moved once, in vectors\n");
  return false;
}

int main() {
  bool ok = moves_each_token_once();
  for (const int64_t level : {0, 1, 2}) {
    ok = agrees(3, 37, level, Random(level)) && ok;
    ok = agrees(1, 1, level, Random(9)) && ok;
  }
  return ok ? 0 : 1;
}
