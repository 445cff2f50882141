// The scalar objectives in float64, for tests that compare them with the reference.
#include <tuple>

#include "../../check.h"
#include "../../objectives.h"

namespace fastrl::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> objective_eval(
    const Tensor& logprobs, const Tensor& log_ratio, const Tensor& advantages,
    const Tensor& ref_minus_logprob, const ObjectiveArguments& arguments) {
  using Math = ScalarMath<double>;
  check_like(logprobs, logprobs, ScalarType::Double, "logprobs", "logprobs");
  check_like(log_ratio, logprobs, ScalarType::Double, "log_ratio", "logprobs");
  check_like(advantages, logprobs, ScalarType::Double, "advantages", "logprobs");
  check_like(ref_minus_logprob, logprobs, ScalarType::Double, "ref_minus_logprob", "logprobs");
  const auto objective = check_objective<double>(arguments);
  const Coefficients<double>& c = objective.coefficients;
  Tensor outputs[5];
  double* out[5];
  for (int i = 0; i < 5; ++i) {
    outputs[i] = empty_like_tokens(logprobs, ScalarType::Double);
    out[i] = outputs[i].mutable_data_ptr<double>();
  }
  const double* logprob = logprobs.const_data_ptr<double>();
  const double* difference = log_ratio.const_data_ptr<double>();
  const double* advantage = advantages.const_data_ptr<double>();
  const double* ref_difference = ref_minus_logprob.const_data_ptr<double>();
  for (int64_t i = 0; i < logprobs.numel(); ++i) {
    const auto terms =
        objective_terms<Math>(objective.surrogate, difference[i], advantage[i], logprob[i], c);
    const auto kl = kl_terms<Math>(objective.kl_estimator, objective.kl_gradient, ref_difference[i],
                                   difference[i], c);
    out[0][i] = terms.loss;
    out[1][i] = terms.slope;
    out[2][i] = terms.clip;
    out[3][i] = kl.value;
    out[4][i] = kl.own_slope;
  }
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4]};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("objective_eval", fastrl::boxed<fastrl::cpu::objective_eval>);
}
