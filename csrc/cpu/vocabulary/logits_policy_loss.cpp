// The policy loss from logits in one pass: log-probability, slope and gradient of a row while it is
// in cache.
#include <tuple>

#include "../../objectives.h"
#include "../huge_pages.h"
#include "../tokens/sequences.h"
#include "rows.h"

namespace fastrl::cpu {
namespace {

// The slope of the loss at a row, from the statistics of the row.
class TokenLoss {
 public:
  TokenLoss(const Tensor& token_ids, const LossArguments& arguments,
            const Objective<double>& objective)
      : sequences_(token_ids, arguments.cu_seqlens),
        objective_(objective),
        in_(check_loss(arguments, objective, token_ids, sequences_.count(), "token_ids")) {
    STD_TORCH_CHECK(objective.level == Level::kToken,
                    "the objective must be at token level: use policy_loss_fwd");
  }

  RowGradient gradient(int64_t row, const RowStats& stats) const {
    using Math = ScalarMath<double>;
    const Coefficients<double>& c = objective_.coefficients;
    const int64_t s = sequences_.of(row);
    const auto at = [&](const Constant& x) { return static_cast<double>(x.at(s, row)); };
    // rounded like the result, so that a ratio to logprobs of an earlier call is exactly 1
    const double logprob = static_cast<float>(stats.logprobs);
    const double old = in_.old_logprobs ? static_cast<double>(in_.old_logprobs[row]) : logprob;
    const double difference = difference_of<Math>(logprob, old);
    const auto terms =
        objective_terms<Math>(objective_.surrogate, difference, at(in_.advantages), logprob, c);
    const double factor = in_.policy_weights.values ? at(in_.policy_weights) : 1.0;
    double slope = weighted<Math>(at(in_.weights) * factor, terms.slope);
    if (c.kl_coef != 0) {
      const double ref = static_cast<double>(in_.ref_logprobs[row]);
      const auto kl = kl_terms<Math>(objective_.kl_estimator, objective_.kl_gradient,
                                     kl_difference<Math>(ref, logprob), difference, c);
      slope += c.kl_coef * at(in_.kl_weights) * kl.own_slope;
    }
    return {token_slope<Math>(logprob, slope), 0.0, -c.entropy_coef * at(in_.entropy_weights)};
  }

 private:
  Sequences sequences_;
  Objective<double> objective_;
  LossConstants in_;
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
        out_logprobs[row] = static_cast<float>(stats.logprobs);
        out_entropy[row] = static_cast<float>(stats.entropy);
        return loss.gradient(row, stats);
      },
      [&](int64_t row) { out_logprobs[row] = out_entropy[row] = 0.0f; });
  return {logprobs, entropy};
}

std::tuple<Tensor, Tensor, Tensor> logits_policy_loss_fwd(const Tensor& logits,
                                                          const RowArguments& arguments,
                                                          const LossArguments& loss_arguments,
                                                          const ObjectiveArguments& objective) {
  const Rows rows(logits, arguments);
  const TokenLoss loss(arguments.token_ids, loss_arguments, check_objective<double>(objective));
  const Tensor grad = new_gradient(logits);
  const auto [logprobs, entropy] = one_pass(rows, arguments.token_ids, loss, Logits(grad));
  return {logprobs, entropy, grad};
}

std::tuple<Tensor, Tensor> logits_policy_loss_fwd_(const Tensor& logits,
                                                   const RowArguments& arguments,
                                                   const LossArguments& loss_arguments,
                                                   const ObjectiveArguments& objective,
                                                   bool narrow) {
  check_narrow(narrow);
  const Rows rows(logits, arguments);
  check_rows_apart(logits);
  const TokenLoss loss(arguments.token_ids, loss_arguments, check_objective<double>(objective));
  return one_pass(rows, arguments.token_ids, loss, rows.logits());
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("logits_policy_loss_fwd", fastrl::boxed<fastrl::cpu::logits_policy_loss_fwd>);
  m.impl("logits_policy_loss_fwd_", fastrl::boxed<fastrl::cpu::logits_policy_loss_fwd_>);
}
