// Products of hidden states with some rows of an LM head, and the sums of their gradients.
#include <vector>

#include "../parallel.h"
#include "../vocabulary/logits.h"

namespace fastrl::cpu {
namespace {

// Products in a task, enough to outweigh its start.
constexpr int64_t kTask = 1 << 17;

void check_matrix(const Tensor& tensor, const char* name) {
  check_cpu(tensor, name);
  STD_TORCH_CHECK(tensor.dim() == 2 && (tensor.stride(1) == 1 || tensor.size(1) <= 1), name,
                  " must be a matrix with rows of stride 1, got ", shape_text(tensor));
}

void check_floats(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) {
  check_matrix(tensor, name);
  check_dtype(tensor, ScalarType::Float, name);
  STD_TORCH_CHECK(tensor.size(0) == rows && tensor.size(1) == columns, name, " must have shape (",
                  rows, ", ", columns, "), got ", shape_text(tensor));
}

// Which rows of a matrix belong to each row of a call: ids [C, K], below 0 for none.
class Ids {
 public:
  Ids(const Tensor& ids, int64_t matrix_rows) : rows_(ids.size(0)), count_(ids.size(1)) {
    check_matrix(ids, "ids");
    check_dtype(ids, ScalarType::Int, "ids");
    STD_TORCH_CHECK(ids.is_contiguous(), "ids must be contiguous");
    data_ = ids.const_data_ptr<int32_t>();
    int32_t largest = -1;
    for (int64_t i = 0; i < rows_ * count_; ++i) largest = std::max(largest, data_[i]);
    STD_TORCH_CHECK(largest < matrix_rows, "ids must be below ", matrix_rows, ", got ", largest);
  }
  int64_t rows() const { return rows_; }
  int64_t count() const { return count_; }
  const int32_t* row(int64_t row) const { return data_ + row * count_; }
  // rows of a task, for `width` products with each id
  int64_t grain(int64_t width) const {
    return std::max<int64_t>(1, kTask / std::max<int64_t>(1, width * count_));
  }

 private:
  int64_t rows_, count_;
  const int32_t* data_;
};

void gathered_dots_(Tensor& out, const Tensor& states, const Tensor& matrix, const Tensor& ids) {
  check_matrix(matrix, "matrix");
  const Ids rows(ids, matrix.size(0));
  const int64_t width = matrix.size(1), count = rows.count();
  check_floats(states, rows.rows(), width, "states");
  check_floats(out, rows.rows(), count, "out");
  const auto run = kernels().gathered_dots[element_type(matrix, "matrix")];
  const float* x = states.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  for_each_range(rows.rows(), rows.grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(x + row * states.stride(0), matrix.const_data_ptr(), matrix.stride(0), rows.row(row),
          count, width, target + row * out.stride(0));
    }
  });
}

void gathered_sums_(Tensor& out, const Tensor& factors, const Tensor& matrix, const Tensor& ids) {
  check_matrix(matrix, "matrix");
  const Ids rows(ids, matrix.size(0));
  const int64_t width = matrix.size(1), count = rows.count();
  check_floats(factors, rows.rows(), count, "factors");
  check_floats(out, rows.rows(), width, "out");
  const auto run = kernels().gathered_sum[element_type(matrix, "matrix")];
  const float* x = factors.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  for_each_range(rows.rows(), rows.grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(x + row * factors.stride(0), matrix.const_data_ptr(), matrix.stride(0), rows.row(row),
          count, width, target + row * out.stride(0));
    }
  });
}

void scattered_sums_(Tensor& out, const Tensor& factors, const Tensor& states, const Tensor& ids) {
  const int64_t width = states.size(1), matrix_rows = out.size(0);
  const Ids rows(ids, matrix_rows);
  const int64_t count = rows.count();
  check_floats(states, rows.rows(), width, "states");
  check_floats(factors, rows.rows(), count, "factors");
  check_floats(out, matrix_rows, width, "out");
  // the terms sorted by id, and within an id in the order of rows, whatever the threads do
  std::vector<int64_t> begins(matrix_rows + 1);
  for (int64_t i = 0; i < rows.rows() * count; ++i) {
    if (const int32_t id = rows.row(0)[i]; id >= 0) ++begins[id + 1];
  }
  for (int64_t id = 0; id < matrix_rows; ++id) begins[id + 1] += begins[id];
  std::vector<int32_t> row_of(begins.back());
  std::vector<float> factor_of(begins.back());
  std::vector<int64_t> place(begins.begin(), begins.end() - 1);
  const float* x = factors.const_data_ptr<float>();
  for (int64_t row = 0; row < rows.rows(); ++row) {
    for (int64_t k = 0; k < count; ++k) {
      const int32_t id = rows.row(row)[k];
      if (id < 0) continue;
      const int64_t at = place[id]++;
      row_of[at] = static_cast<int32_t>(row);
      factor_of[at] = x[row * factors.stride(0) + k];
    }
  }
  const auto run = kernels().gathered_sum[kFloat];
  float* target = out.mutable_data_ptr<float>();
  const int64_t tasks = std::max<int64_t>(1, begins.back() * width / kTask);
  for_each_range(matrix_rows, std::max<int64_t>(1, matrix_rows / tasks),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t id = begin; id < end; ++id) {
                     run(factor_of.data() + begins[id], states.const_data_ptr(), states.stride(0),
                         row_of.data() + begins[id], begins[id + 1] - begins[id], width,
                         target + id * out.stride(0));
                   }
                 });
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("gathered_dots_", fastrl::boxed<fastrl::cpu::gathered_dots_>);
  m.impl("gathered_sums_", fastrl::boxed<fastrl::cpu::gathered_sums_>);
  m.impl("scattered_sums_", fastrl::boxed<fastrl::cpu::scattered_sums_>);
}
