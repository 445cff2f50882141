// The operators token_stats_fwd, token_stats_bwd and token_stats_bwd_ on CUDA tensors.
#include "launches.h"
#include "logits_operator.h"

namespace fastrl::cuda {
namespace {

std::vector<Tensor> token_stats_fwd(const Tensor& logits, const RowArguments& arguments,
                                    bool with_entropy, bool with_sum_sq_probs) {
  const Call call(logits, "logits");
  TokenStatsParams params{check_logits(logits, arguments), with_entropy, with_sum_sq_probs, {}};
  std::vector<Tensor> results = new_stats(arguments.token_ids, &params.out);
  check_launch(token_stats(params, call.stream()), "token_stats");
  return results;
}

void backward(const Call& call, const LogitsParams& in, const GradientParams& out,
              const Tensor& token_ids, const SavedStats& saved) {
  check_saved(saved, token_ids);
  TokenStatsBackwardParams params{};
  params.in = in;
  params.out = out;
  params.row_max = saved.row_max.const_data_ptr<float>();
  params.log_sum = saved.log_sum.const_data_ptr<float>();
  params.entropy = saved.entropy.const_data_ptr<float>();
  params.grad_logprobs = data_or_null<float>(saved.grad_logprobs);
  params.grad_entropy = data_or_null<float>(saved.grad_entropy);
  params.grad_logsumexp = data_or_null<float>(saved.grad_logsumexp);
  check_launch(token_stats_backward(params, call.stream()), "token_stats_backward");
}

Tensor token_stats_bwd(const Tensor& logits, const RowArguments& arguments,
                       const SavedStats& saved) {
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, arguments);
  const Tensor grad = new_gradient(logits);
  backward(call, in, gradient_in(grad), arguments.token_ids, saved);
  return grad;
}

void token_stats_bwd_(const Tensor& logits, const RowArguments& arguments, const SavedStats& saved,
                      bool narrow) {
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, arguments);
  backward(call, in, gradient_over(logits, in, narrow), arguments.token_ids, saved);
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("token_stats_fwd", fastrl::boxed<fastrl::cuda::token_stats_fwd>);
  m.impl("token_stats_bwd", fastrl::boxed<fastrl::cuda::token_stats_bwd>);
  m.impl("token_stats_bwd_", fastrl::boxed<fastrl::cuda::token_stats_bwd_>);
}
