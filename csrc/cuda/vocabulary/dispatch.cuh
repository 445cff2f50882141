// Chooses the instance of a kernel for a dtype, an alignment and a softcap.
#pragma once

#include <type_traits>

#include "logits.cuh"

namespace fastrl::cuda {

// Calls f(T{}, aligned, softcap), the last two as std::bool_constant.
template <typename F>
Status dispatch(const LogitsParams& p, const RowGeometry& g, const F& f) {
  const bool aligned = rows_are_aligned(g, p.type);
  const auto with_type = [&](auto element) {
    const auto with_alignment = [&](auto aligned_constant) {
      if (p.logit_softcap > 0) return f(element, aligned_constant, std::true_type{});
      return f(element, aligned_constant, std::false_type{});
    };
    return aligned ? with_alignment(std::true_type{}) : with_alignment(std::false_type{});
  };
  switch (p.type) {
    case kFloat:
      return with_type(float{});
    case kBFloat16:
      return with_type(BFloat16{});
    case kHalf:
      return with_type(Half{});
  }
  return kInvalid;
}

constexpr int kVocabularyThreads = 256;

}  // namespace fastrl::cuda
