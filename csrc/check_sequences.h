// Checks how tokens are split into sequences, without reading cu_seqlens.
#pragma once

#include "check.h"

namespace fastrl {

// Returns the number of sequences in `tokens` [B, T], or packed [1, N] with cu_seqlens.
inline int64_t check_sequences(const Tensor& tokens, const std::optional<Tensor>& cu_seqlens) {
  if (!cu_seqlens) return tokens.size(0);
  check_device(*cu_seqlens, tokens, "cu_seqlens", "the tokens");
  check_dtype(*cu_seqlens, ScalarType::Int, "cu_seqlens");
  STD_TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 && cu_seqlens->is_contiguous(),
                  "cu_seqlens must be contiguous of shape [S + 1], got ", shape_text(*cu_seqlens));
  STD_TORCH_CHECK(tokens.size(0) == 1, "cu_seqlens must come with packed tokens [1, N], got ",
                  shape_text(tokens));
  const int64_t sequences = cu_seqlens->size(0) - 1;
  STD_TORCH_CHECK(sequences > 0 || tokens.numel() == 0, "cu_seqlens must end with the ",
                  tokens.numel(), " tokens, but holds no sequence");
  return sequences;
}

}  // namespace fastrl
