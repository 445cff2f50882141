// The policy loss from token log-probabilities: loss, slope per token and metrics.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "../isa/kernels.h"
#include "../parallel.h"
#include "sequences.h"

namespace fastrl::cpu {
namespace {

constexpr int64_t kTokensPerTask = 4096;  // fixed, to fix the order of summation

// Adds in the order of the parts, so that the result does not depend on the threads.
TokenSums combine(const std::vector<TokenSums>& parts) {
  TokenSums total{};
  total.ratio_max = -std::numeric_limits<float>::infinity();
  total.ratio_min = std::numeric_limits<float>::infinity();
  for (const TokenSums& part : parts) {
    total.policy += part.policy;
    total.weighted_kl += part.weighted_kl;
    total.weighted_entropy += part.weighted_entropy;
    total.kl += part.kl;
    total.kl_old += part.kl_old;
    total.entropy += part.entropy;
    total.ratio += part.ratio;
    const float high = part.ratio_max, low = part.ratio_min;
    if (high > total.ratio_max || std::isnan(high)) total.ratio_max = high;
    if (low < total.ratio_min || std::isnan(low)) total.ratio_min = low;
    total.active += part.active;
    total.clip_low += part.clip_low;
    total.clip_high += part.clip_high;
    total.zero_grad += part.zero_grad;
  }
  return total;
}

// The ratio that the tokens of a sequence share. Where the gradient flows through it, every token
// receives 1/n of the sum of slopes over the sequence.
Segment with_shared_ratio(const Kernels& kernels, const TokenInputs& in, Segment sequence) {
  double sum = 0;
  int64_t count = 0;
  kernels.sum_log_ratios(in, sequence, &sum, &count);
  const double n = static_cast<double>(std::max<int64_t>(count, 1));
  sequence.shared = {static_cast<float>(sum / n), 0.0f, count == 1};
  if (in.objective.level == Level::kSequence) {
    sequence.shared.slope = static_cast<float>(kernels.sum_slopes(in, sequence, count) / n);
  }
  return sequence;
}

bool any_by_sequence(const LossConstants& c) {
  return c.advantages.by_sequence || c.weights.by_sequence || c.kl_weights.by_sequence ||
         c.entropy_weights.by_sequence || c.policy_weights.by_sequence;
}

// The sums over all tokens, in parts that depend on the shape alone.
TokenSums run(const Kernels& kernels, const TokenInputs& in, const Sequences& sequences,
              int64_t tokens) {
  std::vector<TokenSums> parts;
  if (in.objective.level != Level::kToken) {
    const int64_t count = sequences.count();
    const int64_t at_once =
        std::max<int64_t>(1, kTokensPerTask * count / std::max<int64_t>(tokens, 1));
    parts.resize((count + at_once - 1) / at_once);
    for_each_range(count, at_once, [&](int64_t first, int64_t after) {
      std::vector<Segment> segments;
      for (int64_t s = first; s < after; ++s) {
        const Segment sequence{sequences.begin(s), sequences.end(s), s, {}};
        segments.push_back(with_shared_ratio(kernels, in, sequence));
      }
      kernels.token_losses(in, segments.data(), after - first, &parts[first / at_once]);
    });
    return combine(parts);
  }
  const bool apart = any_by_sequence(in.constants);
  parts.resize((tokens + kTokensPerTask - 1) / kTokensPerTask);
  for_each_range(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
    TokenSums* sums = &parts[begin / kTokensPerTask];
    if (!apart) {
      const Segment all{begin, end, 0, {}};
      kernels.token_losses(in, &all, 1, sums);
      return;
    }
    std::vector<Segment> segments;
    for (int64_t s = sequences.of(begin); begin < end; ++s) {
      const int64_t last = std::min(end, sequences.end(s));
      if (last > begin) segments.push_back({begin, last, s, {}});
      begin = last;
    }
    kernels.token_losses(in, segments.data(), static_cast<int64_t>(segments.size()), sums);
  });
  return combine(parts);
}

Metrics metrics_of(const TokenSums& sums) {
  if (sums.active == 0) return {};
  const double n = static_cast<double>(sums.active);
  Metrics metrics{};
  metrics.policy_loss = static_cast<float>(sums.policy);
  metrics.kl = static_cast<float>(sums.kl / n);
  metrics.kl_old = static_cast<float>(sums.kl_old / n);
  metrics.entropy = static_cast<float>(sums.entropy / n);
  metrics.ratio_mean = static_cast<float>(sums.ratio / n);
  metrics.ratio_max = sums.ratio_max;
  metrics.ratio_min = sums.ratio_min;
  metrics.clip_low = static_cast<float>(sums.clip_low / n);
  metrics.clip_high = static_cast<float>(sums.clip_high / n);
  metrics.clip_fraction = static_cast<float>((sums.clip_low + sums.clip_high) / n);
  metrics.active_tokens = static_cast<float>(n);
  metrics.zero_grad_fraction = static_cast<float>(sums.zero_grad / n);
  return metrics;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss_fwd(
    const Tensor& logprobs, const std::optional<Tensor>& entropy, const Tensor& mask,
    const LossArguments& arguments, const ObjectiveArguments& objective_arguments) {
  const auto objective = check_objective<float>(objective_arguments);
  const Coefficients<float>& c = objective.coefficients;
  check_tokens(logprobs, entropy, mask, objective);
  const Sequences sequences(logprobs, arguments.cu_seqlens);
  const LossConstants constants =
      check_loss(arguments, objective, logprobs, sequences.count(), "logprobs");
  const Tensor loss = new_tensor(logprobs, {}, ScalarType::Float);
  const Tensor slope = empty_like_tokens(logprobs, ScalarType::Float);
  const Tensor entropy_slope = c.entropy_coef != 0 ? empty_like_tokens(logprobs, ScalarType::Float)
                                                   : new_tensor(logprobs, {0}, ScalarType::Float);
  const Tensor metrics = new_tensor(logprobs, {kNumMetrics}, ScalarType::Float);
  const TokenInputs in{logprobs.const_data_ptr<float>(),
                       data_or_null<float>(entropy),
                       mask.const_data_ptr<bool>(),
                       constants,
                       slope.mutable_data_ptr<float>(),
                       entropy_slope.mutable_data_ptr<float>(),
                       objective};
  const TokenSums sums = run(kernels(), in, sequences, logprobs.numel());
  const double total = sums.policy + static_cast<double>(c.kl_coef) * sums.weighted_kl -
                       static_cast<double>(c.entropy_coef) * sums.weighted_entropy;
  *loss.mutable_data_ptr<float>() = static_cast<float>(total);
  const Metrics values = metrics_of(sums);
  std::memcpy(metrics.mutable_data_ptr<float>(), &values, sizeof(values));
  return {loss, slope, entropy_slope, metrics};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("policy_loss_fwd", fastrl::boxed<fastrl::cpu::policy_loss_fwd>);
}
