// Four tokens of the policy loss at a time: their inputs, their terms in the sums, their slopes.
#pragma once

#include <cstring>

#include "../../objectives.h"
#include "../device/block_sum.cuh"
#include "policy_loss.h"

namespace fastrl::cuda {

using FloatMath = ScalarMath<float>;
constexpr int kQuad = 4;  // tokens that a thread works on at a time

// One compensated step for four numbers, whose plain sum is as exact as the numbers.
__device__ __forceinline__ void add_quad(Sum* sum, const float (&x)[kQuad]) {
  sum->add((x[0] + x[1]) + (x[2] + x[3]));
}

struct TokenSums {
  Sum policy, weighted_kl, weighted_entropy, kl, kl_old, entropy, ratio;
  float ratio_max, ratio_min;  // valid if active > 0
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
static_assert(sizeof(TokenSums) == kTokenSumsBytes, "the operator allocates room for them");

struct CountedSum {
  Sum sum;
  uint32_t count;
  __device__ void add(const CountedSum& other) {
    sum.add(other.sum);
    count += other.count;
  }
};

// The mean log-ratio of a sequence, the slope that each of its tokens receives through it, and
// whether there is a single token, whose ratio is its own.
struct SharedRatio {
  float mean, slope;
  bool alone;
};

// A range of tokens to process; at the sequence levels it is one sequence.
struct TokenRange {
  int64_t begin, end, sequence;
};

// Four tokens from `first` on; only those in the range count. kWhole: all of them exist and lie on
// 16-byte boundaries. kOneSequence: the range is one sequence.
template <bool kWhole, bool kOneSequence>
struct Quad {
  const PolicyLossParams& p;
  const TokenRange range;
  int64_t first;
  uint32_t active;                              // a bit per token
  uint32_t sequence[kOneSequence ? 1 : kQuad];  // of each token, if some constant needs it
  float logprob[kQuad], advantage[kQuad], difference[kQuad];
  float weight[kQuad];  // in the policy term

  __device__ __forceinline__ Quad(const PolicyLossParams& params, const TokenRange& tokens,
                                  int64_t quad)
      : p(params), range(tokens), first(quad * kQuad), active(0) {
    uint32_t bytes = 0;
    if (kWhole) {
      bytes = load_element(reinterpret_cast<const uint32_t*>(p.mask + first));
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        if (first + k < p.sequences.tokens) bytes |= uint32_t{p.mask[first + k]} << (8 * k);
      }
    }
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      const bool inside = first + k >= range.begin && first + k < range.end;
      if (inside && (bytes >> (8 * k) & 0xff)) active |= 1u << k;
    }
    find_sequences();
    const LossConstants& c = p.constants;
    load(p.logprobs, logprob);
    load(c.advantages, advantage);
    load(c.weights, weight);
    if (c.policy_weights.values) {
      float factor[kQuad];
      load(c.policy_weights, factor);
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) weight[k] *= factor[k];
    }
    load(c.old_logprobs ? c.old_logprobs : p.logprobs, difference);
    // on policy the ratio is 1 by definition, but NaN stays NaN
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      difference[k] = difference_of<FloatMath>(logprob[k], difference[k]);
    }
  }
  __device__ __forceinline__ bool is_active(int k) const { return active >> k & 1; }

  __device__ __forceinline__ void find_sequences() {
    if constexpr (kOneSequence) {
      sequence[0] = static_cast<uint32_t>(range.sequence);
    } else if (p.by_sequence && first < range.end) {
      const int64_t last = p.sequences.count - 1;
      int64_t s = p.sequences.of(first);
      s = s < last ? s : last;
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        while (s < last && p.sequences.end(s) <= first + k) ++s;
        sequence[k] = static_cast<uint32_t>(s);
      }
    }
  }
  // Inactive tokens are 0 in all arithmetic.
  __device__ __forceinline__ void load(const float* values, float (&x)[kQuad]) const {
    if (kWhole) {
      const Vec16 loaded = load16(values + first);
      memcpy(x, &loaded, sizeof(x));
    }
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      if (!kWhole) x[k] = first + k < p.sequences.tokens ? values[first + k] : 0.0f;
      x[k] = is_active(k) ? x[k] : 0.0f;
    }
  }
  __device__ __forceinline__ void load(const Constant& constant, float (&x)[kQuad]) const {
    if (!constant.by_sequence) return load(constant.values, x);
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      x[k] = is_active(k) ? constant.values[sequence[kOneSequence ? 0 : k]] : 0.0f;
    }
  }
  // Writes only the tokens of the range: the others may belong to other blocks.
  __device__ __forceinline__ void store(float* values, const float (&x)[kQuad]) const {
    if (kWhole && first >= range.begin && first + kQuad <= range.end) {
      Vec16 stored;
      memcpy(&stored, x, sizeof(stored));
      store16_once(values + first, stored);
    } else {
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        if (first + k >= range.begin && first + k < range.end) values[first + k] = x[k];
      }
    }
  }
  // The KL to the reference, given the mean log-ratio of the sequence.
  __device__ __forceinline__ KlTerms<float> kl(int k, float ref_logprob, float mean) const {
    const Objective<float>& o = p.objective;
    return kl_terms<FloatMath>(o.kl_estimator, o.kl_gradient,
                               kl_difference<FloatMath>(ref_logprob, logprob[k]),
                               o.kl_by_token() ? difference[k] : mean, o.coefficients);
  }
};

// Calls `body` with every quad that holds tokens of the range, spread over the cluster.
template <int kThreads, bool kOneSequence, typename Body>
__device__ __forceinline__ void for_each_quad(const PolicyLossParams& p, const TokenRange& range,
                                              unsigned rank, unsigned ranks, const Body& body) {
  const int64_t last = (range.end + kQuad - 1) / kQuad;
  const int64_t whole = p.aligned ? p.sequences.tokens / kQuad : 0;
  const int64_t stride = int64_t{kThreads} * ranks;
  int64_t quad = range.begin / kQuad + int64_t{kThreads} * rank + thread_index();
  for (; quad < last && quad < whole; quad += stride) {
    body(Quad<true, kOneSequence>(p, range, quad));
  }
  for (; quad < last; quad += stride) body(Quad<false, kOneSequence>(p, range, quad));
}

// The terms of a token of a sequence with this mean log-ratio.
template <typename Q>
__device__ __forceinline__ ObjectiveTerms<float> shared_terms(const Q& q, int k, float mean) {
  const Objective<float>& o = q.p.objective;
  const Coefficients<float>& c = o.coefficients;
  if (o.surrogate != Surrogate::kGmpo) {
    return objective_terms<FloatMath>(o.surrogate, mean, q.advantage[k], q.logprob[k], c);
  }
  const float ratio = FloatMath::exp(mean), loss = -q.advantage[k] * ratio;
  const auto terms = gmpo_terms<FloatMath>(q.difference[k], q.advantage[k], c);
  return {loss, loss, terms.clip, mean, ratio};
}

// Loss, slopes and metrics of one quad.
template <bool kOneSequence, typename Q>
__device__ __forceinline__ void add_tokens(const Q& q, SharedRatio shared, TokenSums* sums) {
  const PolicyLossParams& p = q.p;
  const Objective<float>& o = p.objective;
  const Coefficients<float>& c = o.coefficients;
  const bool own_slope = o.level != Level::kSequence || !flows_through_ratio(o.surrogate);
  float slope[kQuad], x[kQuad], ratio[kQuad];
  FASTRL_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    const auto terms = kOneSequence ? shared_terms(q, k, shared.mean)
                                    : objective_terms<FloatMath>(o.surrogate, q.difference[k],
                                                                 q.advantage[k], q.logprob[k], c);
    slope[k] = kOneSequence ? shared.slope : 0.0f;
    if (own_slope) slope[k] += weighted<FloatMath>(q.weight[k], terms.slope);
    if (o.surrogate == Surrogate::kGmpo) {
      const bool unclipped = gmpo_terms<FloatMath>(q.difference[k], q.advantage[k], c).unclipped;
      slope[k] = unclipped ? slope[k] : 0.0f;
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
    x[k] = p.constants.old_logprobs ? FloatMath::expm1(log_ratio) - log_ratio : q.difference[k];
  }
  add_quad(&sums->kl_old, x);
  if (p.constants.ref_logprobs) {
    float weight[kQuad];
    q.load(p.constants.ref_logprobs, x);
    q.load(p.constants.kl_weights, weight);
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      const auto kl = q.kl(k, x[k], shared.mean);
      x[k] = q.is_active(k) ? kl.value : 0.0f;
      const bool own = o.level != Level::kSequence || o.kl_by_token() || shared.alone;
      const float kl_slope = own ? kl.own_slope : kl.slope;
      if (c.kl_coef != 0.0f) slope[k] += weight[k] * (c.kl_coef * kl_slope);
      weight[k] = q.is_active(k) ? weight[k] * kl.value : 0.0f;
    }
    add_quad(&sums->kl, x);
    if (c.kl_coef != 0.0f) add_quad(&sums->weighted_kl, weight);
  }
  float entropy_weight[kQuad] = {};
  if (c.entropy_coef != 0.0f) q.load(p.constants.entropy_weights, entropy_weight);
  if (p.entropy) q.load(p.entropy, x);
  float entropy_slope[kQuad], weighted_entropy[kQuad];
  FASTRL_UNROLL
  for (int k = 0; k < kQuad; ++k) {
    if (!p.entropy) x[k] = -q.logprob[k];
    weighted_entropy[k] = entropy_weight[k] * x[k];
    entropy_slope[k] = -c.entropy_coef * entropy_weight[k];
    slope[k] = q.is_active(k) ? token_slope<FloatMath>(q.logprob[k], slope[k]) : 0.0f;
    sums->zero_grad += q.is_active(k) && slope[k] == 0.0f && entropy_slope[k] == 0.0f;
  }
  add_quad(&sums->entropy, x);
  if (c.entropy_coef != 0.0f) add_quad(&sums->weighted_entropy, weighted_entropy);
  q.store(p.slope, slope);
  if (p.entropy_slope) q.store(p.entropy_slope, entropy_slope);
}

}  // namespace fastrl::cuda
