// The objective of one token, inside the kernels that read its logits.
#pragma once

#include "../objectives.h"
#include "row_gradient.cuh"

namespace fastrl::cuda {

struct LogitsPolicyLossCall {
  LogitsPolicyLossParams p;
  RowGeometry rows;
  Scaling scaling;
};

// What a row is told beside its logits, as words that as many threads fetch, one each.
struct RowInputs {
  int active, token;  // token: -1 where there is none such
  float temperature, advantage, weight, kl_weight, entropy_weight, old_logprob, ref_logprob;
};
constexpr int kRowInputs = sizeof(RowInputs) / sizeof(uint32_t);

__device__ __forceinline__ uint32_t fetch_input(const LogitsPolicyLossCall& call, int which,
                                                unsigned row) {
  const LogitsPolicyLossParams& p = call.p;
  const float* values = nullptr;
  if (which == 0) return p.in.active[row];
  if (which == 1) {
    const int64_t token = p.in.token_ids[row];
    return static_cast<uint32_t>(token >= 0 && token < call.rows.vocabulary ? token : -1);
  }
  if (which == 2) values = p.in.temperatures;
  if (which == 3) values = p.advantages;
  if (which == 4) values = p.weights;
  if (which == 5) values = p.kl_weights ? p.kl_weights : p.weights;
  if (which == 6) values = p.entropy_weights ? p.entropy_weights : p.weights;
  if (which == 7) values = p.old_logprobs;
  if (which == 8) values = p.ref_logprobs;
  return values ? float_to_bits(values[row]) : 0;
}

__device__ __forceinline__ RowFlow row_flow(const LogitsPolicyLossParams& p, const RowInputs& in,
                                            float logprob) {
  using Math = ScalarMath<float>;
  const Coefficients<float>& c = p.coefficients;
  // on policy the ratio is 1 by definition, but NaN stays NaN
  const float on_policy = logprob == logprob ? 0.0f : logprob;
  const float difference = p.old_logprobs ? logprob - in.old_logprob : on_policy;
  float slope =
      in.weight * objective_terms<Math>(p.ratio, difference, in.advantage, logprob, c).slope;
  if (c.kl_coef != 0) {
    const auto kl =
        kl_terms<Math>(p.kl_estimator, p.kl_gradient, in.ref_logprob - logprob, difference, c);
    slope += c.kl_coef * in.kl_weight * (kl.slope + kl.ratio_slope);
  }
  return {slope, 0.0f, -c.entropy_coef * in.entropy_weight};
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
