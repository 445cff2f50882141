// The scalar formulas of every surrogate and KL estimator, with explicit derivatives.
//
// `fastrl/reference/objectives.py` is the definition; the tests compare the two point by point.
// No function branches on values, and all take their arithmetic from `Math`, so that the same code
// runs on a float, a double or a vector of floats.
#pragma once

#include <cmath>

#include "contract.h"

namespace fastrl {

template <typename T>
struct ScalarMath {
  using Real = T;
  using Mask = bool;
  FASTRL_HD static T fill(T x) { return x; }
  FASTRL_HD static T exp(T x) { return std::exp(x); }
  FASTRL_HD static T expm1(T x) { return std::expm1(x); }
  FASTRL_HD static T abs(T x) { return std::fabs(x); }
  FASTRL_HD static T where(bool mask, T yes, T no) { return mask ? yes : no; }
};

// loss f; slope df/dlog_ratio (df/dlogprob where the surrogate uses it); clip -1, 0 or +1;
// log_ratio and ratio after saturation.
template <typename T>
struct ObjectiveTerms {
  T loss, slope, clip, log_ratio, ratio;
};

// slope: d value / d logprob at this ratio; ratio_slope: d value / d log_ratio; own_slope: their
// sum, for a token that does not share its ratio.
template <typename T>
struct KlTerms {
  T value, slope, ratio_slope, own_slope;
};

// Clamp that propagates NaN.
template <typename Math, typename T = typename Math::Real>
FASTRL_HD T clamp(T x, T low, T high) {
  const T raised = Math::where(x < low, low, x);
  return Math::where(raised > high, high, raised);
}

// The difference of log-probabilities, and 0 for equal infinities: a token that both policies
// exclude.
template <typename Math, typename T = typename Math::Real>
FASTRL_HD T difference_of(T logprob, T other) {
  return Math::where(logprob == other, T{}, logprob - other);
}

// False for NaN.
template <typename Math, typename T = typename Math::Real>
FASTRL_HD typename Math::Mask is_infinite(T x) {
  const T rest = x - x;  // NaN where x is not finite
  return (rest != rest) & (x == x);
}

// ref_logprob - logprob in a KL, and 0 for an infinite logprob, which is a constant.
template <typename Math, typename T = typename Math::Real>
FASTRL_HD T kl_difference(T ref_logprob, T logprob) {
  const auto constant = is_infinite<Math>(logprob) & (ref_logprob == ref_logprob);
  return Math::where(constant, T{}, ref_logprob - logprob);
}

// dL/dlogprob of a token: an infinite log-probability is a constant, but NaN reaches the gradient.
template <typename Math, typename T = typename Math::Real>
FASTRL_HD T token_slope(T logprob, T slope) {
  return Math::where(is_infinite<Math>(logprob) & (slope == slope), T{}, slope);
}

// weight * value; 0 where the weight is 0, even if the value is infinite.
template <typename Math, typename T = typename Math::Real>
FASTRL_HD T weighted(T weight, T value) {
  return Math::where((weight == T{}) & (value == value), T{}, weight * value);
}

// The clipped token log-ratio whose mean over the sequence GMPO exponentiates.
template <typename T, typename Mask>
struct GmpoTerms {
  T log_ratio, clip;
  Mask unclipped;  // the gradient flows only through these tokens
};

template <typename Math, typename S, typename T = typename Math::Real>
FASTRL_HD GmpoTerms<T, typename Math::Mask> gmpo_terms(T difference, T advantage,
                                                       const Coefficients<S>& c) {
  const T zero = Math::fill(S(0)), one = Math::fill(S(1));
  const T lowest = Math::fill(c.lowest_log_ratio()), highest = Math::fill(c.highest_log_ratio());
  const T low = Math::fill(-c.clip_low), high = Math::fill(c.clip_high);
  const T log_ratio = clamp<Math>(difference, lowest, highest);
  const auto rises = advantage >= zero, falls = advantage < zero;
  const auto above = rises & (log_ratio > high), below = falls & (log_ratio < low);
  const T clip = Math::where(above & (advantage > zero), one, Math::where(below, -one, zero));
  const auto inside = (difference >= lowest) & (difference <= highest);
  const typename Math::Mask unclipped =
      (inside & ((rises & (log_ratio <= high)) | (falls & (log_ratio >= low)))) |
      (difference != difference) | (advantage != advantage);
  return {Math::where(above, high, Math::where(below, low, log_ratio)), clip, unclipped};
}

// Whether the gradient flows through the ratio. Where the ratio is only a weight, it flows through
// the token's own log-probability.
FASTRL_HD constexpr bool flows_through_ratio(Surrogate surrogate) {
  return surrogate != Surrogate::kCispo && surrogate != Surrogate::kReinforce;
}

// `difference` is logprob - old_logprob of the token, or its mean over the sequence.
template <typename Math, typename S, typename T = typename Math::Real>
FASTRL_HD ObjectiveTerms<T> objective_terms(Surrogate kind, T difference, T advantage, T logprob,
                                            const Coefficients<S>& c) {
  const T zero = Math::fill(S(0)), one = Math::fill(S(1));
  const T lowest = Math::fill(c.lowest_log_ratio()), highest = Math::fill(c.highest_log_ratio());
  const T log_ratio = clamp<Math>(difference, lowest, highest);
  const T ratio = Math::exp(log_ratio);
  const auto in_range = (difference >= lowest) & (difference <= highest);
  const auto rises = advantage > zero, falls = advantage < zero;
  T loss = zero, slope = zero, clip = zero;

  if (kind == Surrogate::kPpoClip) {
    const T low = Math::fill(S(1) - c.clip_low), high = Math::fill(S(1) + c.clip_high);
    const T delta = Math::fill(c.delta);
    const T free = Math::where(ratio > delta, delta, ratio) * advantage;
    const T bounded = clamp<Math>(ratio, low, high) * advantage;
    const auto clipped = bounded < free;
    const auto capped = (ratio > delta) & (free <= bounded);
    loss = -Math::where(clipped, bounded, free);
    slope = Math::where(clipped | capped, zero, -ratio * advantage);
    clip = Math::where((clipped & rises) | (capped & (rises | falls)), one,
                       Math::where(clipped & falls, -one, zero));
    if (c.dual_clip < S(HUGE_VAL)) {
      const T ceiling = -Math::fill(c.dual_clip) * advantage;
      const auto dual = falls & (loss > ceiling);
      loss = Math::where(dual, ceiling, loss);
      slope = Math::where(dual, zero, slope);
      clip = Math::where(dual, one, clip);
    }
    slope = Math::where(in_range, slope, zero);
  } else if (kind == Surrogate::kCispo) {
    const T low = Math::fill(S(1) - c.clip_low), high = Math::fill(S(1) + c.clip_high);
    slope = -clamp<Math>(ratio, low, high) * advantage;  // the weight is detached
    loss = weighted<Math>(slope, logprob);
    clip = Math::where((ratio > high) & (rises | falls), one,
                       Math::where((ratio < low) & (rises | falls), -one, zero));
  } else if (kind == Surrogate::kSapo) {
    const T tau =
        Math::where(rises, Math::fill(c.sapo_temperature_pos), Math::fill(c.sapo_temperature_neg));
    const T four = Math::fill(S(4));
    // beyond this the gate is 0 in floats, and its slope would be 0 times infinity
    const T steep = Math::fill(S(85)), depth = -tau * Math::expm1(log_ratio);
    const T decay = Math::exp(Math::where(depth > steep, steep, depth));
    const T gate = one / (one + decay);
    loss = -four / tau * gate * advantage;
    slope = Math::where(in_range, -four * gate * (decay * gate) * ratio * advantage, zero);
  } else if (kind == Surrogate::kGmpo) {
    // The geometric mean of a single token; over a sequence the caller averages `gmpo_terms`.
    const auto terms = gmpo_terms<Math>(difference, advantage, c);
    loss = -advantage * Math::exp(terms.log_ratio);
    slope = Math::where(terms.unclipped, loss, zero);
    clip = terms.clip;
  } else {
    slope = -advantage;
    loss = weighted<Math>(slope, logprob);
  }
  // Comparisons with NaN choose a flat branch: a NaN token must not look like a clipped one.
  slope = Math::where(loss == loss, slope, loss);
  return {loss, slope, clip, log_ratio, ratio};
}

// `difference` is ref_logprob - logprob; `policy_difference` is the log-ratio of the bias-corrected
// gradient, which alone uses it.
template <typename Math, typename S, typename T = typename Math::Real>
FASTRL_HD KlTerms<T> kl_terms(KlEstimator estimator, KlGradient gradient, T difference,
                              T policy_difference, const Coefficients<S>& c) {
  const bool corrected = gradient == KlGradient::kBiasCorrected;
  // a product of two exponentials fits into a float if each exponent is clamped to half the range
  const S range = corrected ? S(kMaxLogRatio / 2) : S(kMaxLogRatio);
  const T zero = Math::fill(S(0)), one = Math::fill(S(1)), limit = Math::fill(range);
  const T x = clamp<Math>(difference, -limit, limit);
  const auto saturated = Math::abs(difference) > limit;
  T value, slope;
  if (estimator == KlEstimator::kK1) {
    value = -x;
    slope = one;
  } else if (estimator == KlEstimator::kK2) {
    value = Math::fill(S(0.5)) * x * x;
    slope = -x;
  } else if (estimator == KlEstimator::kK3) {
    const T growth = Math::expm1(x);
    value = growth - x;
    slope = -growth;
  } else {
    value = Math::where(x < zero, -x, x);
    slope = Math::where(x < zero, one, Math::where(x > zero, -one, zero));
  }
  const T bound = Math::fill(c.kl_clamp);
  const auto bounded = Math::abs(value) > bound;
  slope = Math::where(saturated | bounded, zero, slope);
  value = clamp<Math>(value, -bound, bound);
  T ratio_slope = zero, own_slope = slope;
  if (gradient == KlGradient::kStraightThrough) {
    own_slope = slope = Math::where(saturated, zero, -x);  // the slope of k2
  } else if (corrected) {
    const T lowest = Math::fill(c.lowest_log_ratio(range));
    const T highest = Math::fill(c.highest_log_ratio(range));
    const T ratio = Math::exp(clamp<Math>(policy_difference, lowest, highest));
    // where one factor is constant, the slope of the other may have the wrong sign, or any size
    const auto held = bounded | (policy_difference < lowest) | (policy_difference > highest);
    value = ratio * value;
    slope = Math::where(held, zero, ratio * slope);
    ratio_slope = Math::where(held | saturated, zero, value);
    own_slope = slope + ratio_slope;
    // for k3 both are of size e^x and cancel: their sum in closed form, which does not overflow
    if (estimator == KlEstimator::kK3) {
      const auto far = Math::abs(difference) > Math::fill(S(kMaxLogRatio));
      own_slope = Math::where(held | far, zero, -difference * ratio);
    }
  }
  return {value, Math::where(value == value, slope, value), ratio_slope,
          Math::where(value == value, own_slope, value)};
}

}  // namespace fastrl
