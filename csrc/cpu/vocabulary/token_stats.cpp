// Log-probability, entropy and other statistics of tokens from logits, and their gradient.
#include <tuple>

#include "../huge_pages.h"
#include "row_saved.h"

namespace fastrl::cpu {
namespace {

// The statistics of all rows, in the order of `RowStats` in fastrl/contract.py.
struct RowTensors {
  Tensor logprobs, entropy, logsumexp, sum_sq_probs, is_top1, row_max, log_sum;

  explicit RowTensors(const Tensor& like)
      : logprobs(empty_like_tokens(like, ScalarType::Float)),
        entropy(empty_like_tokens(like, ScalarType::Float)),
        logsumexp(empty_like_tokens(like, ScalarType::Float)),
        sum_sq_probs(empty_like_tokens(like, ScalarType::Float)),
        is_top1(empty_like_tokens(like, ScalarType::Bool)),
        row_max(empty_like_tokens(like, ScalarType::Float)),
        log_sum(empty_like_tokens(like, ScalarType::Float)) {}
};
using Stats = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Stats token_stats_fwd(const Tensor& logits, const Tensor& token_ids,
                      const std::optional<Tensor>& mask, int64_t ignore_index,
                      const std::optional<Tensor>& temperatures, double temperature,
                      double logit_scale, double logit_softcap, bool with_entropy,
                      bool with_sum_sq_probs) {
  const Rows rows(logits, {token_ids, mask, ignore_index, temperatures, temperature, logit_scale,
                           logit_softcap});
  const RowTensors out(token_ids);
  const auto floats = [](const Tensor& tensor) { return tensor.mutable_data_ptr<float>(); };
  float *logprobs = floats(out.logprobs), *entropy = floats(out.entropy);
  float *logsumexp = floats(out.logsumexp), *sum_sq_probs = floats(out.sum_sq_probs);
  float *row_max = floats(out.row_max), *log_sum = floats(out.log_sum);
  bool* is_top1 = out.is_top1.mutable_data_ptr<bool>();

  const auto write = [&](int64_t row, const RowStats& stats) {
    logprobs[row] = static_cast<float>(stats.logprob);
    entropy[row] = with_entropy ? static_cast<float>(stats.entropy) : 0.0f;
    logsumexp[row] = static_cast<float>(stats.logsumexp);
    sum_sq_probs[row] = with_sum_sq_probs ? static_cast<float>(stats.sum_sq_probs) : 0.0f;
    is_top1[row] = stats.is_top1;
    row_max[row] = stats.max;
    log_sum[row] = static_cast<float>(stats.log_sum);
  };
  const Rows::Reduction reduction{with_entropy, with_sum_sq_probs};
  rows.walk(
      &reduction, nullptr,
      [&](int64_t row, const RowStats& stats) {
        write(row, stats);
        return RowGradient{};
      },
      [&](int64_t row) { write(row, RowStats{}); });
  return {out.logprobs, out.entropy, out.logsumexp, out.sum_sq_probs,
          out.is_top1,  out.row_max, out.log_sum};
}

void write_grad(const Rows& rows, const Tensor& token_ids, const Saved& saved, const Logits& grad) {
  check_saved(saved, token_ids);
  walk_saved(rows, saved, grad, [](int64_t, const RowGradient& flow) { return flow; });
}

Tensor token_stats_bwd(const Tensor& logits, const Tensor& token_ids,
                       const std::optional<Tensor>& mask, int64_t ignore_index,
                       const std::optional<Tensor>& temperatures, double temperature,
                       double logit_scale, double logit_softcap, const Tensor& row_max,
                       const Tensor& log_sum, const Tensor& entropy,
                       const std::optional<Tensor>& grad_logprobs,
                       const std::optional<Tensor>& grad_entropy,
                       const std::optional<Tensor>& grad_logsumexp) {
  const Rows rows(logits, {token_ids, mask, ignore_index, temperatures, temperature, logit_scale,
                           logit_softcap});
  const Tensor grad = new_gradient(logits);
  write_grad(rows, token_ids,
             {row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp},
             Logits(grad));
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
  check_narrow(narrow);
  const Rows rows(logits, {token_ids, mask, ignore_index, temperatures, temperature, logit_scale,
                           logit_softcap});
  check_rows_apart(logits);
  write_grad(rows, token_ids,
             {row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp},
             rows.logits());
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("token_stats_fwd", TORCH_BOX(&fastrl::cpu::token_stats_fwd));
  m.impl("token_stats_bwd", TORCH_BOX(&fastrl::cpu::token_stats_bwd));
  m.impl("token_stats_bwd_", TORCH_BOX(&fastrl::cpu::token_stats_bwd_));
}
