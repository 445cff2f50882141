#include "rows.h"

namespace fastrl::cpu {
namespace {

// The NaN that rounding to bfloat16 keeps: one with all bits set would carry into the sign and
// come out as 0.
float with_plain_nan(double x) {
  return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(x);
}

}  // namespace

Rows::Rows(const Tensor& logits, const Tensor& token_ids, const Tensor& active,
           const std::optional<Tensor>& temperatures, double temperature, double logit_scale,
           double logit_softcap)
    : logits_(logits),
      scaling_(temperatures, temperature, logit_scale, logit_softcap),
      kernels_(kernels()) {
  check_cpu(token_ids, "token_ids");
  check_dtype(token_ids, ScalarType::Long, "token_ids");
  STD_TORCH_CHECK(token_ids.dim() == 2 && token_ids.size(0) == logits.size(0) &&
                      token_ids.size(1) == logits.size(1) && token_ids.is_contiguous(),
                  "token_ids must be contiguous with the first two sizes of logits ",
                  shape_text(logits), ", got ", shape_text(token_ids));
  check_like(active, token_ids, ScalarType::Bool, "active", "token_ids");
  check_like(temperatures, token_ids, ScalarType::Float, "temperatures", "token_ids");
  token_ids_ = token_ids.const_data_ptr<int64_t>();
  active_ = active.const_data_ptr<bool>();
  for (int64_t row = 0; row < logits_.rows(); ++row) {
    if (!active_[row]) continue;
    ++num_active_;
    STD_TORCH_CHECK(token_ids_[row] >= 0 && token_ids_[row] < logits_.vocabulary(),
                    "token_ids must be in [0, ", logits_.vocabulary(), "), got ", token_ids_[row],
                    " in row ", row);
    const double t = scaling_.temperature(row);
    STD_TORCH_CHECK(t > 0 && std::isfinite(t), "temperature must be positive and finite, got ", t,
                    " in row ", row);
  }
}

BlockPartial Rows::block_partial(int64_t row, int64_t block, const Reduction& reduction) const {
  const int64_t begin = block * kBlock;
  BlockPartial partial;
  kernels_.partial[logits_.type()][scaling_.softcap()][reduction.entropy][reduction.sum_sq_probs](
      logits_.at(row, begin), std::min(kBlock, logits_.vocabulary() - begin), scaling_.map(row),
      &partial);
  return partial;
}

void Rows::add(RowSum* sum, int64_t row, const BlockPartial& partial) const {
  sum->add(partial, static_cast<double>(squashed(partial.max)) * scaling_.map(row).multiplier);
}

RowStats Rows::restore(int64_t row, float max, double log_sum, double entropy) const {
  const float x = logits_.value(row, token_ids_[row]);
  const double t = (static_cast<double>(squashed(x)) - static_cast<double>(squashed(max))) *
                   scaling_.multiplier(row);
  return {max, t - log_sum, log_sum, entropy};
}

RowStats Rows::finish(int64_t row, const RowSum& sum) const {
  RowStats stats = restore(row, sum.max(), sum.log_sum(), sum.entropy());
  const double top = static_cast<double>(squashed(sum.max())) * scaling_.multiplier(row);
  stats.logsumexp = sum.empty() ? -std::numeric_limits<double>::infinity() : top + stats.log_sum;
  stats.sum_sq_probs = sum.sum_sq_probs();
  stats.is_top1 = squashed(logits_.value(row, token_ids_[row])) >= squashed(sum.max());
  return stats;
}

// dL/dz_j = (flow.logsumexp - flow.logprob - flow.entropy (log p_j + H)) p_j + flow.logprob at the
// token, with log p_j = t_j ln 2 - log_sum and p_j = 2^t_j / sum.
Rows::Plan Rows::plan_gradient(int64_t row, const RowStats& stats, const RowGradient& flow) const {
  Plan plan{};
  plan.row = row;
  plan.zero = flow.logprob == 0 && flow.logsumexp == 0 && flow.entropy == 0;
  if (plan.zero) return plan;
  const double slope = scaling_.slope(row), scale = slope * std::exp(-stats.log_sum);
  plan.map = scaling_.map(row);
  plan.linear = flow.entropy != 0;
  plan.terms.max = stats.max;
  plan.terms.constant = with_plain_nan(
      (flow.logsumexp - flow.logprob - flow.entropy * (stats.entropy - stats.log_sum)) * scale);
  plan.terms.linear = with_plain_nan(-flow.entropy * kLn2 * scale);

  // at the token the two parts would cancel as p nears 1
  const double p = std::exp(stats.logprob);
  double gradient = -flow.logprob * std::expm1(stats.logprob) + flow.logsumexp * p;
  if (p != 0) gradient -= flow.entropy * (stats.logprob + stats.entropy) * p;
  if (stats.logprob == -HUGE_VAL) gradient = 0;  // a logit of -inf excludes its token
  if (scaling_.softcap()) {
    const double x = logits_.value(row, token_ids_[row]);
    const double decay = std::exp(-2 * std::fabs(x * scaling_.squash()));
    gradient *= 4 * decay / ((1 + decay) * (1 + decay));  // 1 - tanh^2
  }
  plan.token_gradient = static_cast<float>(gradient * slope);
  return plan;
}

void Rows::write_gradient(const Plan& plan, int64_t block, const Logits& grad) const {
  const int64_t begin = block * kBlock, size = std::min(kBlock, logits_.vocabulary() - begin);
  char* out = grad.writable(plan.row, begin);
  if (plan.zero) {
    std::memset(out, 0, size * grad.element_size());
    return;
  }
  kernels_.gradient[logits_.type()][scaling_.softcap()][plan.linear](
      logits_.at(plan.row, begin), out, size, plan.map, plan.terms);
  const int64_t token = token_ids_[plan.row];
  if (token >= begin && token < begin + size) grad.set(plan.row, token, plan.token_gradient);
}

}  // namespace fastrl::cpu
