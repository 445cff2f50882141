// The operators token_stats_fwd, token_stats_bwd and token_stats_bwd_ on CUDA tensors.
#include <tuple>

#include "launches.h"
#include "logits_operator.h"

namespace fastrl::cuda {
namespace {

using Stats = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Stats token_stats_fwd(const Tensor& logits, const Tensor& token_ids,
                      const std::optional<Tensor>& mask, int64_t ignore_index,
                      const std::optional<Tensor>& temperatures, double temperature,
                      double logit_scale, double logit_softcap, bool with_entropy,
                      bool with_sum_sq_probs) {
  const Call call(logits, "logits");
  TokenStatsParams params{};
  params.in = check_logits(logits, {token_ids, mask, ignore_index, temperatures, temperature,
                                    logit_scale, logit_softcap});
  params.with_entropy = with_entropy;
  params.with_sum_sq_probs = with_sum_sq_probs;
  const auto stat = [&](float** out) {
    const Tensor values = empty_like_tokens(token_ids, ScalarType::Float);
    *out = values.mutable_data_ptr<float>();
    return values;
  };
  const Tensor logprobs = stat(&params.logprobs), entropy = stat(&params.entropy);
  const Tensor logsumexp = stat(&params.logsumexp), sum_sq_probs = stat(&params.sum_sq_probs);
  const Tensor is_top1 = empty_like_tokens(token_ids, ScalarType::Bool);
  params.is_top1 = is_top1.mutable_data_ptr<bool>();
  const Tensor row_max = stat(&params.row_max), log_sum = stat(&params.log_sum);
  check_launch(token_stats(params, call.stream()), "token_stats");
  return {logprobs, entropy, logsumexp, sum_sq_probs, is_top1, row_max, log_sum};
}

struct Saved {
  const Tensor &row_max, &log_sum, &entropy;
  const std::optional<Tensor>&grad_logprobs, &grad_entropy, &grad_logsumexp;
};

void backward(const Call& call, const LogitsParams& in, const GradientParams& out,
              const Tensor& token_ids, const Saved& saved) {
  const auto check = [&](const auto& tensor, const char* name) {
    check_like(tensor, token_ids, ScalarType::Float, name, "token_ids");
  };
  check(saved.row_max, "row_max");
  check(saved.log_sum, "log_sum");
  check(saved.entropy, "entropy");
  check(saved.grad_logprobs, "grad_logprobs");
  check(saved.grad_entropy, "grad_entropy");
  check(saved.grad_logsumexp, "grad_logsumexp");
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

Tensor token_stats_bwd(const Tensor& logits, const Tensor& token_ids,
                       const std::optional<Tensor>& mask, int64_t ignore_index,
                       const std::optional<Tensor>& temperatures, double temperature,
                       double logit_scale, double logit_softcap, const Tensor& row_max,
                       const Tensor& log_sum, const Tensor& entropy,
                       const std::optional<Tensor>& grad_logprobs,
                       const std::optional<Tensor>& grad_entropy,
                       const std::optional<Tensor>& grad_logsumexp) {
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, {token_ids, mask, ignore_index, temperatures,
                                                temperature, logit_scale, logit_softcap});
  const Tensor grad = new_gradient(logits);
  backward(call, in, gradient_in(grad), token_ids,
           {row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp});
  return grad;
}

void token_stats_bwd_(const Tensor& logits, const Tensor& token_ids,
                      const std::optional<Tensor>& mask, int64_t ignore_index,
                      const std::optional<Tensor>& temperatures, double temperature,
                      double logit_scale, double logit_softcap, const Tensor& row_max,
                      const Tensor& log_sum, const Tensor& entropy,
                      const std::optional<Tensor>& grad_logprobs,
                      const std::optional<Tensor>& grad_entropy,
                      const std::optional<Tensor>& grad_logsumexp, bool narrow) {
  const Call call(logits, "logits");
  const LogitsParams in = check_logits(logits, {token_ids, mask, ignore_index, temperatures,
                                                temperature, logit_scale, logit_softcap});
  backward(call, in, gradient_over(logits, in, narrow), token_ids,
           {row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp});
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("token_stats_fwd", TORCH_BOX(&fastrl::cuda::token_stats_fwd));
  m.impl("token_stats_bwd", TORCH_BOX(&fastrl::cuda::token_stats_bwd));
  m.impl("token_stats_bwd_", TORCH_BOX(&fastrl::cuda::token_stats_bwd_));
}
