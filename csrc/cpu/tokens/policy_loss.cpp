// The policy loss from token log-probabilities: loss, slope per token and metrics.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "../isa/kernels.h"
#include "../parallel.h"
#include "sequences.h"

namespace fastrl::cpu {
namespace {

constexpr int64_t kTokensPerTask = 4096;  // fixed, so that the order of summation is
constexpr int64_t kNumMetrics = 12;

// In the order of the parts, so that the result does not depend on who summed which.
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

// One ratio for the tokens of a sequence. Where the gradient flows through that ratio, every token
// receives 1/n of the sequence's sum of slopes.
TokenSums sequence_loss(const Kernels& kernels, const TokenInputs& in, int64_t begin, int64_t end) {
  double sum = 0;
  int64_t count = 0;
  kernels.sum_log_ratios(in, begin, end, &sum, &count);
  const double n = static_cast<double>(std::max<int64_t>(count, 1));
  SharedRatio shared{static_cast<float>(sum / n), 0.0f, count == 1};
  if (static_cast<Level>(in.level) == Level::kSequence) {
    shared.slope = static_cast<float>(kernels.sum_slopes(in, begin, end, shared) / n);
  }
  TokenSums sums;
  kernels.token_losses(in, begin, end, shared, &sums);
  return sums;
}

void write_metrics(const TokenSums& sums, float* metrics) {
  for (int64_t i = 0; i < kNumMetrics; ++i) metrics[i] = 0;
  if (sums.active == 0) return;
  const double n = static_cast<double>(sums.active);
  const double values[kNumMetrics] = {sums.policy,
                                      sums.kl / n,
                                      sums.kl_old / n,
                                      sums.entropy / n,
                                      sums.ratio / n,
                                      sums.ratio_max,
                                      sums.ratio_min,
                                      sums.clip_low / n,
                                      sums.clip_high / n,
                                      (sums.clip_low + sums.clip_high) / n,
                                      n,
                                      sums.zero_grad / n};
  for (int64_t i = 0; i < kNumMetrics; ++i) metrics[i] = static_cast<float>(values[i]);
}

std::tuple<Tensor, Tensor, Tensor> policy_loss_fwd(
    const Tensor& logprobs, const Tensor& advantages, const Tensor& mask, const Tensor& weights,
    const std::optional<Tensor>& kl_weights, const std::optional<Tensor>& entropy_weights,
    const std::optional<Tensor>& old_logprobs, const std::optional<Tensor>& ref_logprobs,
    const std::optional<Tensor>& entropy, const std::optional<Tensor>& cu_seqlens, int64_t level,
    int64_t ratio, int64_t kl_estimator, int64_t kl_gradient,
    const std::vector<double>& coefficients) {
  check_like(logprobs, logprobs, ScalarType::Float, "logprobs", "logprobs");
  STD_TORCH_CHECK(logprobs.dim() == 2, "logprobs must have shape [B, T], got ",
                  shape_text(logprobs));
  check_like(mask, logprobs, ScalarType::Bool, "mask", "logprobs");
  const auto check = [&](const auto& tensor, const char* name) {
    check_like(tensor, logprobs, ScalarType::Float, name, "logprobs");
  };
  check(advantages, "advantages");
  check(weights, "weights");
  check(kl_weights, "kl_weights");
  check(entropy_weights, "entropy_weights");
  check(old_logprobs, "old_logprobs");
  check(ref_logprobs, "ref_logprobs");
  check(entropy, "entropy");
  const auto c = check_coefficients<float>(coefficients);
  STD_TORCH_CHECK(ref_logprobs || c.kl_coef == 0,
                  "ref_logprobs must be given when kl_coef is not 0");
  STD_TORCH_CHECK(entropy || c.entropy_coef == 0,
                  "entropy must be given when entropy_coef is not 0");
  const Ratio kind = check_ratio(ratio);
  const KlGradient gradient = check_kl_gradient(kl_gradient);
  STD_TORCH_CHECK(kind != Ratio::kGmpo || gradient != KlGradient::kBiasCorrected,
                  "kl_gradient must not be bias-corrected with the geometric mean of gmpo");
  const Tensor loss = torch::stable::new_empty(logprobs, {}, ScalarType::Float);
  const Tensor slope = empty_like_tokens(logprobs, ScalarType::Float);
  const Tensor metrics = torch::stable::new_empty(logprobs, {kNumMetrics}, ScalarType::Float);
  const float* policy_weights = weights.const_data_ptr<float>();
  TokenInputs in{logprobs.const_data_ptr<float>(),
                 advantages.const_data_ptr<float>(),
                 policy_weights,
                 kl_weights ? kl_weights->const_data_ptr<float>() : policy_weights,
                 entropy_weights ? entropy_weights->const_data_ptr<float>() : policy_weights,
                 data_or_null<float>(old_logprobs),
                 data_or_null<float>(ref_logprobs),
                 data_or_null<float>(entropy),
                 mask.const_data_ptr<bool>(),
                 slope.mutable_data_ptr<float>(),
                 static_cast<int>(check_level(level, kind)),
                 static_cast<int>(kind),
                 static_cast<int>(check_kl_estimator(kl_estimator)),
                 static_cast<int>(gradient),
                 {}};
  std::copy(coefficients.begin(), coefficients.end(), in.coefficients);

  const Kernels& vector_code = kernels();
  std::vector<TokenSums> parts;
  if (static_cast<Level>(in.level) != Level::kToken) {
    const Sequences sequences(logprobs, cu_seqlens);
    parts.resize(sequences.count());
    for_each_task(sequences.count(), [&](int64_t s) {
      parts[s] = sequence_loss(vector_code, in, sequences.begin(s), sequences.end(s));
    });
  } else {
    const int64_t tokens = logprobs.numel();
    parts.resize((tokens + kTokensPerTask - 1) / kTokensPerTask);
    for_each_range(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      vector_code.token_losses(in, begin, end, {}, &parts[begin / kTokensPerTask]);
    });
  }
  const TokenSums sums = combine(parts);
  const double total = sums.policy + static_cast<double>(c.kl_coef) * sums.weighted_kl -
                       static_cast<double>(c.entropy_coef) * sums.weighted_entropy;
  *loss.mutable_data_ptr<float>() = static_cast<float>(total);
  write_metrics(sums, metrics.mutable_data_ptr<float>());
  return {loss, slope, metrics};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("policy_loss_fwd", TORCH_BOX(&fastrl::cpu::policy_loss_fwd));
}
