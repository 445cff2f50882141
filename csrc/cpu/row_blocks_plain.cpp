// The row kernels for any machine: 16-byte vectors of the compiler's default target.
#include <cstdint>

#include "row_kernels.h"

#define FASTRL_ISA plain
#define FASTRL_VEC_BYTES 16
#include "row_blocks.h"
