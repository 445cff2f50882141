// The operators logits_policy_loss_fwd and logits_policy_loss_fwd_ on CUDA tensors.
#include <tuple>

#include "launches.h"
#include "logits_operator.h"

namespace fastrl::cuda {
namespace {

struct TokenLoss {
  const Tensor &advantages, &weights;
  const std::optional<Tensor>&kl_weights, &entropy_weights, &old_logprobs, &ref_logprobs;
  int64_t ratio, kl_estimator, kl_gradient;
  const std::vector<double>& coefficients;
};

std::tuple<Tensor, Tensor> one_pass(const Call& call, const LogitsParams& in,
                                    const GradientParams& out, const Tensor& token_ids,
                                    const TokenLoss& loss) {
  const auto check = [&](const auto& tensor, const char* name) {
    check_like(tensor, token_ids, ScalarType::Float, name, "token_ids");
  };
  check(loss.advantages, "advantages");
  check(loss.weights, "weights");
  check(loss.kl_weights, "kl_weights");
  check(loss.entropy_weights, "entropy_weights");
  check(loss.old_logprobs, "old_logprobs");
  check(loss.ref_logprobs, "ref_logprobs");
  LogitsPolicyLossParams params{};
  params.in = in;
  params.out = out;
  params.ratio = check_ratio(loss.ratio);
  params.kl_estimator = check_kl_estimator(loss.kl_estimator);
  params.kl_gradient = check_kl_gradient(loss.kl_gradient);
  params.coefficients = check_coefficients<float>(loss.coefficients);
  STD_TORCH_CHECK(params.ratio != Ratio::kGmpo,
                  "ratio must be a token-level objective, got gmpo: use policy_loss_fwd");
  STD_TORCH_CHECK(loss.ref_logprobs || params.coefficients.kl_coef == 0,
                  "ref_logprobs must be given when kl_coef is not 0");
  params.advantages = loss.advantages.const_data_ptr<float>();
  params.weights = loss.weights.const_data_ptr<float>();
  params.kl_weights = data_or_null<float>(loss.kl_weights);
  params.entropy_weights = data_or_null<float>(loss.entropy_weights);
  params.old_logprobs = data_or_null<float>(loss.old_logprobs);
  params.ref_logprobs = data_or_null<float>(loss.ref_logprobs);
  const Tensor logprobs = empty_like_tokens(token_ids, ScalarType::Float);
  const Tensor entropy = empty_like_tokens(token_ids, ScalarType::Float);
  params.logprobs = logprobs.mutable_data_ptr<float>();
  params.entropy = entropy.mutable_data_ptr<float>();
  check_launch(logits_policy_loss(params, call.stream()), "logits_policy_loss");
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
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, token_ids, active, temperatures, temperature,
                                       logit_scale, logit_softcap);
  const Tensor grad = new_gradient(logits);
  const auto [logprobs, entropy] =
      one_pass(call, in, gradient_in(grad), token_ids,
               {advantages, weights, kl_weights, entropy_weights, old_logprobs, ref_logprobs, ratio,
                kl_estimator, kl_gradient, coefficients});
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
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, token_ids, active, temperatures, temperature,
                                       logit_scale, logit_softcap);
  return one_pass(call, in, gradient_over(logits), token_ids,
                  {advantages, weights, kl_weights, entropy_weights, old_logprobs, ref_logprobs,
                   ratio, kl_estimator, kl_gradient, coefficients});
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("logits_policy_loss_fwd", TORCH_BOX(&fastrl::cuda::logits_policy_loss_fwd));
  m.impl("logits_policy_loss_fwd_", TORCH_BOX(&fastrl::cuda::logits_policy_loss_fwd_));
}
