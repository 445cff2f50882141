// Generalised advantage estimation against the recurrence in double.
#include "cuda/gae/gae.cuh"

#include <cmath>
#include <cstdio>

#include "host/program.h"

using namespace fastrl;
using namespace fastrl::cuda;
using fastrl::cuda::host::Random;

constexpr int kThreads = 2 * kWarp;  // with warps of 8, chunks of 256 tokens

FASTRL_SIZE_OF(GaeParams)

// Scratch for the chunks is made here, only where there is more than one, as the operator does.
extern "C" int gae(const GaeParams* given) {
  GaeParams p = *given;
  const int64_t chunks = (p.sequences.tokens + kThreads * kRun - 1) / (kThreads * kRun);
  std::vector<GaeMap> maps(chunks);
  std::vector<uint32_t> ticket_and_flags(chunks + 1);
  if (chunks > 1) p.maps = maps.data(), p.ticket_and_flags = ticket_and_flags.data();
  return launch_gae<kThreads>(p, 0);
}

GaeParams params_of(const float* rewards, const float* values, int64_t tokens, int64_t sequences,
                    float gamma, float lam, float* advantages, float* returns) {
  GaeParams p{};
  p.in.rewards = rewards, p.in.values = values;
  p.sequences = {nullptr, tokens, sequences, tokens / sequences};
  p.advantages = advantages, p.returns = returns;
  p.gamma = gamma, p.decay = gamma * lam;
  return p;
}

// One row with a mask.
bool agrees(int64_t length, Random random) {
  std::vector<float> rewards(length), values(length), advantages(length), again(length);
  std::vector<float> returns(length);
  host::AlignedCopy mask(length), terminated(length);
  for (int64_t t = 0; t < length; ++t) {
    rewards[t] = random.normal(), values[t] = random.normal();
    mask.data()[t] = random.below(5) != 0, terminated.data()[t] = random.below(50) == 0;
  }
  const auto run = [&](std::vector<float>* result) {
    GaeParams p = params_of(rewards.data(), values.data(), length, 1, 0.9f, 0.8f, result->data(),
                            returns.data());
    p.in.mask = reinterpret_cast<bool*>(mask.data());
    p.in.terminated = reinterpret_cast<bool*>(terminated.data());
    gae(&p);
  };
  run(&advantages);
  run(&again);
  double advantage = 0, next = 0, worst = 0;
  for (int64_t t = length - 1; t >= 0; --t) {
    if (!mask.data()[t]) {
      worst = std::fmax(worst, std::fabs(advantages[t]));
      continue;
    }
    if (terminated.data()[t]) advantage = next = 0;
    advantage = rewards[t] + 0.9 * next - values[t] + 0.9 * 0.8 * advantage;
    next = values[t];
    worst = std::fmax(worst, std::fabs(advantages[t] - advantage));
  }
  if (worst < 1e-5 && again == advantages) return true;
  std::printf("length %d: off by %g\n", static_cast<int>(length), worst);
  return false;
}

// Each reward is read once and each advantage written once, 16 bytes at a time: only such accesses
// are counted.
bool moves_each_token_once() {
  constexpr int64_t n = 3 * kThreads * kRun;
  host::AlignedCopy rewards(4 * n), values(4 * n), advantages(4 * n), returns(4 * n);
  std::memset(rewards.data(), 0, 4 * n);
  std::memset(values.data(), 0, 4 * n);
  std::vector<unsigned char> loads(4 * n), stores(4 * n);
  host::watched[0] = {rewards.data(), 4 * n, loads.data(), nullptr};
  host::watched[1] = {advantages.data(), 4 * n, nullptr, stores.data()};
  const auto floats = [](host::AlignedCopy& x) { return reinterpret_cast<float*>(x.data()); };
  const GaeParams p = params_of(floats(rewards), floats(values), n, 2, 0.9f, 0.9f,
                                floats(advantages), floats(returns));
  gae(&p);
  host::watched[0] = host::watched[1] = {};
  const std::vector<unsigned char> once(4 * n, 1);
  if (loads == once && stores == once) return true;
  std::printf("a token is not moved once, in vectors\n");
  return false;
}

// Nobody looks at cu_seqlens before the launch: whatever they hold, no memory is touched that is
// not the operator's, which the sanitizers see.
void survives_broken_sequences(Random random) {
  constexpr int n = 2 * kThreads * kRun, sequences = 4;
  std::vector<float> rewards(n), values(n), bootstrap(sequences), advantages(n), returns(n);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int32_t> cu_seqlens(sequences + 1);
    for (int32_t& x : cu_seqlens) x = static_cast<int32_t>(random.below(2 * n)) - n / 2;
    GaeParams p = params_of(rewards.data(), values.data(), n, sequences, 0.9f, 0.9f,
                            advantages.data(), returns.data());
    p.in.bootstrap_values = bootstrap.data(), p.in.bootstrap = Bootstrap::kSequence;
    p.sequences.cu_seqlens = cu_seqlens.data();
    gae(&p);
  }
}

int main() {
  survives_broken_sequences(Random(1));
  bool ok = moves_each_token_once();
  for (const int64_t length : {1, 255, 257, 2000}) ok = agrees(length, Random(length)) && ok;
  return ok ? 0 : 1;
}
