// The policy loss from logits in one pass: while a row is in cache, its log-probability, the slope
// of its loss, and its gradient.
#include <tuple>

#include "../huge_pages.h"
#include "rows.h"

namespace fastrl::cpu {
namespace {

// The per-token inputs of the objective, and what a row's statistics make of them.
class TokenLoss {
 public:
  TokenLoss(const Tensor& token_ids, const Tensor& advantages, const Tensor& weights,
            const std::optional<Tensor>& kl_weights, const std::optional<Tensor>& entropy_weights,
            const std::optional<Tensor>& old_logprobs, const std::optional<Tensor>& ref_logprobs,
            int64_t ratio, int64_t kl_estimator, int64_t kl_gradient,
            const std::vector<double>& coefficients)
      : ratio_(check_ratio(ratio)),
        kl_estimator_(check_kl_estimator(kl_estimator)),
        kl_gradient_(check_kl_gradient(kl_gradient)),
        coefficients_(check_coefficients<double>(coefficients)) {
    const auto check = [&](const auto& tensor, const char* name) {
      check_like(tensor, token_ids, ScalarType::Float, name, "token_ids");
    };
    check(advantages, "advantages");
    check(weights, "weights");
    check(kl_weights, "kl_weights");
    check(entropy_weights, "entropy_weights");
    check(old_logprobs, "old_logprobs");
    check(ref_logprobs, "ref_logprobs");
    STD_TORCH_CHECK(ratio_ != Ratio::kGmpo,
                    "ratio must be a token-level objective, got gmpo: use policy_loss_fwd");
    STD_TORCH_CHECK(ref_logprobs || coefficients_.kl_coef == 0,
                    "ref_logprobs must be given when kl_coef is not 0");
    advantages_ = advantages.const_data_ptr<float>();
    weights_ = weights.const_data_ptr<float>();
    kl_weights_ = kl_weights ? kl_weights->const_data_ptr<float>() : weights_;
    entropy_weights_ = entropy_weights ? entropy_weights->const_data_ptr<float>() : weights_;
    old_ = data_or_null<float>(old_logprobs);
    ref_ = data_or_null<float>(ref_logprobs);
  }

  RowGradient gradient(int64_t row, const RowStats& stats) const {
    using Math = ScalarMath<double>;
    // rounded as it is returned, so that a ratio to logprobs of an earlier call is exactly 1
    const double logprob = static_cast<float>(stats.logprob);
    const double old = old_ ? static_cast<double>(old_[row]) : logprob;
    const double difference = difference_of<Math>(logprob, old);
    const auto terms = objective_terms<Math>(
        ratio_, difference, static_cast<double>(advantages_[row]), logprob, coefficients_);
    double slope = weighted<Math>(static_cast<double>(weights_[row]), terms.slope);
    if (coefficients_.kl_coef != 0) {
      const double from_ref = difference_of<Math>(static_cast<double>(ref_[row]), logprob);
      const auto kl =
          kl_terms<Math>(kl_estimator_, kl_gradient_, from_ref, difference, coefficients_);
      slope += coefficients_.kl_coef * kl_weights_[row] * kl.own_slope;
    }
    return {token_slope<Math>(logprob, slope), 0.0,
            -coefficients_.entropy_coef * entropy_weights_[row]};
  }

 private:
  Ratio ratio_;
  KlEstimator kl_estimator_;
  KlGradient kl_gradient_;
  Coefficients<double> coefficients_;
  const float *advantages_, *weights_, *kl_weights_, *entropy_weights_, *old_, *ref_;
};

std::tuple<Tensor, Tensor> one_pass(const Rows& rows, const Tensor& token_ids,
                                    const TokenLoss& loss, const Logits& grad) {
  const Tensor logprobs = empty_like_tokens(token_ids, ScalarType::Float);
  const Tensor entropy = empty_like_tokens(token_ids, ScalarType::Float);
  float* out_logprobs = logprobs.mutable_data_ptr<float>();
  float* out_entropy = entropy.mutable_data_ptr<float>();
  const Rows::Reduction reduction{true, false};
  rows.walk(
      &reduction, &grad,
      [&](int64_t row, const RowStats& stats) {
        out_logprobs[row] = static_cast<float>(stats.logprob);
        out_entropy[row] = static_cast<float>(stats.entropy);
        return loss.gradient(row, stats);
      },
      [&](int64_t row) { out_logprobs[row] = out_entropy[row] = 0.0f; });
  return {logprobs, entropy};
}

std::tuple<Tensor, Tensor, Tensor> logits_policy_loss_fwd(
    const Tensor& logits, const Tensor& token_ids, const Tensor& active,
    const std::optional<Tensor>& temperatures, double temperature, double logit_scale,
    double logit_softcap, const Tensor& advantages, const Tensor& weights,
    const std::optional<Tensor>& kl_weights, const std::optional<Tensor>& entropy_weights,
    const std::optional<Tensor>& old_logprobs, const std::optional<Tensor>& ref_logprobs,
    int64_t ratio, int64_t kl_estimator, int64_t kl_gradient,
    const std::vector<double>& coefficients) {
  const Rows rows(logits, token_ids, active, temperatures, temperature, logit_scale, logit_softcap);
  const TokenLoss loss(token_ids, advantages, weights, kl_weights, entropy_weights, old_logprobs,
                       ref_logprobs, ratio, kl_estimator, kl_gradient, coefficients);
  const Tensor grad = new_gradient(logits);
  const auto [logprobs, entropy] = one_pass(rows, token_ids, loss, Logits(grad));
  return {logprobs, entropy, grad};
}

std::tuple<Tensor, Tensor> logits_policy_loss_fwd_(
    const Tensor& logits, const Tensor& token_ids, const Tensor& active,
    const std::optional<Tensor>& temperatures, double temperature, double logit_scale,
    double logit_softcap, const Tensor& advantages, const Tensor& weights,
    const std::optional<Tensor>& kl_weights, const std::optional<Tensor>& entropy_weights,
    const std::optional<Tensor>& old_logprobs, const std::optional<Tensor>& ref_logprobs,
    int64_t ratio, int64_t kl_estimator, int64_t kl_gradient,
    const std::vector<double>& coefficients) {
  const Rows rows(logits, token_ids, active, temperatures, temperature, logit_scale, logit_softcap);
  rows.logits().check_rows_are_apart();
  const TokenLoss loss(token_ids, advantages, weights, kl_weights, entropy_weights, old_logprobs,
                       ref_logprobs, ratio, kl_estimator, kl_gradient, coefficients);
  return one_pass(rows, token_ids, loss, rows.logits());
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("logits_policy_loss_fwd", TORCH_BOX(&fastrl::cpu::logits_policy_loss_fwd));
  m.impl("logits_policy_loss_fwd_", TORCH_BOX(&fastrl::cpu::logits_policy_loss_fwd_));
}
