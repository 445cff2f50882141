// The operators logits_policy_loss_fwd and logits_policy_loss_fwd_ on CUDA tensors.
#include <tuple>

#include "launches.h"
#include "logits_operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor> one_pass(const Call& call, const LogitsParams& in,
                                    const GradientParams& out, const Tensor& token_ids,
                                    const LossArguments& arguments,
                                    const Objective<float>& objective) {
  STD_TORCH_CHECK(objective.level == Level::kToken,
                  "the objective must be at token level: use policy_loss_fwd");
  LogitsPolicyLossParams params{};
  params.in = in;
  params.out = out;
  params.objective = objective;
  params.sequences = sequences_of(token_ids, arguments.cu_seqlens);
  params.constants =
      check_loss(arguments, objective, token_ids, params.sequences.count, "token_ids");
  const Tensor logprobs = empty_like_tokens(token_ids, ScalarType::Float);
  const Tensor entropy = empty_like_tokens(token_ids, ScalarType::Float);
  params.logprobs = logprobs.mutable_data_ptr<float>();
  params.entropy = entropy.mutable_data_ptr<float>();
  const Tensor ticket = zeroed_words(token_ids, 1, call);
  params.ticket = words_of(ticket);
  check_launch(logits_policy_loss(params, call.stream()), "logits_policy_loss");
  return {logprobs, entropy};
}

std::tuple<Tensor, Tensor, Tensor> logits_policy_loss_fwd(const Tensor& logits,
                                                          const RowArguments& arguments,
                                                          const LossArguments& loss,
                                                          const ObjectiveArguments& objective) {
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, arguments);
  const Tensor grad = new_gradient(logits);
  const auto [logprobs, entropy] = one_pass(call, in, gradient_in(grad), arguments.token_ids, loss,
                                            check_objective<float>(objective));
  return {logprobs, entropy, grad};
}

std::tuple<Tensor, Tensor> logits_policy_loss_fwd_(const Tensor& logits,
                                                   const RowArguments& arguments,
                                                   const LossArguments& loss,
                                                   const ObjectiveArguments& objective,
                                                   bool narrow) {
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, arguments);
  return one_pass(call, in, gradient_over(logits, in, narrow), arguments.token_ids, loss,
                  check_objective<float>(objective));
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("logits_policy_loss_fwd", fastrl::boxed<fastrl::cuda::logits_policy_loss_fwd>);
  m.impl("logits_policy_loss_fwd_", fastrl::boxed<fastrl::cuda::logits_policy_loss_fwd_>);
}
