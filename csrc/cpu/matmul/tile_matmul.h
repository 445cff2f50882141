// out [M, N] float32 (+)= a [M, K] b [K, N] on the matrix tiles of AMX, with sums in float32.
//
// b is bfloat16. a is bfloat16, or float32 split into the sum of two bfloat16, which keeps 16 bits
// of its mantissa. The available libraries would round such a product to 16 bits in its output.
#pragma once

#include <cstdint>

namespace fastrl::cpu {

struct Matrix {
  const void* data;
  int64_t rows, columns, row_stride, column_stride;  // in elements; one of the strides is 1
  bool is_float;
};

struct MatrixOut {
  float* data;
  int64_t row_stride;
};

// Whether this machine has the tiles and the operating system lets this process use them.
bool has_tiles();

// A part of the product: rows [row_begin, row_end), columns [column_begin, column_end) and terms
// [k_begin, k_end). `workspace` holds tile_workspace_bytes(), aligned to 64.
struct TileTask {
  int64_t row_begin, row_end, column_begin, column_end, k_begin, k_end;
};
void tile_matmul(const Matrix& a, const Matrix& b, const MatrixOut& out, const TileTask& task,
                 bool accumulate, void* workspace);
int64_t tile_workspace_bytes();

}  // namespace fastrl::cpu
