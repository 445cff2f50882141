// Chooses the instance of a kernel for the dtypes, an alignment and a softcap.
#pragma once

#include <type_traits>

#include "logits.cuh"

namespace fastrl::cuda {

// Calls f(T{}).
template <typename F>
Status with_element(LogitsType type, const F& f) {
  switch (type) {
    case kFloat:
      return f(float{});
    case kBFloat16:
      return f(BFloat16{});
    case kHalf:
      return f(Half{});
  }
  return kInvalid;
}

// Calls f(T{}, aligned, softcap), the last two as std::bool_constant.
template <typename F>
Status dispatch(const LogitsParams& p, const RowGeometry& g, const F& f) {
  return with_element(p.type, [&](auto element) {
    const auto with_alignment = [&](auto aligned_constant) {
      if (p.logit_softcap > 0) return f(element, aligned_constant, std::true_type{});
      return f(element, aligned_constant, std::false_type{});
    };
    return g.aligned ? with_alignment(std::true_type{}) : with_alignment(std::false_type{});
  });
}

// Calls f(logit, gradient, aligned, softcap), the first two being zeros of the two dtypes.
template <typename F>
Status dispatch(const LogitsParams& p, const GradientParams& grad, const RowGeometry& g,
                const F& f) {
  if (is_narrow(p, grad)) {
    return dispatch(p, g, [&](auto element, auto aligned, auto softcap) {
      if constexpr (std::is_same_v<decltype(element), float>) {
        return f(element, BFloat16{}, aligned, softcap);
      }
      return kInvalid;
    });
  }
  if (grad.type != p.type) return kInvalid;
  return dispatch(p, g, [&](auto element, auto aligned, auto softcap) {
    return f(element, element, aligned, softcap);
  });
}

constexpr int kVocabularyThreads = 256;

}  // namespace fastrl::cuda
