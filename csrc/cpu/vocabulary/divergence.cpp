// The divergence of rows of logits from a teacher's, and the gradient of the student's rows.
#include <tuple>

#include "../huge_pages.h"
#include "row_saved.h"
#include "teacher_rows.h"

namespace fastrl::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> divergence_fwd(
    const Tensor& logits, const Tensor& teacher_logits, const RowArguments& arguments,
    const ScalingArguments& teacher_scaling, const Tensor& row_max, const Tensor& log_sum,
    const Tensor& teacher_row_max, const Tensor& teacher_log_sum, double beta) {
  const Tensor& token_ids = arguments.token_ids;
  const Rows rows(logits, arguments);
  check_statistic(row_max, token_ids, "row_max");
  check_statistic(log_sum, token_ids, "log_sum");
  const TeacherArguments given{teacher_logits, teacher_scaling, teacher_row_max, teacher_log_sum,
                               beta};
  const TeacherRows teacher(rows, check_teacher(given, token_ids), row_max, log_sum);
  const Tensor divergence = empty_like_tokens(token_ids, ScalarType::Float);
  const Tensor slope_mean = empty_like_tokens(token_ids, ScalarType::Float);
  const Tensor agrees = empty_like_tokens(token_ids, ScalarType::Bool);
  float* out_divergence = divergence.mutable_data_ptr<float>();
  float* out_slope_mean = slope_mean.mutable_data_ptr<float>();
  bool* out_agrees = agrees.mutable_data_ptr<bool>();
  const int64_t rows_at_once = std::max<int64_t>(1, 8 * kBlock / (logits.size(2) + 1));
  for_each_range(rows.logits().rows(), rows_at_once, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const DivergenceSums sums = rows.active(row) ? teacher.sums(row) : DivergenceSums{};
      out_divergence[row] = static_cast<float>(sums.value < 0 ? 0.0 : sums.value);
      out_slope_mean[row] = static_cast<float>(sums.slope);
      out_agrees[row] = sums.agrees;
    }
  });
  return {divergence, slope_mean, agrees};
}

struct Slopes {
  const Tensor &slope_mean, &grad_divergence;
};

void write_grad(Rows& rows, const Tensor& token_ids, const SavedStats& saved,
                const TeacherArguments& given, const Slopes& slopes, const Logits& grad) {
  check_saved(saved, token_ids);
  check_statistic(slopes.slope_mean, token_ids, "slope_mean");
  check_statistic(slopes.grad_divergence, token_ids, "grad_divergence");
  const TeacherRows teacher(rows, check_teacher(given, token_ids), saved.row_max, saved.log_sum);
  rows.compare_with(&teacher);
  const float* mean = slopes.slope_mean.const_data_ptr<float>();
  const float* grad_divergence = slopes.grad_divergence.const_data_ptr<float>();
  walk_saved(rows, saved, grad, [&](int64_t row, RowGradient flow) {
    flow.divergence = static_cast<double>(grad_divergence[row]);
    flow.slope_mean = static_cast<double>(mean[row]);
    return flow;
  });
}

Tensor divergence_bwd(const Tensor& logits, const Tensor& teacher_logits,
                      const RowArguments& arguments, const ScalingArguments& teacher_scaling,
                      const SavedStats& saved, const Tensor& teacher_row_max,
                      const Tensor& teacher_log_sum, double beta, const Tensor& slope_mean,
                      const Tensor& grad_divergence) {
  Rows rows(logits, arguments);
  const Tensor grad = new_gradient(logits);
  write_grad(rows, arguments.token_ids, saved,
             {teacher_logits, teacher_scaling, teacher_row_max, teacher_log_sum, beta},
             {slope_mean, grad_divergence}, Logits(grad));
  return grad;
}

void divergence_bwd_(const Tensor& logits, const Tensor& teacher_logits,
                     const RowArguments& arguments, const ScalingArguments& teacher_scaling,
                     const SavedStats& saved, const Tensor& teacher_row_max,
                     const Tensor& teacher_log_sum, double beta, const Tensor& slope_mean,
                     const Tensor& grad_divergence, bool narrow) {
  check_narrow(narrow);
  Rows rows(logits, arguments);
  check_rows_apart(logits);
  write_grad(rows, arguments.token_ids, saved,
             {teacher_logits, teacher_scaling, teacher_row_max, teacher_log_sum, beta},
             {slope_mean, grad_divergence}, rows.logits());
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("divergence_fwd", fastrl::boxed<fastrl::cpu::divergence_fwd>);
  m.impl("divergence_bwd", fastrl::boxed<fastrl::cpu::divergence_bwd>);
  m.impl("divergence_bwd_", fastrl::boxed<fastrl::cpu::divergence_bwd_>);
}
