// Rows of a teacher's logits and a student's: their divergence and its derivative.
#pragma once

#include "rows.h"

namespace fastrl::cpu {

struct TeacherArguments {
  const Tensor& logits;
  const ScalingArguments& scaling;
  const Tensor &row_max, &log_sum;
  double beta;
};

// Checks everything except the teacher's logits.
inline const TeacherArguments& check_teacher(const TeacherArguments& in, const Tensor& token_ids) {
  const ScalingArguments& s = in.scaling;
  check_statistic(s.temperatures, token_ids, "teacher_temperatures");
  check_scaling(s.temperatures, s.temperature, s.logit_scale, s.logit_softcap);
  check_statistic(in.row_max, token_ids, "teacher_row_max");
  check_statistic(in.log_sum, token_ids, "teacher_log_sum");
  return in;
}

// Room for the values of a block of both rows.
struct BlockPair {
  alignas(64) float student[kBlock], teacher[kBlock];
};

class TeacherRows {
 public:
  // `row_max` and `log_sum` are the student's.
  TeacherRows(const Rows& student, const TeacherArguments& teacher, const Tensor& row_max,
              const Tensor& log_sum);

  DivergenceSums sums(int64_t row) const;

  // Writes dL/dlogits of a block; `raw_gain` is dz/dlogits without a softcap.
  void write_gradient(int64_t row, int64_t begin, int64_t size, const DivergenceSlopes& by,
                      float raw_gain, char* grad) const;
  // dL/dz of the divergence alone at one column
  double slope(int64_t row, int64_t column, double divergence, double mean) const;

 private:
  DivergenceMap map(int64_t row) const;
  const float* student_values(int64_t row, int64_t begin, int64_t size, float* room) const;
  const float* teacher_values(int64_t row, int64_t begin, int64_t size, float* room) const;

  const Rows& student_;
  Logits logits_;
  Scaling scaling_;
  const Kernels& kernels_;
  const float *row_max_, *log_sum_, *teacher_row_max_, *teacher_log_sum_;
  double beta_;
  int kind_;
};

}  // namespace fastrl::cpu
