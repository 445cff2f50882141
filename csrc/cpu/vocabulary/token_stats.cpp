// Log-probability, entropy and other statistics of tokens from logits, and their gradient.
#include "../huge_pages.h"
#include "row_saved.h"

namespace fastrl::cpu {
namespace {

std::vector<Tensor> token_stats_fwd(const Tensor& logits, const RowArguments& arguments,
                                    bool with_entropy, bool with_sum_sq_probs) {
  const Rows rows(logits, arguments);
  RowStatsOut out;
  std::vector<Tensor> results = new_stats(arguments.token_ids, &out);
  const Rows::Reduction reduction{with_entropy, with_sum_sq_probs};
  rows.walk(
      &reduction, nullptr,
      [&](int64_t row, RowStats& stats) {
        if (!with_entropy) stats.entropy = 0;
        if (!with_sum_sq_probs) stats.sum_sq_probs = 0;
        store_stats(stats, out, row);
        return RowGradient{};
      },
      [&](int64_t row) { store_stats(RowStats{}, out, row); });
  return results;
}

void write_grad(const Rows& rows, const Tensor& token_ids, const SavedStats& saved,
                const Logits& grad) {
  check_saved(saved, token_ids);
  walk_saved(rows, saved, grad, [](int64_t, const RowGradient& flow) { return flow; });
}

Tensor token_stats_bwd(const Tensor& logits, const RowArguments& arguments,
                       const SavedStats& saved) {
  const Rows rows(logits, arguments);
  const Tensor grad = new_gradient(logits);
  write_grad(rows, arguments.token_ids, saved, Logits(grad));
  return grad;
}

void token_stats_bwd_(const Tensor& logits, const RowArguments& arguments, const SavedStats& saved,
                      bool narrow) {
  check_narrow(narrow);
  const Rows rows(logits, arguments);
  check_rows_apart(logits);
  write_grad(rows, arguments.token_ids, saved, rows.logits());
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("token_stats_fwd", fastrl::boxed<fastrl::cpu::token_stats_fwd>);
  m.impl("token_stats_bwd", fastrl::boxed<fastrl::cpu::token_stats_bwd>);
  m.impl("token_stats_bwd_", fastrl::boxed<fastrl::cpu::token_stats_bwd_>);
}
