// Checks the arguments of sequence_weights.
#pragma once

#include "check.h"

namespace fastrl {

// Checks everything except the values in the tensors.
inline Aggregation check_aggregation(const AggregationArguments& in, const Tensor& mask,
                                     const std::optional<Tensor>& token_ids, int64_t sequences) {
  const Aggregation kind = check_kind<Aggregation>(in.aggregation, "aggregation");
  STD_TORCH_CHECK(mask.dim() == 2 && mask.is_contiguous(),
                  "mask must be contiguous of shape [B, T], got ", shape_text(mask));
  check_like(token_ids, mask, ScalarType::Long, "token_ids", "mask");
  STD_TORCH_CHECK(in.length_norm >= 0, "length_norm must be positive, or 0 for the padded width, ",
                  "got ", in.length_norm);
  if (in.normalizer_tensor) {
    check_device(*in.normalizer_tensor, mask, "normalizer_tensor", "mask");
    STD_TORCH_CHECK(in.normalizer_tensor->numel() == 1,
                    "normalizer_tensor must have one element, got shape ",
                    shape_text(*in.normalizer_tensor));
  }
  if (in.group_ids) {
    check_device(*in.group_ids, mask, "group_ids", "mask");
    check_dtype(*in.group_ids, ScalarType::Long, "group_ids");
    STD_TORCH_CHECK(in.group_ids->dim() == 1 && in.group_ids->size(0) == sequences &&
                        in.group_ids->is_contiguous(),
                    "group_ids must be contiguous of shape (", sequences,
                    ",), one for each sequence, got ", shape_text(*in.group_ids));
  } else if (kind == Aggregation::kPromptMean) {
    STD_TORCH_CHECK(in.group_size > 0, "group_size or group_ids must be given for prompt-mean");
    STD_TORCH_CHECK(sequences % in.group_size == 0, "group_size must divide the number of ",
                    "sequences ", sequences, ", got ", in.group_size);
  }
  return kind;
}

}  // namespace fastrl
