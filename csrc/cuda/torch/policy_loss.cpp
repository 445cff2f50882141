// The operator policy_loss_fwd on CUDA tensors.
#include <tuple>

#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss_fwd(
    const Tensor& logprobs, const std::optional<Tensor>& entropy, const Tensor& mask,
    const LossArguments& arguments, const ObjectiveArguments& objective_arguments) {
  const Call call(logprobs, "logprobs");
  PolicyLossParams params{};
  params.objective = check_objective<float>(objective_arguments);
  check_tokens(logprobs, entropy, mask, params.objective);
  params.sequences = sequences_of(logprobs, arguments.cu_seqlens);
  params.constants =
      check_loss(arguments, params.objective, logprobs, params.sequences.count, "logprobs");
  params.logprobs = logprobs.const_data_ptr<float>();
  params.entropy = data_or_null<float>(entropy);
  params.mask = mask.const_data_ptr<bool>();

  const bool with_entropy = params.objective.coefficients.entropy_coef != 0;
  const Tensor loss = torch::stable::new_empty(logprobs, {}, ScalarType::Float);
  const Tensor slope = empty_like_tokens(logprobs, ScalarType::Float);
  const Tensor entropy_slope = with_entropy
                                   ? empty_like_tokens(logprobs, ScalarType::Float)
                                   : torch::stable::new_empty(logprobs, {0}, ScalarType::Float);
  const Tensor metrics = torch::stable::new_empty(logprobs, {kNumMetrics}, ScalarType::Float);
  params.loss = loss.mutable_data_ptr<float>();
  params.slope = slope.mutable_data_ptr<float>();
  params.entropy_slope = with_entropy ? entropy_slope.mutable_data_ptr<float>() : nullptr;
  params.metrics = reinterpret_cast<Metrics*>(metrics.mutable_data_ptr<float>());
  const unsigned blocks = policy_loss_blocks(&params);
  std::optional<Tensor> partial_sums, arrived;
  if (blocks > 1) {
    partial_sums = scratch(logprobs, blocks * kTokenSumsBytes);
    arrived = zeroed_words(logprobs, 1, call);
    params.partial_sums = partial_sums->mutable_data_ptr();
    params.arrived = words_of(*arrived);
  }
  check_launch(cuda::policy_loss(params, blocks, call.stream()), "policy_loss");
  return {loss, slope, entropy_slope, metrics};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("policy_loss_fwd", fastrl::boxed<fastrl::cuda::policy_loss_fwd>);
}
