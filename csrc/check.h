// Checks whose messages name the argument, what was expected and what was given.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "contract.h"

namespace fastrl {

using torch::headeronly::ScalarType;

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

// For wrong values of a user's tensor. Torch 2.15 does not pass on the type of an exception, so the
// text marks it for `fastrl.library.called`, which raises a ValueError.
template <typename... Parts>
[[noreturn]] void raise_value_error(const Parts&... parts) {
  std::ostringstream text;
  text << "ValueError: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
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

// Element i of a tensor on the CPU, of any real dtype.
inline double element_value(const Tensor& tensor, int64_t i) {
  const auto at = [&](auto zero) {
    using T = decltype(zero);
    return static_cast<double>(static_cast<const T*>(tensor.const_data_ptr())[i]);
  };
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return at(double{});
    case ScalarType::Float:
      return at(float{});
    case ScalarType::Half:
      return static_cast<float>(
          static_cast<const torch::headeronly::Half*>(tensor.const_data_ptr())[i]);
    case ScalarType::BFloat16:
      return static_cast<float>(
          static_cast<const torch::headeronly::BFloat16*>(tensor.const_data_ptr())[i]);
    case ScalarType::Long:
      return at(int64_t{});
    case ScalarType::Int:
      return at(int32_t{});
    case ScalarType::Short:
      return at(int16_t{});
    case ScalarType::Char:
      return at(int8_t{});
    case ScalarType::Byte:
    case ScalarType::Bool:
      return at(uint8_t{});
    case ScalarType::UInt64:
      return at(uint64_t{});
    case ScalarType::UInt32:
      return at(uint32_t{});
    case ScalarType::UInt16:
      return at(uint16_t{});
    default:
      STD_TORCH_CHECK(false, "a real dtype is needed, got ",
                      torch::headeronly::toString(tensor.scalar_type()));
  }
}

// Element i of a tensor on the CPU, as Python prints it: a float with its point.
inline std::string element_text(const Tensor& tensor, int64_t i) {
  const double value = element_value(tensor, i);
  const auto type = tensor.scalar_type();
  const bool real = type == ScalarType::Double || type == ScalarType::Float ||
                    type == ScalarType::Half || type == ScalarType::BFloat16;
  if (!real) return std::to_string(static_cast<int64_t>(value));
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  const std::string text(digits, end);
  return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
}

// Rows of [B, T, V] that will be overwritten must not share an element.
inline void check_rows_apart(const Tensor& logits) {
  const int64_t batch = logits.size(0), tokens = logits.size(1), row = logits.size(2);
  const int64_t b = std::abs(logits.stride(0)), t = std::abs(logits.stride(1));
  const bool apart = (tokens <= 1 || t >= row) && (batch <= 1 || b >= row) &&
                     (tokens <= 1 || batch <= 1 || b >= t * tokens || t >= b * batch);
  const bool empty = batch * tokens == 0;
  STD_TORCH_CHECK(apart || empty, "logits must not overlap in memory to be overwritten");
}

// A new contiguous tensor on the device of `like`; its contents are arbitrary until written.
// (torch::stable::new_empty would go through the dispatcher.)
inline Tensor new_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         ScalarType dtype) {
  constexpr size_t kMostDims = 8;
  STD_TORCH_CHECK(sizes.size() <= kMostDims, "a tensor of at most 8 dimensions is expected");
  int64_t strides[kMostDims], stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides, type, device_type, device_index, &made));
  return Tensor(made);
}

inline Tensor empty_like_tokens(const Tensor& like, ScalarType dtype) {
  return new_tensor(like, like.sizes(), dtype);
}

// The enumerator with this number.
template <typename Kind>
Kind check_kind(int64_t number, const char* name) {
  constexpr int64_t kMost = static_cast<int64_t>(kLast<Kind>);
  STD_TORCH_CHECK(number >= 0 && number <= kMost, name, " must be 0 to ", kMost, ", got ", number);
  return static_cast<Kind>(number);
}

// The scalars in the order of the struct, which is the order of `Coefficients` in Python.
template <typename S>
Coefficients<S> check_coefficients(const std::vector<double>& values) {
  constexpr size_t kCount = sizeof(Coefficients<S>) / sizeof(S);
  STD_TORCH_CHECK(values.size() == kCount, "coefficients must hold ", kCount, " numbers, got ",
                  values.size());
  S scalars[kCount];
  for (size_t i = 0; i < kCount; ++i) scalars[i] = S(values[i]);
  Coefficients<S> coefficients;
  std::memcpy(&coefficients, scalars, sizeof(coefficients));
  return coefficients;
}

// gmpo is always at sequence level: its geometric mean runs over a sequence.
template <typename S>
Objective<S> check_objective(const ObjectiveArguments& in) {
  Objective<S> objective{check_kind<Surrogate>(in.surrogate, "surrogate"),
                         check_kind<Level>(in.level, "level"),
                         check_kind<KlEstimator>(in.kl_estimator, "kl_estimator"),
                         check_kind<KlGradient>(in.kl_gradient, "kl_gradient"),
                         check_kind<KlLevel>(in.kl_level, "kl_level"),
                         check_coefficients<S>(in.coefficients)};
  if (objective.surrogate == Surrogate::kGmpo) {
    objective.level = Level::kSequence;
    STD_TORCH_CHECK(objective.kl_gradient != KlGradient::kBiasCorrected,
                    "kl_gradient must not be bias-corrected with the geometric mean of gmpo");
  }
  return objective;
}

// The inputs [B, T] of a policy loss, besides its constants.
template <typename S>
void check_tokens(const Tensor& logprobs, const std::optional<Tensor>& entropy, const Tensor& mask,
                  const Objective<S>& objective) {
  STD_TORCH_CHECK(logprobs.dim() == 2, "logprobs must have shape [B, T], got ",
                  shape_text(logprobs));
  check_like(logprobs, logprobs, ScalarType::Float, "logprobs", "logprobs");
  check_like(mask, logprobs, ScalarType::Bool, "mask", "logprobs");
  check_like(entropy, logprobs, ScalarType::Float, "entropy", "logprobs");
  STD_TORCH_CHECK(entropy || objective.coefficients.entropy_coef == 0,
                  "entropy must be given when entropy_coef is not 0");
}

// A constant of the loss: float32, per sequence [S] or per token like `tokens` [B, T].
inline Constant check_constant(const Tensor& constant, const Tensor& tokens, int64_t sequences,
                               const char* name, const char* tokens_name) {
  if (constant.dim() != 1) {
    check_like(constant, tokens, ScalarType::Float, name, tokens_name);
    return {constant.const_data_ptr<float>(), false};
  }
  check_device(constant, tokens, name, tokens_name);
  check_dtype(constant, ScalarType::Float, name);
  STD_TORCH_CHECK(constant.size(0) == sequences && constant.is_contiguous(), name,
                  " must be contiguous of shape (", sequences, ",), one for each sequence, got ",
                  shape_text(constant));
  return {constant.const_data_ptr<float>(), true};
}

template <typename S>
LossConstants check_loss(const LossArguments& in, const Objective<S>& objective,
                         const Tensor& tokens, int64_t sequences, const char* tokens_name) {
  const auto constant = [&](const Tensor& tensor, const char* name) {
    return check_constant(tensor, tokens, sequences, name, tokens_name);
  };
  const auto optional = [&](const std::optional<Tensor>& tensor, const Constant& otherwise,
                            const char* name) {
    return tensor ? constant(*tensor, name) : otherwise;
  };
  check_like(in.old_logprobs, tokens, ScalarType::Float, "old_logprobs", tokens_name);
  check_like(in.ref_logprobs, tokens, ScalarType::Float, "ref_logprobs", tokens_name);
  STD_TORCH_CHECK(in.ref_logprobs || objective.coefficients.kl_coef == 0,
                  "ref_logprobs must be given when kl_coef is not 0");
  const Constant weights = constant(in.weights, "weights");
  return {constant(in.advantages, "advantages"),
          weights,
          optional(in.kl_weights, weights, "kl_weights"),
          optional(in.entropy_weights, weights, "entropy_weights"),
          optional(in.policy_weights, {nullptr, false}, "policy_weights"),
          data_or_null<float>(in.old_logprobs),
          data_or_null<float>(in.ref_logprobs)};
}

}  // namespace fastrl
