#include "teacher_rows.h"

namespace fastrl::cpu {
namespace {

float squashed(const Kernels& kernels, const Scaling& scaling, float x) {
  return scaling.softcap() ? kernels.tanh(x, scaling.squash()) : x;
}

bool as_they_are(const Logits& logits, const Scaling& scaling) {
  return logits.type() == kFloat && !scaling.softcap();
}

// The values that the kernels compare, in `room` unless they are already in memory.
const float* values(const Kernels& kernels, const Logits& logits, const Scaling& scaling,
                    int64_t row, int64_t begin, int64_t size, float* room) {
  const char* x = logits.at(row, begin);
  if (as_they_are(logits, scaling)) return reinterpret_cast<const float*>(x);
  kernels.values[logits.type()][scaling.softcap()](x, size, scaling.squash(), room);
  return room;
}

}  // namespace

TeacherRows::TeacherRows(const Rows& student, const TeacherArguments& teacher,
                         const Tensor& row_max, const Tensor& log_sum)
    : student_(student),
      logits_(teacher.logits),
      scaling_(teacher.scaling.temperatures, teacher.scaling.temperature,
               teacher.scaling.logit_scale, teacher.scaling.logit_softcap),
      kernels_(kernels()),
      row_max_(row_max.const_data_ptr<float>()),
      log_sum_(log_sum.const_data_ptr<float>()),
      teacher_row_max_(teacher.row_max.const_data_ptr<float>()),
      teacher_log_sum_(teacher.log_sum.const_data_ptr<float>()),
      beta_(teacher.beta),
      kind_(teacher.beta == 0   ? 0
            : teacher.beta == 1 ? 1
                                : 2) {
  STD_TORCH_CHECK(logits_.rows() == student.logits().rows() &&
                      logits_.vocabulary() == student.logits().vocabulary(),
                  "teacher_logits must have the shape of logits, got ", shape_text(teacher.logits));
  STD_TORCH_CHECK(beta_ >= 0 && beta_ <= 1, "beta must lie in [0, 1], got ", beta_);
}

DivergenceMap TeacherRows::map(int64_t row) const {
  const Scaling& scaling = student_.scaling();
  const float max = squashed(kernels_, scaling, row_max_[row]);
  const float teacher_max = squashed(kernels_, scaling_, teacher_row_max_[row]);
  const double log2_sum = static_cast<double>(log_sum_[row]) * kLog2E;
  const double teacher_log2_sum = static_cast<double>(teacher_log_sum_[row]) * kLog2E;
  const double max_difference = static_cast<double>(max) - static_cast<double>(teacher_max);
  const float rounded = static_cast<float>(max_difference);
  return {scaling.map(row).binary_gain,
          max,
          static_cast<float>(log2_sum),
          scaling_.map(row).binary_gain,
          teacher_max,
          static_cast<float>(teacher_log2_sum),
          rounded,
          static_cast<float>(max_difference - static_cast<double>(rounded)),
          static_cast<float>(log2_sum - teacher_log2_sum),
          std::max(static_cast<float>(beta_), std::numeric_limits<float>::min()),
          static_cast<float>(1 - beta_)};
}

const float* TeacherRows::student_values(int64_t row, int64_t begin, int64_t size,
                                         float* room) const {
  return values(kernels_, student_.logits(), student_.scaling(), row, begin, size, room);
}

const float* TeacherRows::teacher_values(int64_t row, int64_t begin, int64_t size,
                                         float* room) const {
  return values(kernels_, logits_, scaling_, row, begin, size, room);
}

DivergenceSums TeacherRows::sums(int64_t row) const {
  DivergenceSums sums{};
  BlockPair pair;
  const DivergenceMap compared = map(row);
  for (int64_t begin = 0; begin < logits_.vocabulary(); begin += kBlock) {
    const int64_t size = std::min(kBlock, logits_.vocabulary() - begin);
    kernels_.divergence[kind_](student_values(row, begin, size, pair.student),
                               teacher_values(row, begin, size, pair.teacher), size, compared,
                               &sums);
  }
  return sums;
}

void TeacherRows::write_gradient(int64_t row, int64_t begin, int64_t size,
                                 const DivergenceSlopes& by, float raw_gain, char* grad) const {
  const LogitsType type = student_.logits().type();
  const Scaling& scaling = student_.scaling();
  BlockPair pair;
  const float* u = student_values(row, begin, size, pair.student);
  const float* v = teacher_values(row, begin, size, pair.teacher);
  const DivergenceMap compared = map(row);
  if (as_they_are(student_.logits(), scaling)) {
    kernels_.divergence_slopes[kind_](
        u, v, size, compared,
        {by.divergence * raw_gain, by.mean, by.constant * raw_gain, by.linear * raw_gain},
        reinterpret_cast<float*>(grad));
    return;
  }
  kernels_.divergence_slopes[kind_](u, v, size, compared, by, pair.student);
  kernels_.slopes[type][scaling.softcap()](student_.logits().at(row, begin), pair.student, size,
                                           scaling.squash(), raw_gain, grad);
}

double TeacherRows::slope(int64_t row, int64_t column, double divergence, double mean) const {
  BlockPair pair;
  const float* u = student_values(row, column, 1, pair.student);
  const float* v = teacher_values(row, column, 1, pair.teacher);
  float slope;
  kernels_.divergence_slopes[kind_](
      u, v, 1, map(row), {static_cast<float>(divergence), static_cast<float>(mean), 0, 0}, &slope);
  return static_cast<double>(slope);
}

}  // namespace fastrl::cpu
