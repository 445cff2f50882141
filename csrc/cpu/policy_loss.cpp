// The policy loss from token log-probabilities: loss, slope per token and metrics.
#include <limits>
#include <tuple>

#include "parallel.h"
#include "sequences.h"

namespace fastrl::cpu {
namespace {

using Math = ScalarMath<float>;

constexpr int64_t kTokensPerTask = 4096;  // fixed, so that the order of summation is
constexpr int64_t kNumMetrics = 12;

struct Inputs {
  const float *logprobs, *advantages, *weights, *old_logprobs, *ref_logprobs, *entropy;
  const bool* mask;
  float* slope;
  Ratio ratio;
  KlEstimator kl_estimator;
  Coefficients<float> coefficients;

  float difference(int64_t i) const { return old_logprobs ? logprobs[i] - old_logprobs[i] : 0.0f; }
};

// Sums over active tokens.
struct Sums {
  double policy = 0, weighted_kl = 0, weighted_entropy = 0;
  double kl = 0, kl_old = 0, entropy = 0, ratio = 0;
  double ratio_max = -std::numeric_limits<double>::infinity();
  double ratio_min = std::numeric_limits<double>::infinity();
  int64_t clip_low = 0, clip_high = 0, active = 0, zero_grad = 0;

  void add_ratio(double r) {
    ratio += r;
    ratio_max = r > ratio_max || r != r ? r : ratio_max;
    ratio_min = r < ratio_min || r != r ? r : ratio_min;
  }
  void add(const Sums& other) {
    policy += other.policy;
    weighted_kl += other.weighted_kl;
    weighted_entropy += other.weighted_entropy;
    kl += other.kl;
    kl_old += other.kl_old;
    entropy += other.entropy;
    const double mean_part = ratio + other.ratio;
    if (other.active > 0) {
      add_ratio(other.ratio_max);
      add_ratio(other.ratio_min);
    }
    ratio = mean_part;
    clip_low += other.clip_low;
    clip_high += other.clip_high;
    active += other.active;
    zero_grad += other.zero_grad;
  }
};

// The part of a token that does not depend on the level; writes its slope and counts it.
void add_token(const Inputs& in, int64_t i, const ObjectiveTerms<float>& terms, float token_slope,
               Sums* sums) {
  const float weight = in.weights[i], logprob = in.logprobs[i];
  const Coefficients<float>& c = in.coefficients;
  float slope = token_slope;
  if (in.ref_logprobs) {
    const auto kl = kl_terms<Math>(in.kl_estimator, in.ref_logprobs[i] - logprob, c);
    sums->kl += kl.value;
    if (c.kl_coef != 0) {
      sums->weighted_kl += static_cast<double>(weight) * kl.value;
      slope += weight * (c.kl_coef * kl.slope);
    }
  }
  in.slope[i] = slope;
  sums->active += 1;
  sums->zero_grad += slope == 0 && weight * c.entropy_coef == 0;
  sums->policy += static_cast<double>(weight) * terms.loss;
  sums->entropy += in.entropy ? in.entropy[i] : -logprob;
  if (in.entropy && c.entropy_coef != 0) {
    sums->weighted_entropy += static_cast<double>(weight) * in.entropy[i];
  }
  if (in.old_logprobs) {
    const float limit = c.max_log_ratio();
    const float log_ratio = clamp<Math>(in.difference(i), -limit, limit);
    sums->kl_old += Math::expm1(log_ratio) - log_ratio;
  }
  sums->add_ratio(terms.ratio);
  sums->clip_low += terms.clip < 0;
  sums->clip_high += terms.clip > 0;
}

Sums token_level(const Inputs& in, int64_t begin, int64_t end) {
  Sums sums;
  for (int64_t i = begin; i < end; ++i) {
    if (!in.mask[i]) {
      in.slope[i] = 0;
      continue;
    }
    const auto terms = objective_terms<Math>(in.ratio, in.difference(i), in.advantages[i],
                                             in.logprobs[i], in.coefficients);
    add_token(in, i, terms, in.weights[i] * terms.slope, &sums);
  }
  return sums;
}

// One ratio for the tokens of a sequence. Where the gradient flows through that ratio, every token
// receives 1/n of the sequence's sum of w f'.
Sums sequence_level(const Inputs& in, int64_t begin, int64_t end) {
  const Coefficients<float>& c = in.coefficients;
  const bool gmpo = in.ratio == Ratio::kGmpo;
  const bool shared = gmpo || in.ratio == Ratio::kPpoClip || in.ratio == Ratio::kSapo;
  double total = 0;
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (!in.mask[i]) continue;
    const float difference = in.difference(i);
    total += gmpo ? gmpo_terms<Math>(difference, in.advantages[i], c).log_ratio : difference;
    ++count;
  }
  const float mean = count ? static_cast<float>(total / count) : 0.0f;

  const auto terms_of = [&](int64_t i) {
    if (!gmpo) return objective_terms<Math>(in.ratio, mean, in.advantages[i], in.logprobs[i], c);
    const float ratio = Math::exp(mean), loss = -in.advantages[i] * ratio;
    const auto own = gmpo_terms<Math>(in.difference(i), in.advantages[i], c);
    return ObjectiveTerms<float>{loss, loss, own.clip, mean, ratio};
  };
  double shared_slope = 0;
  for (int64_t i = begin; shared && i < end; ++i) {
    if (in.mask[i]) shared_slope += static_cast<double>(in.weights[i]) * terms_of(i).slope;
  }
  if (count) shared_slope /= count;

  Sums sums;
  for (int64_t i = begin; i < end; ++i) {
    if (!in.mask[i]) {
      in.slope[i] = 0;
      continue;
    }
    const auto terms = terms_of(i);
    float slope = shared ? static_cast<float>(shared_slope) : in.weights[i] * terms.slope;
    if (gmpo && !gmpo_terms<Math>(in.difference(i), in.advantages[i], c).moves) slope = 0;
    add_token(in, i, terms, slope, &sums);
  }
  return sums;
}

void write_metrics(const Sums& sums, float* metrics) {
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
    const std::optional<Tensor>& old_logprobs, const std::optional<Tensor>& ref_logprobs,
    const std::optional<Tensor>& entropy, const std::optional<Tensor>& cu_seqlens,
    bool sequence_level_ratio, int64_t ratio, int64_t kl_estimator,
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
  check(old_logprobs, "old_logprobs");
  check(ref_logprobs, "ref_logprobs");
  check(entropy, "entropy");
  const auto c = check_coefficients<float>(coefficients);
  STD_TORCH_CHECK(ref_logprobs || c.kl_coef == 0,
                  "ref_logprobs must be given when kl_coef is not 0");
  STD_TORCH_CHECK(entropy || c.entropy_coef == 0,
                  "entropy must be given when entropy_coef is not 0");
  const Tensor loss = torch::stable::new_empty(logprobs, {}, ScalarType::Float);
  const Tensor slope = empty_like_tokens(logprobs, ScalarType::Float);
  const Tensor metrics = torch::stable::new_empty(logprobs, {kNumMetrics}, ScalarType::Float);
  const Inputs in{logprobs.const_data_ptr<float>(),
                  advantages.const_data_ptr<float>(),
                  weights.const_data_ptr<float>(),
                  data_or_null<float>(old_logprobs),
                  data_or_null<float>(ref_logprobs),
                  data_or_null<float>(entropy),
                  mask.const_data_ptr<bool>(),
                  slope.mutable_data_ptr<float>(),
                  check_ratio(ratio),
                  check_kl_estimator(kl_estimator),
                  c};

  std::vector<Sums> parts;
  if (sequence_level_ratio || in.ratio == Ratio::kGmpo) {
    const Sequences sequences(logprobs, cu_seqlens);
    parts.resize(sequences.count());
    for_each_task(sequences.count(), [&](int64_t s) {
      parts[s] = sequence_level(in, sequences.begin(s), sequences.end(s));
    });
  } else {
    const int64_t tokens = logprobs.numel();
    parts.resize((tokens + kTokensPerTask - 1) / kTokensPerTask);
    for_each_range(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      parts[begin / kTokensPerTask] = token_level(in, begin, end);
    });
  }
  Sums sums;
  for (const Sums& part : parts) sums.add(part);
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
