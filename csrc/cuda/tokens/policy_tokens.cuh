// Four tokens of the policy loss at a time: what they read, what they add to the sums, the slope.
#pragma once

#include <cstring>

#include "../device/block_sum.cuh"
#include "policy_loss.h"

namespace fastrl::cuda {

using FloatMath = ScalarMath<float>;
constexpr int kQuad = 4;  // tokens that a thread works on at a time

// A step of the sum: the plain sum of four is as exact as the four are.
__device__ __forceinline__ void add_quad(Sum* sum, const float (&x)[kQuad]) {
  sum->add((x[0] + x[1]) + (x[2] + x[3]));
}

struct TokenSums {
  Sum policy, weighted_kl, weighted_entropy, kl, kl_old, entropy, ratio;
  float ratio_max, ratio_min;  // meaningful where active > 0
  uint32_t active, clip_low, clip_high, zero_grad;

  __device__ void add_ratio_range(float highest, float lowest, bool first) {
    if (first || highest > ratio_max || highest != highest) ratio_max = highest;
    if (first || lowest < ratio_min || lowest != lowest) ratio_min = lowest;
  }
  __device__ void add(const TokenSums& other) {
    policy.add(other.policy);
    weighted_kl.add(other.weighted_kl);
    weighted_entropy.add(other.weighted_entropy);
    kl.add(other.kl);
    kl_old.add(other.kl_old);
    entropy.add(other.entropy);
    ratio.add(other.ratio);
    if (other.active) add_ratio_range(other.ratio_max, other.ratio_min, active == 0);
    active += other.active;
    clip_low += other.clip_low;
    clip_high += other.clip_high;
    zero_grad += other.zero_grad;
  }
};
static_assert(sizeof(TokenSums) == kPolicyPartBytes, "the operator allocates the parts");

struct CountedSum {
  Sum sum;
  uint32_t count;
  __device__ void add(const CountedSum& other) {
    sum.add(other.sum);
    count += other.count;
  }
};

// The ratio that the tokens of a sequence share, the part of the slope that each receives, and
// whether there is a single token, whose ratio is its own.
struct SharedRatio {
  float mean, slope;
  bool alone;
};

// Four tokens from `first` on. kWhole: all of them exist and lie on 16-byte boundaries.
template <bool kWhole>
struct Quad {
  const PolicyLossParams& p;
  int64_t first;
  uint32_t active;  // a bit per token
  float logprob[kQuad], advantage[kQuad], weight[kQuad], difference[kQuad];

  __device__ __forceinline__ Quad(const PolicyLossParams& params, int64_t begin, int64_t end,
                                  int64_t quad)
      : p(params), first(quad * kQuad), active(0) {
    uint32_t bytes = 0;
    if (kWhole) {
      bytes = load_element(reinterpret_cast<const uint32_t*>(p.mask + first));
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        if (first + k < p.tokens) bytes |= uint32_t{p.mask[first + k]} << (8 * k);
      }
    }
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      const bool inside = first + k >= begin && first + k < end;
      if (inside && (bytes >> (8 * k) & 0xff)) active |= 1u << k;
    }
    load(p.logprobs, logprob);
    load(p.advantages, advantage);
    load(p.weights, weight);
    load(p.old_logprobs ? p.old_logprobs : p.logprobs, difference);
    // on policy the ratio is 1 by definition, but NaN stays NaN
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      difference[k] = difference_of<FloatMath>(logprob[k], difference[k]);
    }
  }
  __device__ __forceinline__ bool is_active(int k) const { return active >> k & 1; }

  // What is not active enters all arithmetic as 0.
  __device__ __forceinline__ void load(const float* values, float (&x)[kQuad]) const {
    if (kWhole) {
      const Vec16 loaded = load16(values + first);
      memcpy(x, &loaded, sizeof(x));
    }
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      if (!kWhole) x[k] = first + k < p.tokens ? values[first + k] : 0.0f;
      x[k] = is_active(k) ? x[k] : 0.0f;
    }
  }
  // Writes the tokens from begin to end; only the others may be somebody else's.
  __device__ __forceinline__ void store_slope(const float (&slope)[kQuad], int64_t begin,
                                              int64_t end) const {
    if (kWhole && first >= begin && first + kQuad <= end) {
      Vec16 stored;
      memcpy(&stored, slope, sizeof(stored));
      store16_once(p.slope + first, stored);
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        if (first + k >= begin && first + k < end) p.slope[first + k] = slope[k];
      }
    }
  }
  __device__ __forceinline__ KlTerms<float> kl(int k, float ref_logprob, float policy) const {
    return kl_terms<FloatMath>(p.kl_estimator, p.kl_gradient,
                               difference_of<FloatMath>(ref_logprob, logprob[k]), policy,
                               p.coefficients);
  }
};

// Calls `body` with every quad that holds tokens of [begin, end), spread over the cluster.
template <int kThreads, typename Body>
__device__ __forceinline__ void for_each_quad(const PolicyLossParams& p, int64_t begin, int64_t end,
                                              unsigned rank, unsigned ranks, const Body& body) {
  const int64_t last = (end + kQuad - 1) / kQuad, whole = p.aligned ? p.tokens / kQuad : 0;
  const int64_t stride = int64_t{kThreads} * ranks;
  int64_t quad = begin / kQuad + int64_t{kThreads} * rank + thread_index();
  for (; quad < last && quad < whole; quad += stride) body(Quad<true>(p, begin, end, quad));
  for (; quad < last; quad += stride) body(Quad<false>(p, begin, end, quad));
}

// The terms of a token of a sequence with this mean log-ratio.
template <typename Q>
__device__ __forceinline__ ObjectiveTerms<float> shared_terms(const Q& q, int k, float mean) {
  const PolicyLossParams& p = q.p;
  if (p.ratio != Ratio::kGmpo) {
    return objective_terms<FloatMath>(p.ratio, mean, q.advantage[k], q.logprob[k], p.coefficients);
  }
  const float ratio = FloatMath::exp(mean), loss = -q.advantage[k] * ratio;
  const auto terms = gmpo_terms<FloatMath>(q.difference[k], q.advantage[k], p.coefficients);
  return {loss, loss, terms.clip, mean, ratio};
}

// Where the ratio is only a weight, the gradient flows through the token's own log-probability.
__device__ __forceinline__ bool moves_the_ratio(const PolicyLossParams& p) {
  return p.ratio != Ratio::kCispo && p.ratio != Ratio::kReinforce;
}

// Loss, slope and metrics of one quad. What is not active is 0 in all that is added.
template <bool kBySequence, typename Q>
__device__ __forceinline__ void add_tokens(const Q& q, int64_t begin, int64_t end,
                                           SharedRatio shared, TokenSums* sums) {
  const PolicyLossParams& p = q.p;
  const Coefficients<float>& c = p.coefficients;
  const bool own_slope = p.level != Level::kSequence || !moves_the_ratio(p);
  float slope[kQuad], x[kQuad], ratio[kQuad];
  FASTRL_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    const auto terms = kBySequence ? shared_terms(q, k, shared.mean)
                                   : objective_terms<FloatMath>(p.ratio, q.difference[k],
                                                                q.advantage[k], q.logprob[k], c);
    slope[k] = kBySequence ? shared.slope : 0.0f;
    if (own_slope) slope[k] += weighted<FloatMath>(q.weight[k], terms.slope);
    if (p.ratio == Ratio::kGmpo) {
      const bool moves = gmpo_terms<FloatMath>(q.difference[k], q.advantage[k], c).moves;
      slope[k] = moves ? slope[k] : 0.0f;
    }
    x[k] = q.is_active(k) ? weighted<FloatMath>(q.weight[k], terms.loss) : 0.0f;
    ratio[k] = q.is_active(k) ? terms.ratio : 0.0f;
    if (q.is_active(k)) sums->add_ratio_range(terms.ratio, terms.ratio, sums->active == 0);
    sums->active += q.is_active(k);
    sums->clip_low += q.is_active(k) && terms.clip < 0.0f;
    sums->clip_high += q.is_active(k) && terms.clip > 0.0f;
  }
  add_quad(&sums->policy, x);
  add_quad(&sums->ratio, ratio);
  FASTRL_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    const float log_ratio =
        clamp<FloatMath>(q.difference[k], c.lowest_log_ratio(), c.highest_log_ratio());
    // on policy the difference is 0 or NaN
    x[k] = p.old_logprobs ? FloatMath::expm1(log_ratio) - log_ratio : q.difference[k];
  }
  add_quad(&sums->kl_old, x);
  if (p.ref_logprobs) {
    float weight[kQuad];
    q.load(p.ref_logprobs, x);
    q.load(p.kl_weights, weight);
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      const auto kl = q.kl(k, x[k], kBySequence ? shared.mean : q.difference[k]);
      x[k] = q.is_active(k) ? kl.value : 0.0f;
      const bool own = p.level != Level::kSequence || shared.alone;
      const float moving = own ? kl.own_slope : kl.slope;
      if (c.kl_coef != 0.0f) slope[k] += weight[k] * (c.kl_coef * moving);
      weight[k] = q.is_active(k) ? weight[k] * kl.value : 0.0f;
    }
    add_quad(&sums->kl, x);
    if (c.kl_coef != 0.0f) add_quad(&sums->weighted_kl, weight);
  }
  float bonus[kQuad] = {};  // entropy_coef times its weight
  if (c.entropy_coef != 0.0f) q.load(p.entropy_weights, bonus);
  if (p.entropy) q.load(p.entropy, x);
  float of_entropy[kQuad];
  FASTRL_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    if (!p.entropy) x[k] = -q.logprob[k];
    of_entropy[k] = bonus[k] * x[k];
    slope[k] = q.is_active(k) ? token_slope<FloatMath>(q.logprob[k], slope[k]) : 0.0f;
    sums->zero_grad += q.is_active(k) && slope[k] == 0.0f && bonus[k] * c.entropy_coef == 0.0f;
  }
  add_quad(&sums->entropy, x);
  if (c.entropy_coef != 0.0f) add_quad(&sums->weighted_entropy, of_entropy);
  q.store_slope(slope, begin, end);
}

}  // namespace fastrl::cuda
