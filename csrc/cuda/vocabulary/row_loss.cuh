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

// The inputs that accompany a row of logits, as words, each fetched by one thread. They are stored
// as they are in memory and interpreted where they are needed, so no thread waits for its fetch.
struct RowInputs {
  enum Name {
    kTokenLow,
    kTokenHigh,
    kMaskLow,
    kMaskHigh,
    kTemperature,
    kAdvantage,
    kWeight,
    kPolicyWeight,
    kKlWeight,
    kEntropyWeight,
    kOldLogprob,
    kRefLogprob,
    kWords
  };
  uint32_t word[kWords];

  __device__ __forceinline__ int64_t token_id() const { return join(kTokenLow); }
  __device__ __forceinline__ bool active(const LogitsParams& p) const {
    const int unused = 64 - 8 * p.mask.element_bytes;
    const bool masked = p.mask.values && join(kMaskLow) << (unused + p.mask.is_float) == 0;
    return !masked & (token_id() != p.ignore_index);
  }
  // The id, or -1 where it is outside the vocabulary.
  __device__ __forceinline__ int token(const RowGeometry& rows) const {
    const int64_t id = token_id();
    return static_cast<int>(id >= 0 && id < rows.vocabulary ? id : -1);
  }
  __device__ __forceinline__ float value(Name name) const { return bits_to_float(word[name]); }

 private:
  __device__ __forceinline__ int64_t join(int low) const {
    return static_cast<int64_t>(uint64_t{word[low + 1]} << 32 | word[low]);
  }
};

// The element of this many bytes at an address, or the first four bytes of a longer one.
__device__ __forceinline__ uint32_t load_word(const unsigned char* at, int bytes) {
  if (bytes == 1) return *at;
  if (bytes == 2) return *reinterpret_cast<const uint16_t*>(at);
  return *reinterpret_cast<const uint32_t*>(at);
}

// `sequence`: that of the row, or the number of sequences if cu_seqlens end before it.
__device__ __forceinline__ uint32_t fetch_input(const LogitsPolicyLossCall& call, int name,
                                                unsigned row, uint32_t sequence) {
  const LogitsPolicyLossParams& p = call.p;
  const LossConstants& c = p.constants;
  if (name <= RowInputs::kMaskHigh) {
    const bool of_mask = name >= RowInputs::kMaskLow;
    const int bytes = of_mask ? p.in.mask.element_bytes : 8;
    const auto values =
        static_cast<const unsigned char*>(of_mask ? p.in.mask.values : p.in.token_ids);
    const int half = of_mask ? name - RowInputs::kMaskLow : name;
    if (!values || 4 * half >= bytes) return 0;
    return load_word(values + static_cast<int64_t>(row) * bytes + 4 * half, bytes);
  }
  Constant input{nullptr, false};
  if (name == RowInputs::kTemperature) input.values = p.in.temperatures;
  if (name == RowInputs::kAdvantage) input = c.advantages;
  if (name == RowInputs::kWeight) input = c.weights;
  if (name == RowInputs::kPolicyWeight) input = c.policy_weights;
  if (name == RowInputs::kKlWeight) input = c.kl_weights;
  if (name == RowInputs::kEntropyWeight) input = c.entropy_weights;
  if (name == RowInputs::kOldLogprob) input.values = c.old_logprobs;
  if (name == RowInputs::kRefLogprob) input.values = c.ref_logprobs;
  if (!input.values) return 0;
  int64_t place = row;
  if (input.by_sequence) {
    place = sequence;
    if (place == p.sequences.count) --place;  // cu_seqlens end too early
  }
  return float_to_bits(input.values[place]);
}

__device__ __forceinline__ RowFlow row_flow(const LogitsPolicyLossParams& p, const RowInputs& in,
                                            float logprob) {
  using Math = ScalarMath<float>;
  const Objective<float>& o = p.objective;
  const Coefficients<float>& c = o.coefficients;
  // on policy the ratio is 1 by definition, but NaN stays NaN
  const float old = p.constants.old_logprobs ? in.value(RowInputs::kOldLogprob) : logprob;
  const float difference = difference_of<Math>(logprob, old);
  const float advantage = in.value(RowInputs::kAdvantage);
  const auto terms = objective_terms<Math>(o.surrogate, difference, advantage, logprob, c);
  float weight = in.value(RowInputs::kWeight);
  if (p.constants.policy_weights.values) weight *= in.value(RowInputs::kPolicyWeight);
  float slope = weighted<Math>(weight, terms.slope);
  if (c.kl_coef != 0) {
    const float from_ref = kl_difference<Math>(in.value(RowInputs::kRefLogprob), logprob);
    const auto kl = kl_terms<Math>(o.kl_estimator, o.kl_gradient, from_ref, difference, c);
    slope += c.kl_coef * in.value(RowInputs::kKlWeight) * kl.own_slope;
  }
  return {token_slope<Math>(logprob, slope), 0.0f,
          -c.entropy_coef * in.value(RowInputs::kEntropyWeight)};
}

// The values that follow from the sums of a row: its results, and the terms of its gradient.
struct RowOutcome {
  GradientTerms terms;
  bool zero;  // the whole gradient is
  float logprob, entropy;
};

template <bool kSoftcap>
__device__ __forceinline__ RowOutcome outcome_of(const LogitsPolicyLossParams& p,
                                                 const RowInputs& in, const RowSums& sums,
                                                 float token, bool known,
                                                 const Exponents<kSoftcap>& exponents) {
  const RowStats stats = finish(sums, token, known, exponents);
  const RowFlow flow = row_flow(p, in, stats.logprobs);
  RowOutcome outcome;
  outcome.zero = flow.logprob == 0 && flow.entropy == 0;
  outcome.terms = gradient_terms(stats.row_max, stats.log_sum, stats.entropy, flow, exponents);
  outcome.terms.token_gradient =
      token_gradient<kSoftcap>(token, stats.logprobs, stats.entropy, flow, exponents.map);
  outcome.logprob = stats.logprobs;
  outcome.entropy = stats.entropy;
  return outcome;
}

}  // namespace fastrl::cuda
