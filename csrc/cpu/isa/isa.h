// The code that kernels_*.cpp in this folder compile once per instruction set. They define
// FASTRL_ISA, the namespace and name of the table, and FASTRL_VEC_BYTES. Nothing here may call the
// standard library: its inline functions would be compiled for this instruction set, and the linker
// could pick them for the whole library.

#include "../../objectives.h"

#define FASTRL_CAT(a, b) a##b
#define FASTRL_NAME(prefix, isa) FASTRL_CAT(prefix, isa)
#define FASTRL_TEXT_OF(x) #x
#define FASTRL_TEXT(x) FASTRL_TEXT_OF(x)

namespace fastrl::cpu {
namespace FASTRL_ISA {

#include "vec.h"
// the others build on it
#include "../kept/gathered_rows.h"
#include "../tokens/policy_tokens.h"
#include "../vocabulary/row_blocks.h"
// builds on row_blocks.h
#include "../vocabulary/divergence_blocks.h"

#define FASTRL_PARTIALS(T, softcap)                                                      \
  {                                                                                      \
    {block_partial<T, softcap, false, false>, block_partial<T, softcap, false, true>}, { \
      block_partial<T, softcap, true, false>, block_partial<T, softcap, true, true>      \
    }                                                                                    \
  }
#define FASTRL_BY_TYPE(name)                                                                  \
  {                                                                                           \
    {name<float, false>, name<float, true>}, {name<BFloat16, false>, name<BFloat16, true>}, { \
      name<Half, false>, name<Half, true>                                                     \
    }                                                                                         \
  }
#define FASTRL_GRADIENTS(T, softcap) \
  {block_gradient<T, softcap, false>, block_gradient<T, softcap, true>}

constexpr Kernels kKernels = {
    FASTRL_TEXT(FASTRL_ISA),
    {{FASTRL_PARTIALS(float, false), FASTRL_PARTIALS(float, true)},
     {FASTRL_PARTIALS(BFloat16, false), FASTRL_PARTIALS(BFloat16, true)},
     {FASTRL_PARTIALS(Half, false), FASTRL_PARTIALS(Half, true)}},
    {{FASTRL_GRADIENTS(float, false), FASTRL_GRADIENTS(float, true)},
     {FASTRL_GRADIENTS(BFloat16, false), FASTRL_GRADIENTS(BFloat16, true)},
     {FASTRL_GRADIENTS(Half, false), FASTRL_GRADIENTS(Half, true)}},
    lane_tanh,
    {gathered_dots<float>, gathered_dots<BFloat16>, gathered_dots<Half>},
    {gathered_sum<float>, gathered_sum<BFloat16>, gathered_sum<Half>},
    FASTRL_BY_TYPE(block_values),
    FASTRL_BY_TYPE(block_slopes),
    {block_divergence<kForwardKl>, block_divergence<kReverseKl>, block_divergence<kJensenShannon>},
    {block_divergence_slopes<kForwardKl>, block_divergence_slopes<kReverseKl>,
     block_divergence_slopes<kJensenShannon>},
    token_losses,
    sum_log_ratios,
    sum_slopes,
};

}  // namespace FASTRL_ISA

const Kernels* FASTRL_NAME(kernels_, FASTRL_ISA)() { return &FASTRL_ISA::kKernels; }

}  // namespace fastrl::cpu
