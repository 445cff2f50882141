// The policy loss of tokens and of sequences: its value, and the same bits in every run.
#include "cuda/tokens/policy_loss.cuh"

#include <cstdio>

#include "host/program.h"

using namespace fastrl;
using namespace fastrl::cuda;
using fastrl::cuda::host::Random;

FASTRL_SIZE_OF(PolicyLossParams)

// With `per_block` tokens or sequences the grid is of many blocks on small inputs, too.
extern "C" int policy_loss(const PolicyLossParams* given, int64_t per_block, int64_t ranks) {
  PolicyLossParams p = *given;
  unsigned blocks = policy_loss_blocks(&p);
  if (per_block) {
    const bool by_token = p.objective.level == Level::kToken;
    const int64_t work = by_token ? p.sequences.tokens : p.sequences.count;
    p.per_block = per_block;
    p.ranks = by_token ? 1 : static_cast<unsigned>(ranks);
    blocks = static_cast<unsigned>(work ? (work + per_block - 1) / per_block : 1) * p.ranks;
  }
  std::vector<TokenSums> partial_sums(blocks);
  uint32_t arrived = 0;
  if (blocks > 1) p.partial_sums = partial_sums.data(), p.arrived = &arrived;
  const DeviceLimits hopper{9, 132, 228 << 10, 228 << 10, 50 << 20};
  return launch_policy_loss<2 * kWarp, 2 * kWarp>(p, blocks, hopper, 0);
}

Coefficients<float> coefficients() {
  const float unset = std::numeric_limits<float>::infinity();
  Coefficients<float> c{};
  c.clip_low = c.clip_high = 0.2f;
  c.dual_clip = c.delta = c.kl_clamp = c.log_ratio_low = c.log_ratio_high = unset;
  c.sapo_temperature_pos = c.sapo_temperature_neg = 1.0f;
  return c;
}

// Reinforce with k2; the weights per sequence, everything else per token.
bool agrees(int64_t rows, int64_t length, Level level, Random random) {
  const int64_t n = rows * length;
  std::vector<float> logprobs(n), old(n), ref(n), advantages(n), weights(rows), entropy(n);
  std::vector<float> slope(n), entropy_slope(n);
  host::AlignedCopy mask(n);
  for (float& weight : weights) weight = random.uniform();
  for (int64_t i = 0; i < n; ++i) {
    logprobs[i] = -random.uniform(), old[i] = -random.uniform(), ref[i] = -random.uniform();
    advantages[i] = random.normal(), entropy[i] = random.uniform();
    mask.data()[i] = random.below(4) != 0;
  }
  float losses[2];
  Metrics found[2];
  PolicyLossParams p{};
  p.logprobs = logprobs.data(), p.entropy = entropy.data();
  p.mask = reinterpret_cast<bool*>(mask.data());
  p.constants.advantages = {advantages.data(), false};
  const Constant by_sequence{weights.data(), true};
  p.constants.weights = p.constants.kl_weights = p.constants.entropy_weights = by_sequence;
  p.constants.old_logprobs = old.data(), p.constants.ref_logprobs = ref.data();
  p.objective = {Surrogate::kReinforce, level, KlEstimator::kK2, KlGradient::kExact,
                 coefficients()};
  p.objective.coefficients.kl_coef = 0.1f, p.objective.coefficients.entropy_coef = 0.01f;
  p.sequences = {nullptr, n, rows, length};
  p.slope = slope.data(), p.entropy_slope = entropy_slope.data();
  for (int run = 0; run < 2; ++run) {
    p.loss = &losses[run], p.metrics = &found[run];
    policy_loss(&p, level == Level::kToken ? 24 : 1, 1 + static_cast<int>(level));
  }
  // slope = w (0.1 (logprob - ref) - A), policy loss = -sum w A logprob
  double off_slope = 0, off_entropy = 0, policy = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double weight = mask.data()[i] ? weights[i / length] : 0.0;
    policy -= weight * advantages[i] * logprobs[i];
    off_slope += std::fabs(slope[i] - weight * (0.1 * (logprobs[i] - ref[i]) - advantages[i]));
    off_entropy += std::fabs(entropy_slope[i] + 0.01 * weight);
  }
  const bool same = losses[0] == losses[1] && !std::memcmp(found, found + 1, sizeof(Metrics));
  const double off_loss = std::fabs(policy - found->policy_loss);
  if (same && off_loss < 1e-4 && off_slope < 1e-4 && off_entropy < 1e-5) return true;
  std::printf("%d x %d, level %d: %g %g %g\n", int(rows), int(length), int(level), off_loss,
              off_slope, off_entropy);
  return false;
}

// At token level each log-probability is read once and each slope written once, 16 bytes at a time.
bool moves_each_token_once() {
  constexpr int64_t n = 400;
  host::AlignedCopy logprobs(4 * n), slope(4 * n), mask(n);
  std::memset(logprobs.data(), 0, 4 * n);
  std::memset(mask.data(), 1, n);
  // the other inputs are in another place, so that only this one is counted
  host::AlignedCopy others(4 * n, 0, logprobs.data());
  std::vector<unsigned char> loads(4 * n), stores(4 * n);
  host::watched[0] = {logprobs.data(), 4 * n, loads.data(), nullptr};
  host::watched[1] = {slope.data(), 4 * n, nullptr, stores.data()};
  const auto floats = [](host::AlignedCopy& x) { return reinterpret_cast<float*>(x.data()); };
  float loss;
  Metrics metrics;
  PolicyLossParams p{};
  p.logprobs = floats(logprobs), p.mask = reinterpret_cast<bool*>(mask.data());
  const Constant per_token{floats(others), false};
  p.constants.advantages = p.constants.weights = p.constants.kl_weights = per_token;
  p.constants.entropy_weights = per_token;
  p.constants.old_logprobs = floats(others);
  p.objective.coefficients = coefficients();
  p.sequences = {nullptr, n, 1, n};
  p.loss = &loss, p.slope = floats(slope), p.metrics = &metrics;
  policy_loss(&p, 128, 1);
  host::watched[0] = host::watched[1] = {};
  const std::vector<unsigned char> once(4 * n, 1);
  if (loads == once && stores == once) return true;
  std::printf("a token is not moved once, in vectors\n");
  return false;
}

// Nobody looks at cu_seqlens before the launch: whatever they hold, no memory is touched that is
// not the operator's, which the sanitizers see.
void survives_broken_sequences(Random random) {
  constexpr int n = 150, sequences = 4;
  std::vector<float> tokens(n), constants(sequences, 1.0f), slope(n);
  host::AlignedCopy mask(n);
  std::memset(mask.data(), 1, n);
  float loss;
  Metrics metrics;
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<int32_t> cu_seqlens(sequences + 1);
    for (int32_t& x : cu_seqlens) x = static_cast<int32_t>(random.below(2 * n)) - n / 2;
    PolicyLossParams p{};
    p.logprobs = tokens.data(), p.mask = reinterpret_cast<bool*>(mask.data());
    const Constant by_sequence{constants.data(), true};
    p.constants.advantages = p.constants.weights = p.constants.kl_weights = by_sequence;
    p.constants.entropy_weights = p.constants.policy_weights = by_sequence;
    p.objective.level = static_cast<Level>(trial % 2);
    p.objective.coefficients = coefficients();
    p.sequences = {cu_seqlens.data(), n, sequences, n};
    p.loss = &loss, p.slope = slope.data(), p.metrics = &metrics;
    // one block for all sequences: they may overlap, and which block wrote last does not matter
    policy_loss(&p, p.objective.level == Level::kToken ? 24 : sequences, 1);
  }
}

int main() {
  survives_broken_sequences(Random(1));
  bool ok = moves_each_token_once();
  for (const Level level : {Level::kToken, Level::kSequence, Level::kSequenceToken}) {
    ok = agrees(3, 37, level, Random(static_cast<int>(level))) && ok;
    ok = agrees(1, 1, level, Random(9)) && ok;
  }
  return ok ? 0 : 1;
}
