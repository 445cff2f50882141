// Checks that name the argument, what was expected and what came.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "objectives.h"

namespace fastrl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ")";
  return text.str();
}

inline void check_cpu(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
}

inline void check_dtype(const Tensor& tensor, ScalarType dtype, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " must have dtype ",
                  torch::headeronly::toString(dtype), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

inline void check_device(const Tensor& tensor, const Tensor& like, const char* name,
                         const char* like_name) {
  STD_TORCH_CHECK(tensor.is_cpu() == like.is_cpu() && tensor.get_device() == like.get_device(),
                  name, " must be on the device of ", like_name);
}

// A small per-token tensor: contiguous, of this dtype, of the shape and on the device of `like`.
inline void check_like(const Tensor& tensor, const Tensor& like, ScalarType dtype, const char* name,
                       const char* like_name) {
  check_device(tensor, like, name, like_name);
  check_dtype(tensor, dtype, name);
  bool same = tensor.dim() == like.dim();
  for (int64_t i = 0; same && i < like.dim(); ++i) same = tensor.size(i) == like.size(i);
  STD_TORCH_CHECK(same, name, " must have shape ", shape_text(like), " like ", like_name, ", got ",
                  shape_text(tensor));
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_like(const std::optional<Tensor>& tensor, const Tensor& like, ScalarType dtype,
                       const char* name, const char* like_name) {
  if (tensor) check_like(*tensor, like, dtype, name, like_name);
}

template <typename T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// A new contiguous tensor on the device of `like`; its contents are arbitrary until written.
inline Tensor empty_like_tokens(const Tensor& like, ScalarType dtype) {
  return torch::stable::new_empty(like, like.sizes(), dtype);
}

template <typename S>
Coefficients<S> check_coefficients(const std::vector<double>& values) {
  STD_TORCH_CHECK(values.size() == kNumCoefficients, "coefficients must hold ", kNumCoefficients,
                  " numbers, got ", values.size());
  return {S(values[0]), S(values[1]), S(values[2]), S(values[3]), S(values[4]), S(values[5]),
          S(values[6]), S(values[7]), S(values[8]), S(values[9]), S(values[10])};
}

inline Ratio check_ratio(int64_t ratio) {
  STD_TORCH_CHECK(ratio >= 0 && ratio <= static_cast<int64_t>(Ratio::kReinforce),
                  "ratio must be 0 to 4, got ", ratio);
  return static_cast<Ratio>(ratio);
}

inline KlEstimator check_kl_estimator(int64_t kl_estimator) {
  STD_TORCH_CHECK(kl_estimator >= 0 && kl_estimator <= static_cast<int64_t>(KlEstimator::kAbs),
                  "kl_estimator must be 0 to 3, got ", kl_estimator);
  return static_cast<KlEstimator>(kl_estimator);
}

inline KlGradient check_kl_gradient(int64_t kl_gradient) {
  STD_TORCH_CHECK(
      kl_gradient >= 0 && kl_gradient <= static_cast<int64_t>(KlGradient::kBiasCorrected),
      "kl_gradient must be 0 to 2, got ", kl_gradient);
  return static_cast<KlGradient>(kl_gradient);
}

// The level of a policy loss; a geometric mean is always that of a sequence.
inline Level check_level(int64_t level, Ratio ratio) {
  STD_TORCH_CHECK(level >= 0 && level <= static_cast<int64_t>(Level::kSequenceToken),
                  "level must be 0 to 2, got ", level);
  return ratio == Ratio::kGmpo ? Level::kSequence : static_cast<Level>(level);
}

}  // namespace fastrl
