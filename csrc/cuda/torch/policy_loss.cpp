// The operator policy_loss_fwd on CUDA tensors.
#include <tuple>

#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor> policy_loss_fwd(
    const Tensor& logprobs, const Tensor& advantages, const Tensor& mask, const Tensor& weights,
    const std::optional<Tensor>& kl_weights, const std::optional<Tensor>& entropy_weights,
    const std::optional<Tensor>& old_logprobs, const std::optional<Tensor>& ref_logprobs,
    const std::optional<Tensor>& entropy, const std::optional<Tensor>& cu_seqlens, int64_t level,
    int64_t ratio, int64_t kl_estimator, int64_t kl_gradient,
    const std::vector<double>& coefficients) {
  const Call call(logprobs, "logprobs");
  STD_TORCH_CHECK(logprobs.dim() == 2, "logprobs must have shape [B, T], got ",
                  shape_text(logprobs));
  check_like(mask, logprobs, ScalarType::Bool, "mask", "logprobs");
  const auto check = [&](const auto& tensor, const char* name) {
    check_like(tensor, logprobs, ScalarType::Float, name, "logprobs");
  };
  check(logprobs, "logprobs");
  check(advantages, "advantages");
  check(weights, "weights");
  check(kl_weights, "kl_weights");
  check(entropy_weights, "entropy_weights");
  check(old_logprobs, "old_logprobs");
  check(ref_logprobs, "ref_logprobs");
  check(entropy, "entropy");

  PolicyLossParams params{};
  params.coefficients = check_coefficients<float>(coefficients);
  STD_TORCH_CHECK(ref_logprobs || params.coefficients.kl_coef == 0,
                  "ref_logprobs must be given when kl_coef is not 0");
  STD_TORCH_CHECK(entropy || params.coefficients.entropy_coef == 0,
                  "entropy must be given when entropy_coef is not 0");
  params.ratio = check_ratio(ratio);
  params.level = check_level(level, params.ratio);
  params.kl_estimator = check_kl_estimator(kl_estimator);
  params.kl_gradient = check_kl_gradient(kl_gradient);
  STD_TORCH_CHECK(params.ratio != Ratio::kGmpo || params.kl_gradient != KlGradient::kBiasCorrected,
                  "kl_gradient must not be bias-corrected with the geometric mean of gmpo");
  const Tensor loss = torch::stable::new_empty(logprobs, {}, ScalarType::Float);
  const Tensor slope = empty_like_tokens(logprobs, ScalarType::Float);
  const Tensor metrics = torch::stable::new_empty(logprobs, {kNumMetrics}, ScalarType::Float);

  params.logprobs = logprobs.const_data_ptr<float>();
  params.advantages = advantages.const_data_ptr<float>();
  params.mask = mask.const_data_ptr<bool>();
  params.weights = weights.const_data_ptr<float>();
  params.kl_weights = kl_weights ? kl_weights->const_data_ptr<float>() : params.weights;
  params.entropy_weights =
      entropy_weights ? entropy_weights->const_data_ptr<float>() : params.weights;
  params.old_logprobs = data_or_null<float>(old_logprobs);
  params.ref_logprobs = data_or_null<float>(ref_logprobs);
  params.entropy = data_or_null<float>(entropy);
  params.cu_seqlens = data_or_null<int32_t>(cu_seqlens);
  params.slope = slope.mutable_data_ptr<float>();
  params.loss = loss.mutable_data_ptr<float>();
  params.metrics = metrics.mutable_data_ptr<float>();
  params.tokens = logprobs.numel();
  STD_TORCH_CHECK(params.tokens < int64_t{1} << 32, "logprobs must hold fewer than 2^32 tokens");
  params.sequences = check_sequences(logprobs, cu_seqlens);
  params.row_length = logprobs.size(1);
  const unsigned blocks = policy_loss_blocks(&params);
  std::optional<Tensor> parts, arrived;
  if (blocks > 1) {
    parts = scratch(logprobs, blocks * kPolicyPartBytes);
    arrived = zero_word(logprobs, call);
    params.parts = parts->mutable_data_ptr();
    params.arrived = words(*arrived);
  }
  check_launch(cuda::policy_loss(params, blocks, call.stream()), "policy_loss");
  return {loss, slope, metrics};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("policy_loss_fwd", TORCH_BOX(&fastrl::cuda::policy_loss_fwd));
}
