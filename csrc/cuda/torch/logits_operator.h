// The logits argument and what always comes with it, checked.
#pragma once

#include <cmath>
#include <cstdlib>

#include "../vocabulary/logits.h"
#include "operator.h"

namespace fastrl::cuda {

inline LogitsType logits_type(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return kFloat;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kHalf;
    default:
      STD_TORCH_CHECK(false, "logits must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(logits.scalar_type()));
  }
}

// What token_ids and temperatures hold is on the device and not looked at here: a token outside the
// vocabulary gives NaN.
inline LogitsParams check_logits(const Tensor& logits, const Tensor& token_ids,
                                 const Tensor& active, const std::optional<Tensor>& temperatures,
                                 double temperature, double logit_scale, double logit_softcap) {
  STD_TORCH_CHECK(logits.dim() == 3, "logits must have shape [B, T, V], got ", shape_text(logits));
  STD_TORCH_CHECK(logits.size(2) <= 1 || logits.stride(2) == 1 || logits.numel() == 0,
                  "logits must have stride 1 along the vocabulary, got ", logits.stride(2));
  check_device(token_ids, logits, "token_ids", "logits");
  check_dtype(token_ids, ScalarType::Long, "token_ids");
  STD_TORCH_CHECK(token_ids.dim() == 2 && token_ids.size(0) == logits.size(0) &&
                      token_ids.size(1) == logits.size(1) && token_ids.is_contiguous(),
                  "token_ids must be contiguous with the first two sizes of logits ",
                  shape_text(logits), ", got ", shape_text(token_ids));
  check_like(active, token_ids, ScalarType::Bool, "active", "token_ids");
  check_like(temperatures, token_ids, ScalarType::Float, "temperatures", "token_ids");
  STD_TORCH_CHECK(temperatures || (temperature > 0 && std::isfinite(temperature)),
                  "temperature must be positive and finite, got ", temperature);
  STD_TORCH_CHECK(logit_scale > 0 && std::isfinite(logit_scale),
                  "logit_scale must be positive and finite, got ", logit_scale);
  STD_TORCH_CHECK(logit_softcap >= 0 && std::isfinite(logit_softcap),
                  "logit_softcap must be positive, or 0 for none, got ", logit_softcap);
  return {logits_type(logits),
          logits.const_data_ptr(),
          logits.size(0),
          logits.size(1),
          logits.size(2),
          logits.stride(0),
          logits.stride(1),
          token_ids.const_data_ptr<int64_t>(),
          active.const_data_ptr<bool>(),
          data_or_null<float>(temperatures),
          temperature,
          logit_scale,
          logit_softcap};
}

inline GradientParams gradient_in(const Tensor& grad) {
  return {grad.mutable_data_ptr(), grad.stride(0), grad.stride(1)};
}

// The logits as their own gradient: their rows must not share an element.
inline GradientParams gradient_over(const Tensor& logits) {
  const int64_t batch = logits.size(0), tokens = logits.size(1), row = logits.size(2);
  const int64_t b = std::abs(logits.stride(0)), t = std::abs(logits.stride(1));
  const bool apart = (tokens <= 1 || t >= row) && (batch <= 1 || b >= row) &&
                     (tokens <= 1 || batch <= 1 || b >= t * tokens || t >= b * batch);
  STD_TORCH_CHECK(apart, "logits must not overlap in memory to be overwritten");
  return gradient_in(logits);
}

inline Tensor new_gradient(const Tensor& logits) {
  return torch::stable::new_empty(logits, logits.sizes(), logits.scalar_type());
}

}  // namespace fastrl::cuda
