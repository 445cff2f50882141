// Generalized advantage estimation: a scan from the last token of each sequence to the first.
#include <tuple>

#include "../parallel.h"
#include "sequences.h"

namespace fastrl::cpu {
namespace {

enum class Bootstrap { kNone, kSequence, kToken };

struct Inputs {
  const float *rewards, *values, *bootstrap;
  const bool *mask, *terminated, *truncated;
  Bootstrap kind;
  float *advantages, *returns;
  double gamma, lam;
};

// Scans `kChains` sequences of equal length together, so that their latencies overlap. begin[k] is
// the first token of the k-th.
template <int kChains, bool kMask, bool kEnds>
void scan(const Inputs& in, const int64_t* begin, const int64_t* sequence, int64_t length) {
  const double gamma = in.gamma, decay = in.gamma * in.lam;
  double next_value[kChains], trace[kChains];
  for (int k = 0; k < kChains; ++k) {
    next_value[k] = in.kind == Bootstrap::kSequence ? in.bootstrap[sequence[k]] : 0.0;
    trace[k] = 0.0;
  }
  // with a bootstrap per token, the state after the last active one has that token's
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
        if (in.kind == Bootstrap::kToken && (truncated || !seen[k])) following = in.bootstrap[i];
        if (truncated || terminated) carried = 0;
        if (terminated) following = 0;
        seen[k] |= active;
      }
      const double advantage = reward + gamma * following - value + decay * carried;
      in.advantages[i] = active ? static_cast<float>(advantage) : 0.0f;
      in.returns[i] = active ? static_cast<float>(advantage + value) : 0.0f;
      trace[k] = active ? advantage : trace[k];
      next_value[k] = active ? value : next_value[k];
    }
  }
}

template <int kChains>
void scan(const Inputs& in, const int64_t* begin, const int64_t* sequence, int64_t length) {
  const bool ends = in.terminated || in.truncated || in.kind == Bootstrap::kToken;
  if (in.mask) {
    ends ? scan<kChains, true, true>(in, begin, sequence, length)
         : scan<kChains, true, false>(in, begin, sequence, length);
  } else {
    ends ? scan<kChains, false, true>(in, begin, sequence, length)
         : scan<kChains, false, false>(in, begin, sequence, length);
  }
}

std::tuple<Tensor, Tensor> gae_fwd(const Tensor& rewards, const Tensor& values,
                                   const std::optional<Tensor>& mask,
                                   const std::optional<Tensor>& terminated,
                                   const std::optional<Tensor>& truncated,
                                   const std::optional<Tensor>& bootstrap_values,
                                   const std::optional<Tensor>& cu_seqlens, double gamma,
                                   double lam) {
  check_like(rewards, rewards, ScalarType::Float, "rewards", "rewards");
  STD_TORCH_CHECK(rewards.dim() == 2, "rewards must have shape [B, T], got ", shape_text(rewards));
  check_like(values, rewards, ScalarType::Float, "values", "rewards");
  check_like(mask, rewards, ScalarType::Bool, "mask", "rewards");
  check_like(terminated, rewards, ScalarType::Bool, "terminated", "rewards");
  check_like(truncated, rewards, ScalarType::Bool, "truncated", "rewards");
  const Sequences sequences(rewards, cu_seqlens);
  Bootstrap kind = Bootstrap::kNone;
  if (bootstrap_values) {
    kind = bootstrap_values->dim() == 2 ? Bootstrap::kToken : Bootstrap::kSequence;
    if (kind == Bootstrap::kToken) {
      check_like(*bootstrap_values, rewards, ScalarType::Float, "bootstrap_values", "rewards");
    } else {
      check_dtype(*bootstrap_values, ScalarType::Float, "bootstrap_values");
      STD_TORCH_CHECK(bootstrap_values->dim() == 1 && bootstrap_values->is_contiguous() &&
                          bootstrap_values->size(0) == sequences.count(),
                      "bootstrap_values must have one value per sequence (", sequences.count(),
                      ") or per token, got ", shape_text(*bootstrap_values));
    }
  }
  const Tensor advantages = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor returns = empty_like_tokens(rewards, ScalarType::Float);
  const Inputs in{rewards.const_data_ptr<float>(),
                  values.const_data_ptr<float>(),
                  data_or_null<float>(bootstrap_values),
                  data_or_null<bool>(mask),
                  data_or_null<bool>(terminated),
                  data_or_null<bool>(truncated),
                  kind,
                  advantages.mutable_data_ptr<float>(),
                  returns.mutable_data_ptr<float>(),
                  gamma,
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
      scan<kChains>(in, begin, sequence, length(first));
    } else {
      for (int64_t k = 0; k < last - first; ++k) {
        scan<1>(in, begin + k, sequence + k, length(first + k));
      }
    }
  });
  return {advantages, returns};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) { m.impl("gae_fwd", TORCH_BOX(&fastrl::cpu::gae_fwd)); }
