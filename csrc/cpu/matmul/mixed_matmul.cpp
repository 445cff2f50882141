// out += a b with float32 sums from bfloat16 operands, spread over the threads.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../../check.h"
#include "../huge_pages.h"
#include "../isa/kernels.h"
#include "../parallel.h"
#include "tile_matmul.h"

namespace fastrl::cpu {
namespace {

// Results of a task; a task packs b once for all its rows.
constexpr int64_t kRows = 512, kColumns = 1024;
// A result with few tasks is split along K into at most this many slices of at least this length,
// to get about kFewTasks tasks; more would only take memory (up to 32 MiB). The split does not
// depend on the number of threads, and neither do the sums.
constexpr int64_t kMostSlices = 8, kSlice = 4096, kFewTasks = 16;

bool has_matrix_tiles() { return has_tiles() && std::string(kernels().capability) == "avx512"; }

Matrix as_matrix(const Tensor& tensor, const char* name) {
  check_cpu(tensor, name);
  const bool is_float = tensor.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(is_float || tensor.scalar_type() == ScalarType::BFloat16, name,
                  " must have dtype Float or BFloat16, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == 2 && (tensor.stride(0) == 1 || tensor.stride(1) == 1), name,
                  " must be a matrix with one stride of 1, got ", shape_text(tensor));
  // of two strides of 1 the one that is walked along decides
  const bool row_major = tensor.stride(1) == 1;
  return {tensor.const_data_ptr(),          tensor.size(0), tensor.size(1), tensor.stride(0),
          row_major ? 1 : tensor.stride(1), is_float};
}

struct FreeWorkspace {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory of a thread for packed blocks, or null if there is none left.
void* workspace() {
  thread_local std::unique_ptr<void, FreeWorkspace> memory;
  if (!memory) memory.reset(std::aligned_alloc(64, (tile_workspace_bytes() + 63) / 64 * 64));
  return memory.get();
}

int64_t parts(int64_t size, int64_t grain) { return (size + grain - 1) / grain; }

void mixed_matmul_(Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  STD_TORCH_CHECK(has_matrix_tiles(), "this machine has no AMX tiles for bfloat16");
  check_cpu(out, "out");
  check_dtype(out, ScalarType::Float, "out");
  const Matrix left = as_matrix(a, "a"), right = as_matrix(b, "b");
  STD_TORCH_CHECK(!right.is_float, "b must have dtype BFloat16, got Float");
  STD_TORCH_CHECK(left.is_float || left.column_stride == 1, "a in BFloat16 must be row-major");
  STD_TORCH_CHECK(left.columns == right.rows, "a and b must fit, got ", shape_text(a), " and ",
                  shape_text(b));
  const int64_t rows = left.rows, columns = right.columns, terms = left.columns;
  STD_TORCH_CHECK(terms > 0, "a and b must have terms to add, got ", shape_text(a), " and ",
                  shape_text(b));
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == columns &&
                      (out.stride(1) == 1 || columns <= 1),
                  "out must be row-major of shape (", rows, ", ", columns, "), got ",
                  shape_text(out));
  const int64_t down = parts(rows, kRows), across = parts(columns, kColumns);
  int64_t slices = 1;
  if (down * across < kFewTasks) {
    const int64_t wanted = parts(kFewTasks, std::max<int64_t>(1, down * across));
    slices = std::max<int64_t>(1, std::min({kMostSlices, terms / kSlice, wanted}));
  }
  float* target = static_cast<float*>(out.mutable_data_ptr());
  const int64_t stride = out.stride(0);
  std::vector<float> partial((slices - 1) * rows * columns);
  std::atomic<bool> out_of_memory{false};
  for_each_task(down * across * slices, [&](int64_t task) {
    const int64_t slice = task % slices, row = task / slices % down * kRows;
    const int64_t column = task / slices / down * kColumns;
    const TileTask part{row,
                        std::min(rows, row + kRows),
                        column,
                        std::min(columns, column + kColumns),
                        terms * slice / slices,
                        terms * (slice + 1) / slices};
    const MatrixOut result =
        slice == 0 ? MatrixOut{target, stride}
                   : MatrixOut{partial.data() + (slice - 1) * rows * columns, columns};
    void* const packed = workspace();
    if (packed == nullptr) {
      out_of_memory = true;
      return;
    }
    tile_matmul(left, right, result, part, accumulate && slice == 0, packed);
  });
  STD_TORCH_CHECK(!out_of_memory, "out of memory: a thread needs ", tile_workspace_bytes(),
                  " bytes to multiply");
  if (slices == 1) return;
  for_each_range(rows, 16, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t slice = 1; slice < slices; ++slice) {
        const float* more = partial.data() + ((slice - 1) * rows + row) * columns;
        for (int64_t column = 0; column < columns; ++column) {
          target[row * stride + column] += more[column];
        }
      }
    }
  });
}

void huge_pages_(Tensor& tensor) {
  check_cpu(tensor, "tensor");
  use_huge_pages(tensor);
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CompositeExplicitAutograd, m) {
  m.impl("has_matrix_tiles", fastrl::boxed<fastrl::cpu::has_matrix_tiles>);
}
STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("huge_pages_", fastrl::boxed<fastrl::cpu::huge_pages_>);
  m.impl("mixed_matmul_", fastrl::boxed<fastrl::cpu::mixed_matmul_>);
}
