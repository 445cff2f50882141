#include "teacher_rows.h"

namespace fastrl::cpu {
namespace {

// A NaN that survives rounding to bfloat16: one with all bits set would carry into the sign and
// become 0.
float with_plain_nan(double x) {
  return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(x);
}

}  // namespace

Rows::Rows(const Tensor& logits, const RowArguments& arguments)
    : logits_(logits),
      scaling_(arguments.temperatures, arguments.temperature, arguments.logit_scale,
               arguments.logit_softcap),
      kernels_(kernels()),
      token_ids_(check_rows(logits, arguments)),
      active_(logits_.rows()) {
  std::optional<Flags> mask;
  if (arguments.mask) {
    check_flags(*arguments.mask);
    mask.emplace(*arguments.mask);
  }
  for (int64_t row = 0; row < logits_.rows(); ++row) {
    const int64_t token = token_ids_[row];
    active_[row] = token != arguments.ignore_index && (!mask || (*mask)[row]);
    if (!active_[row]) continue;
    ++num_active_;
    if (token < 0 || token >= logits_.vocabulary()) {
      raise_value_error("token_ids must lie in [0, ", logits_.vocabulary(),
                        ") or be ignore_index, got ", token, " at ",
                        place_text(arguments.token_ids, row));
    }
    if (arguments.temperatures) check_temperature(scaling_.temperature(row));
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
  sum->add(partial, static_cast<double>(squashed(partial.max)) * scaling_.map(row).binary_gain);
}

RowStats Rows::restore(int64_t row, float row_max, double log_sum, double entropy) const {
  const float x = logits_.value(row, token_ids_[row]);
  const double t = (static_cast<double>(squashed(x)) - static_cast<double>(squashed(row_max))) *
                   scaling_.gain(row);
  RowStats stats{};
  stats.logprobs = t - log_sum;
  stats.entropy = entropy;
  stats.row_max = row_max;
  stats.log_sum = log_sum;
  return stats;
}

RowStats Rows::finish(int64_t row, const RowSum& sum) const {
  RowStats stats = restore(row, sum.max(), sum.log_sum(), sum.entropy());
  const double top = static_cast<double>(squashed(sum.max())) * scaling_.gain(row);
  stats.logsumexp = sum.empty() ? -std::numeric_limits<double>::infinity() : top + stats.log_sum;
  stats.sum_sq_probs = sum.sum_sq_probs();
  stats.is_top1 = squashed(logits_.value(row, token_ids_[row])) >= squashed(sum.max());
  return stats;
}

// dL/dz_j = (flow.logsumexp - flow.logprob - flow.entropy (log p_j + H)) p_j + flow.logprob at the
// token, with log p_j = t_j ln 2 - log_sum and p_j = 2^t_j / sum.
Rows::PlannedGradient Rows::plan_gradient(int64_t row, const RowStats& stats,
                                          const RowGradient& flow) const {
  PlannedGradient planned{};
  planned.row = row;
  planned.zero =
      flow.logprob == 0 && flow.logsumexp == 0 && flow.entropy == 0 && flow.divergence == 0;
  if (planned.zero) return planned;
  const double raw_gain = scaling_.raw_gain(row), norm = raw_gain * std::exp(-stats.log_sum);
  planned.map = scaling_.map(row);
  planned.linear = flow.entropy != 0;
  planned.terms.max = static_cast<float>(stats.row_max);
  planned.terms.constant = with_plain_nan(
      (flow.logsumexp - flow.logprob - flow.entropy * (stats.entropy - stats.log_sum)) * norm);
  planned.terms.linear = with_plain_nan(-flow.entropy * kLn2 * norm);

  // at the token the two terms would cancel as p approaches 1
  const double p = std::exp(stats.logprobs);
  double gradient = -flow.logprob * std::expm1(stats.logprobs) + flow.logsumexp * p;
  if (p != 0) gradient -= flow.entropy * (stats.logprobs + stats.entropy) * p;
  if (stats.logprobs == -HUGE_VAL) gradient = 0;  // a logit of -inf excludes its token
  if (flow.divergence != 0) {
    planned.raw_gain = static_cast<float>(raw_gain);
    planned.by = {with_plain_nan(flow.divergence), with_plain_nan(flow.slope_mean),
                  with_plain_nan(flow.logsumexp - flow.logprob - flow.entropy * stats.entropy),
                  with_plain_nan(-flow.entropy * kLn2)};
    gradient += teacher_->slope(row, token_ids_[row], flow.divergence, flow.slope_mean);
  }
  if (scaling_.softcap()) {
    const double x = logits_.value(row, token_ids_[row]);
    const double decay = std::exp(-2 * std::fabs(x * scaling_.squash()));
    gradient *= 4 * decay / ((1 + decay) * (1 + decay));  // 1 - tanh^2
  }
  planned.token_gradient = static_cast<float>(gradient * raw_gain);
  return planned;
}

void Rows::write_gradient(const PlannedGradient& planned, int64_t block, const Logits& grad) const {
  const int64_t begin = block * kBlock, size = std::min(kBlock, logits_.vocabulary() - begin);
  char* out = grad.writable(planned.row, begin);
  if (planned.zero) {
    std::memset(out, 0, size * grad.element_size());
    return;
  }
  const char* x = logits_.at(planned.row, begin);
  if (planned.by.divergence != 0) {  // also if it is NaN
    teacher_->write_gradient(planned.row, begin, size, planned.by, planned.raw_gain, out);
  } else {
    kernels_.gradient[logits_.type()][scaling_.softcap()][planned.linear](x, out, size, planned.map,
                                                                          planned.terms);
  }
  const int64_t token = token_ids_[planned.row];
  if (token >= begin && token < begin + size) grad.set(planned.row, token, planned.token_gradient);
}

}  // namespace fastrl::cpu
