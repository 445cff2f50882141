// The vector kernels for any machine: 16-byte vectors of the compiler's default target.
#include <cmath>
#include <cstdint>

#include "kernels.h"

#define FASTRL_ISA plain
#define FASTRL_VEC_BYTES 16
#include "isa.h"
