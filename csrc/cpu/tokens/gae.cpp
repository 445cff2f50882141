// Generalized advantage estimation: a scan from the last token of each sequence to the first.
#include <tuple>

#include "../../check_gae.h"
#include "../parallel.h"
#include "sequences.h"

namespace fastrl::cpu {
namespace {

struct Scan {
  GaeInputs in;
  float *advantages, *returns;
  double gamma, lam;
};

// Scans `kChains` sequences of equal length together, so that their latencies overlap. begin[k] is
// the first token of the k-th.
template <int kChains, bool kMask, bool kEnds>
void scan(const Scan& all, const int64_t* begin, const int64_t* sequence, int64_t length) {
  const GaeInputs& in = all.in;
  const double gamma = all.gamma, decay = all.gamma * all.lam;
  double next_value[kChains], trace[kChains];
  for (int k = 0; k < kChains; ++k) {
    next_value[k] = in.bootstrap == Bootstrap::kSequence ? in.bootstrap_values[sequence[k]] : 0.0;
    trace[k] = 0.0;
  }
  // with bootstrap values per token, the state after the last active token has that token's
  bool seen[kChains] = {};
  for (int64_t t = length - 1; t >= 0; --t) {
    for (int k = 0; k < kChains; ++k) {
      const int64_t i = begin[k] + t;
      const bool active = !kMask || in.mask[i];
      const double value = in.values[i], reward = in.rewards[i];
      double following = next_value[k], carried = trace[k];
      if (kEnds) {
        const bool truncated = in.truncated && in.truncated[i];
        const bool terminated = in.terminated && in.terminated[i];
        if (in.bootstrap == Bootstrap::kToken && (truncated || !seen[k]))
          following = in.bootstrap_values[i];
        if (truncated || terminated) carried = 0;
        if (terminated) following = 0;
        seen[k] |= active;
      }
      const double advantage = reward + gamma * following - value + decay * carried;
      all.advantages[i] = active ? static_cast<float>(advantage) : 0.0f;
      all.returns[i] = active ? static_cast<float>(advantage + value) : 0.0f;
      trace[k] = active ? advantage : trace[k];
      next_value[k] = active ? value : next_value[k];
    }
  }
}

template <int kChains>
void scan(const Scan& all, const int64_t* begin, const int64_t* sequence, int64_t length) {
  const GaeInputs& in = all.in;
  const bool ends = in.terminated || in.truncated || in.bootstrap == Bootstrap::kToken;
  if (in.mask) {
    ends ? scan<kChains, true, true>(all, begin, sequence, length)
         : scan<kChains, true, false>(all, begin, sequence, length);
  } else {
    ends ? scan<kChains, false, true>(all, begin, sequence, length)
         : scan<kChains, false, false>(all, begin, sequence, length);
  }
}

std::tuple<Tensor, Tensor> gae_fwd(const GaeArguments& arguments,
                                   const std::optional<Tensor>& cu_seqlens, double gamma,
                                   double lam) {
  const int64_t count = check_sequences(arguments.rewards, cu_seqlens);
  const GaeInputs in = check_gae(arguments, count);
  const Sequences sequences(arguments.rewards, cu_seqlens);
  const Tensor advantages = empty_like_tokens(arguments.rewards, ScalarType::Float);
  const Tensor returns = empty_like_tokens(arguments.rewards, ScalarType::Float);
  const Scan all{in, advantages.mutable_data_ptr<float>(), returns.mutable_data_ptr<float>(), gamma,
                 lam};
  constexpr int64_t kChains = 4;
  const auto length = [&](int64_t s) { return sequences.end(s) - sequences.begin(s); };
  for_each_range(sequences.count(), kChains, [&](int64_t first, int64_t last) {
    int64_t begin[kChains], sequence[kChains];
    bool alike = last - first == kChains;
    for (int64_t s = first; s < last; ++s) {
      begin[s - first] = sequences.begin(s);
      sequence[s - first] = s;
      alike = alike && length(s) == length(first);
    }
    if (alike) {
      scan<kChains>(all, begin, sequence, length(first));
    } else {
      for (int64_t k = 0; k < last - first; ++k) {
        scan<1>(all, begin + k, sequence + k, length(first + k));
      }
    }
  });
  return {advantages, returns};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("gae_fwd", fastrl::boxed<fastrl::cpu::gae_fwd>);
}
