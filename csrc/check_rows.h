// Checks the arguments of the operators on logits.
#pragma once

#include <cmath>

#include "check.h"

namespace fastrl {

inline void check_temperature(double temperature) {
  if (!(temperature > 0 && std::isfinite(temperature))) {
    raise_value_error("temperature must be above 0 and finite, got ", temperature);
  }
}

// Checks the numbers, but not the values of `temperatures`, which replace one of them.
inline void check_scaling(const std::optional<Tensor>& temperatures, double temperature,
                          double logit_scale, double logit_softcap) {
  if (!temperatures) check_temperature(temperature);
  STD_TORCH_CHECK(logit_scale > 0 && std::isfinite(logit_scale),
                  "logit_scale must be positive and finite, got ", logit_scale);
  STD_TORCH_CHECK(logit_softcap >= 0 && std::isfinite(logit_softcap),
                  "logit_softcap must be positive, or 0 for none, got ", logit_softcap);
}

// Checks everything except the values of the tensors; returns the ids.
inline const int64_t* check_rows(const Tensor& logits, const RowArguments& in) {
  STD_TORCH_CHECK(logits.dim() == 3, "logits must have shape [B, T, V], got ", shape_text(logits));
  STD_TORCH_CHECK(logits.size(2) <= 1 || logits.stride(2) == 1 || logits.numel() == 0,
                  "logits must have stride 1 along the vocabulary, got ", logits.stride(2));
  check_device(in.token_ids, logits, "token_ids", "logits");
  check_dtype(in.token_ids, ScalarType::Long, "token_ids");
  STD_TORCH_CHECK(in.token_ids.dim() == 2 && in.token_ids.size(0) == logits.size(0) &&
                      in.token_ids.size(1) == logits.size(1) && in.token_ids.is_contiguous(),
                  "token_ids must be contiguous with the first two sizes of logits ",
                  shape_text(logits), ", got ", shape_text(in.token_ids));
  if (in.mask) check_like(*in.mask, in.token_ids, in.mask->scalar_type(), "mask", "token_ids");
  check_like(in.temperatures, in.token_ids, ScalarType::Float, "temperatures", "token_ids");
  check_scaling(in.temperatures, in.temperature, in.logit_scale, in.logit_softcap);
  return in.token_ids.const_data_ptr<int64_t>();
}

inline void check_statistic(const std::optional<Tensor>& tensor, const Tensor& token_ids,
                            const char* name) {
  check_like(tensor, token_ids, ScalarType::Float, name, "token_ids");
}

inline void check_saved(const SavedStats& saved, const Tensor& token_ids) {
  check_statistic(saved.row_max, token_ids, "row_max");
  check_statistic(saved.log_sum, token_ids, "log_sum");
  check_statistic(saved.entropy, token_ids, "entropy");
  check_statistic(saved.grad_logprobs, token_ids, "grad_logprobs");
  check_statistic(saved.grad_entropy, token_ids, "grad_entropy");
  check_statistic(saved.grad_logsumexp, token_ids, "grad_logsumexp");
}

// New tensors for the statistics of all rows, in their order.
inline std::vector<Tensor> new_stats(const Tensor& token_ids, RowStatsOut* out) {
  std::vector<Tensor> tensors;
  const auto add = [&](auto*& values) {
    using T = std::remove_pointer_t<std::remove_reference_t<decltype(values)>>;
    constexpr bool kFlag = std::is_same_v<T, bool>;
    tensors.push_back(empty_like_tokens(token_ids, kFlag ? ScalarType::Bool : ScalarType::Float));
    values = tensors.back().template mutable_data_ptr<T>();
  };
  for_each_stat(add, *out);
  return tensors;
}

// Only a GPU rounds the gradient to bfloat16 in the memory of the logits.
inline void check_narrow(bool narrow) {
  STD_TORCH_CHECK(!narrow, "narrow must be false on this device");
}

// The narrow mode requires that each row of [B, T, V] has the memory of its whole stride.
inline void check_narrow_rows(const Tensor& logits) {
  check_dtype(logits, ScalarType::Float, "logits");
  if (logits.numel() == 0) return;
  const int64_t batch = logits.size(0), tokens = logits.size(1), row = logits.size(2);
  const int64_t b = batch > 1 ? logits.stride(0) : 0, t = logits.stride(1);
  STD_TORCH_CHECK(t >= row && (batch <= 1 || b >= t * tokens),
                  "logits must lie row behind row in order, a row in its stride, to be narrow");
  const auto address = reinterpret_cast<intptr_t>(logits.const_data_ptr());
  STD_TORCH_CHECK(address % 16 == 0 && t % 4 == 0 && b % 4 == 0,
                  "rows of logits must begin at multiples of 16 bytes to be narrow");
  int64_t bytes = 0, offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(logits.get(), &bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(logits.get(), &offset));
  const int64_t last = offset + (batch - 1) * b + (tokens - 1) * t;
  STD_TORCH_CHECK(4 * last + 2 * (t + row) <= bytes,
                  "the last row of logits must have the memory of its whole stride to be narrow");
}

// The index of element i of [B, T], as Python prints it.
inline std::string place_text(const Tensor& tokens, int64_t i) {
  std::ostringstream text;
  text << "(" << i / tokens.size(1) << ", " << i % tokens.size(1) << ")";
  return text.str();
}

}  // namespace fastrl
