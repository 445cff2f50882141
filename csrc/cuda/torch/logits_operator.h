// The logits argument and the arguments that always accompany it, checked.
#pragma once

#include <cstdlib>

#include "../../check_rows.h"
#include "../vocabulary/logits.h"
#include "operator.h"

namespace fastrl::cuda {

inline LogitsType logits_type(const Tensor& logits, const char* name = "logits") {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return kFloat;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kHalf;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(logits.scalar_type()));
  }
}

// Exponents of two are exact down to -1e9, logits down to -690 times this. Temperatures per row are
// not checked: if one is too low, the row may become NaN.
constexpr double kMostGain = 1e6;

// The values of the tensors are not checked: a token outside the vocabulary gives NaN.
inline LogitsParams check_logits(const Tensor& logits, const RowArguments& in) {
  const int64_t* token_ids = check_rows(logits, in);
  const double scale = in.logit_softcap > 0 ? 2 * in.logit_softcap : in.logit_scale;
  if (!in.temperatures && scale > kMostGain * in.temperature * (1 + 1e-9)) {
    raise_value_error("temperature must be at least ", scale / kMostGain,
                      " on backend 'cuda' with this scale or softcap, got ", in.temperature);
  }
  return {logits_type(logits),
          logits.const_data_ptr(),
          logits.size(0),
          logits.size(1),
          logits.size(2),
          logits.stride(0),
          logits.stride(1),
          token_ids,
          in.mask ? mask_of(*in.mask) : Mask{},
          in.ignore_index,
          data_or_null<float>(in.temperatures),
          in.temperature,
          in.logit_scale,
          in.logit_softcap};
}

inline GradientParams gradient_in(const Tensor& grad) {
  return {logits_type(grad), grad.mutable_data_ptr(), grad.stride(0), grad.stride(1)};
}

// The logits as memory of their gradient: rows must not share an element. With `narrow` a row
// covers its whole stride, see fastrl/library.py.
inline GradientParams gradient_over(const Tensor& logits, const LogitsParams& in, bool narrow) {
  check_rows_apart(logits);
  if (!narrow) return gradient_in(logits);
  check_narrow_rows(logits);
  return narrow_gradient(in);
}

inline Tensor new_gradient(const Tensor& logits) {
  return torch::stable::new_empty(logits, logits.sizes(), logits.scalar_type());
}

}  // namespace fastrl::cuda
