// Inputs of a backward besides its rows: the statistics saved by the forward, and their gradients.
#pragma once

#include "rows.h"

namespace fastrl::cpu {

// Writes the gradient of all rows; `more(row, flow)` adds to the gradient of a row's statistics.
template <typename More>
void walk_saved(const Rows& rows, const SavedStats& saved, const Logits& grad, const More& more) {
  const float* row_max = saved.row_max.const_data_ptr<float>();
  const float* log_sum = saved.log_sum.const_data_ptr<float>();
  const float* entropy = saved.entropy.const_data_ptr<float>();
  const float* grad_logprobs = data_or_null<float>(saved.grad_logprobs);
  const float* grad_entropy = data_or_null<float>(saved.grad_entropy);
  const float* grad_logsumexp = data_or_null<float>(saved.grad_logsumexp);
  const auto at = [](const float* values, int64_t row) {
    return values ? static_cast<double>(values[row]) : 0.0;
  };
  rows.walk(
      nullptr, &grad,
      [&](int64_t row, RowStats& stats) {
        stats = rows.restore(row, row_max[row], log_sum[row], entropy[row]);
        return more(row, RowGradient{at(grad_logprobs, row), at(grad_logsumexp, row),
                                     at(grad_entropy, row)});
      },
      [](int64_t) {});
}

}  // namespace fastrl::cpu
