// A mask from the caller: 0 and 1 of any dtype.
#pragma once

#include "../check.h"

namespace fastrl::cpu {

// Elements are compared by their bits: each dtype has one pattern for 1, and two for 0 if signed.
class Flags {
  template <typename Word, typename F>
  auto call(const F& f) const {
    const Word* words = reinterpret_cast<const Word*>(data_);
    return f(words, static_cast<Word>(one_), static_cast<Word>(minus_zero_));
  }

 public:
  explicit Flags(const Tensor& mask)
      : data_(static_cast<const char*>(mask.const_data_ptr())), size_(mask.element_size()) {
    switch (mask.scalar_type()) {
      case ScalarType::Half:
        one_ = 0x3c00, minus_zero_ = 0x8000;
        break;
      case ScalarType::BFloat16:
        one_ = 0x3f80, minus_zero_ = 0x8000;
        break;
      case ScalarType::Float:
        one_ = 0x3f800000, minus_zero_ = 0x80000000;
        break;
      case ScalarType::Double:
        one_ = 0x3ff0000000000000, minus_zero_ = 0x8000000000000000;
        break;
      default:
        break;
    }
  }

  // Calls f(words, one, minus_zero), the elements as unsigned integers of their size.
  template <typename F>
  auto visit(const F& f) const {
    if (size_ == 1) return call<uint8_t>(f);
    if (size_ == 2) return call<uint16_t>(f);
    if (size_ == 4) return call<uint32_t>(f);
    return call<uint64_t>(f);
  }

  bool operator[](int64_t i) const {
    return visit(
        [i](auto words, auto, auto minus_zero) { return words[i] != 0 && words[i] != minus_zero; });
  }

 private:
  const char* data_;
  int64_t size_;
  uint64_t one_ = 1, minus_zero_ = 0;
};

// Raises an error if an element of the mask is neither 0 nor 1.
inline void check_flags(const Tensor& mask) {
  if (mask.scalar_type() == ScalarType::Bool) return;
  const int64_t count = mask.numel();
  const int64_t bad = Flags(mask).visit([&](auto words, auto one, auto minus_zero) {
    int64_t others = 0;
    for (int64_t i = 0; i < count; ++i) {
      others += (words[i] != one) & (words[i] != 0) & (words[i] != minus_zero);
    }
    for (int64_t i = 0; others && i < count; ++i) {
      if (words[i] != one && words[i] != 0 && words[i] != minus_zero) return i;
    }
    return int64_t{-1};
  });
  if (bad >= 0) {
    raise_value_error("mask must be bool, integer or float 0/1, got ", element_text(mask, bad));
  }
}

}  // namespace fastrl::cpu
