// The logits argument: the address of each row, and the map from its values to exponents.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../../check.h"
#include "../isa/kernels.h"

namespace fastrl::cpu {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

inline LogitsType element_type(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kFloat;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kHalf;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(tensor.scalar_type()));
  }
}

// [B, T, V] with any batch strides; row = b * T + t.
class Logits {
 public:
  explicit Logits(const Tensor& logits) {
    check_cpu(logits, "logits");
    STD_TORCH_CHECK(logits.dim() == 3, "logits must have shape [B, T, V], got ",
                    shape_text(logits));
    STD_TORCH_CHECK(logits.size(2) <= 1 || logits.stride(2) == 1 || logits.numel() == 0,
                    "logits must have stride 1 along the vocabulary, got ", logits.stride(2));
    type_ = element_type(logits, "logits");
    size_ = type_ == kFloat ? 4 : 2;
    tokens_ = logits.size(1);
    rows_ = logits.size(0) * tokens_;
    vocabulary_ = logits.size(2);
    stride_b_ = logits.stride(0) * size_;
    stride_t_ = logits.stride(1) * size_;
    data_ = static_cast<const char*>(logits.const_data_ptr());
  }

  LogitsType type() const { return type_; }
  int64_t rows() const { return rows_; }
  int64_t vocabulary() const { return vocabulary_; }
  int64_t blocks() const { return (vocabulary_ + kBlock - 1) / kBlock; }
  int64_t element_size() const { return size_; }
  int64_t row_bytes() const { return vocabulary_ * size_; }

  const char* at(int64_t row, int64_t column) const {
    return data_ + row / tokens_ * stride_b_ + row % tokens_ * stride_t_ + column * size_;
  }
  // for a tensor that the caller may write to
  char* writable(int64_t row, int64_t column) const { return const_cast<char*>(at(row, column)); }

  float value(int64_t row, int64_t column) const {
    const char* x = at(row, column);
    if (type_ == kFloat) return read<float>(x);
    if (type_ == kBFloat16) return static_cast<float>(read<torch::headeronly::BFloat16>(x));
    return static_cast<float>(read<torch::headeronly::Half>(x));
  }
  void set(int64_t row, int64_t column, float value) const {
    char* x = writable(row, column);
    if (type_ == kFloat) return write(x, value);
    if (type_ == kBFloat16) return write(x, torch::headeronly::BFloat16(value));
    return write(x, torch::headeronly::Half(value));
  }

 private:
  template <typename T>
  static T read(const char* x) {
    T value;
    std::memcpy(&value, x, sizeof(T));
    return value;
  }
  template <typename T>
  static void write(char* x, T value) {
    std::memcpy(x, &value, sizeof(T));
  }

  const char* data_;
  int64_t tokens_, rows_, vocabulary_, stride_b_, stride_t_, size_;
  LogitsType type_;
};

// z = softcap(logit_scale * x) / temperature, with a temperature per row where there is a tensor.
class Scaling {
 public:
  Scaling(const std::optional<Tensor>& temperatures, double temperature, double logit_scale,
          double logit_softcap)
      : temperatures_(data_or_null<float>(temperatures)),
        temperature_(temperature),
        logit_scale_(logit_scale),
        logit_softcap_(logit_softcap) {}

  bool softcap() const { return logit_softcap_ > 0; }
  double temperature(int64_t row) const {
    return temperatures_ ? static_cast<double>(temperatures_[row]) : temperature_;
  }
  // dz/dv for v = x, or v = tanh(squash * x) with a softcap
  double gain(int64_t row) const {
    return (softcap() ? logit_softcap_ : logit_scale_) / temperature(row);
  }
  double raw_gain(int64_t row) const { return logit_scale_ / temperature(row); }  // dz/dx at x = 0
  LogitMap map(int64_t row) const { return {static_cast<float>(gain(row) * kLog2E), squash()}; }
  float squash() const {  // 0 without a softcap
    return softcap() ? static_cast<float>(logit_scale_ / logit_softcap_) : 0.0f;
  }

 private:
  const float* temperatures_;
  double temperature_, logit_scale_, logit_softcap_;
};

}  // namespace fastrl::cpu
