// The objective of one token, inside the kernels that read its logits.
#pragma once

#include "../../objectives.h"
#include "row_gradient.cuh"

namespace fastrl::cuda {

struct LogitsPolicyLossCall {
  LogitsPolicyLossParams p;
  RowGeometry rows;
  Scaling scaling;
};

// What a row is told beside its logits, as words: as many threads fetch one each.
struct RowInputs {
  enum {
    kActive,
    kToken,
    kTemperature,
    kAdvantage,
    kWeight,
    kKlWeight,
    kEntropyWeight,
    kOld,
    kRef
  };
  static constexpr int kWords = kRef + 1;
  uint32_t word[kWords];

  __device__ __forceinline__ bool active() const { return word[kActive]; }
  __device__ __forceinline__ int token() const { return static_cast<int>(word[kToken]); }  // or -1
  __device__ __forceinline__ float value(int which) const { return bits_to_float(word[which]); }
};

__device__ __forceinline__ uint32_t fetch_input(const LogitsPolicyLossCall& call, int which,
                                                unsigned row) {
  const LogitsPolicyLossParams& p = call.p;
  const float* values = nullptr;
  if (which == RowInputs::kActive) return p.in.active[row];
  if (which == RowInputs::kToken) {
    const int64_t token = p.in.token_ids[row];
    return static_cast<uint32_t>(token >= 0 && token < call.rows.vocabulary ? token : -1);
  }
  if (which == RowInputs::kTemperature) values = p.in.temperatures;
  if (which == RowInputs::kAdvantage) values = p.advantages;
  if (which == RowInputs::kWeight) values = p.weights;
  if (which == RowInputs::kKlWeight) values = p.kl_weights ? p.kl_weights : p.weights;
  if (which == RowInputs::kEntropyWeight) {
    values = p.entropy_weights ? p.entropy_weights : p.weights;
  }
  if (which == RowInputs::kOld) values = p.old_logprobs;
  if (which == RowInputs::kRef) values = p.ref_logprobs;
  return values ? float_to_bits(values[row]) : 0;
}

__device__ __forceinline__ RowFlow row_flow(const LogitsPolicyLossParams& p, const RowInputs& in,
                                            float logprob) {
  using Math = ScalarMath<float>;
  const Coefficients<float>& c = p.coefficients;
  // on policy the ratio is 1 by definition, but NaN stays NaN
  const float old = p.old_logprobs ? in.value(RowInputs::kOld) : logprob;
  const float difference = difference_of<Math>(logprob, old);
  const float advantage = in.value(RowInputs::kAdvantage);
  const auto terms = objective_terms<Math>(p.ratio, difference, advantage, logprob, c);
  float slope = weighted<Math>(in.value(RowInputs::kWeight), terms.slope);
  if (c.kl_coef != 0) {
    const float from_ref = difference_of<Math>(in.value(RowInputs::kRef), logprob);
    const auto kl = kl_terms<Math>(p.kl_estimator, p.kl_gradient, from_ref, difference, c);
    slope += c.kl_coef * in.value(RowInputs::kKlWeight) * kl.own_slope;
  }
  return {token_slope<Math>(logprob, slope), 0.0f,
          -c.entropy_coef * in.value(RowInputs::kEntropyWeight)};
}

// From a row's sums to what its gradient is made of; all zero where it is.
struct RowPlan {
  GradientTerms terms;
  bool zero;
  float logprob, entropy;
};

template <bool kSoftcap>
__device__ __forceinline__ RowPlan plan_row(const LogitsPolicyLossParams& p, const RowInputs& in,
                                            const RowSums& sums, float token,
                                            const Exponents<kSoftcap>& exponents) {
  const RowStats stats = finish(sums, token, exponents);
  const RowFlow flow = row_flow(p, in, stats.logprob);
  RowPlan plan;
  plan.zero = flow.logprob == 0 && flow.entropy == 0;
  plan.terms = gradient_terms(stats.max, stats.log_sum, stats.entropy, flow, exponents);
  plan.terms.token_gradient =
      token_gradient<kSoftcap>(token, stats.logprob, stats.entropy, flow, exponents.map);
  plan.logprob = stats.logprob;
  plan.entropy = stats.entropy;
  return plan;
}

}  // namespace fastrl::cuda
