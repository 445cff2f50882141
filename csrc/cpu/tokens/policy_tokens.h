// The policy loss of vectors of tokens: the functions of objectives.h on VectorMath.
// Included by isa.h only, inside the namespace of one instruction set.

struct VectorMath {
  using Real = vfloat;
  using Mask = vint;
  FASTRL_INLINE static vfloat fill(float x) { return vfloat{} + x; }
  FASTRL_INLINE static vfloat exp(vfloat x) { return exponential(x).value; }
  FASTRL_INLINE static vfloat expm1(vfloat x) { return exponential(x).minus_one; }
  FASTRL_INLINE static vfloat abs(vfloat x) { return FASTRL_ISA::where(x < 0.0f, -x, x); }
  FASTRL_INLINE static vfloat where(vint mask, vfloat yes, vfloat no) {
    return FASTRL_ISA::where(mask, yes, no);
  }
};
using Terms = ObjectiveTerms<vfloat>;

// Sums of floats in double, in two halves of a vector.
struct DoubleSum {
  typedef float vhalf __attribute__((vector_size(kVecBytes / 2)));
  typedef double vdouble __attribute__((vector_size(kVecBytes)));
  vdouble low{}, high{};

  FASTRL_INLINE void add(vfloat x) {
    vhalf halves[2];
    __builtin_memcpy(halves, &x, kVecBytes);
    low += __builtin_convertvector(halves[0], vdouble);
    high += __builtin_convertvector(halves[1], vdouble);
  }
  FASTRL_INLINE double total() const {
    double total = 0;
    for (int i = 0; i < kLanes / 2; ++i) total += low[i] + high[i];
    return total;
  }
};
FASTRL_INLINE int64_t count_of(vint negative_ones) {
  int64_t count = 0;
  for (int i = 0; i < kLanes; ++i) count -= negative_ones[i];
  return count;
}

// A constant of the loss over a segment: the same for all of its tokens, or one value each.
struct SegmentConstant {
  const float* values;  // null: all are `same`
  vfloat same;

  FASTRL_INLINE SegmentConstant(const Constant& constant, int64_t sequence)
      : values(constant.by_sequence ? nullptr : constant.values),
        same(constant.by_sequence ? fill(constant.values[sequence]) : vfloat{}) {}
};

// The inputs over one segment.
struct SegmentInputs {
  const TokenInputs& in;
  int64_t end;
  SegmentConstant advantages, weights, kl_weights, entropy_weights, policy_weights;

  FASTRL_INLINE SegmentInputs(const TokenInputs& inputs, const Segment& segment)
      : in(inputs),
        end(segment.end),
        advantages(inputs.constants.advantages, segment.sequence),
        weights(inputs.constants.weights, segment.sequence),
        kl_weights(inputs.constants.kl_weights, segment.sequence),
        entropy_weights(inputs.constants.entropy_weights, segment.sequence),
        policy_weights(inputs.constants.policy_weights, segment.sequence) {}
};

// Up to a vector of tokens from i on; inactive tokens are 0 in every input.
struct Tokens {
  const SegmentInputs& segment;
  const TokenInputs& in;
  int64_t i, n;
  vint active;
  vfloat logprob, advantage, weight, difference;

  FASTRL_INLINE Tokens(const SegmentInputs& inputs, int64_t first)
      : segment(inputs),
        in(inputs.in),
        i(first),
        n(inputs.end - first < kLanes ? inputs.end - first : kLanes) {
    typedef uint8_t vbytes __attribute__((vector_size(kLanes)));
    vbytes mask{};
    if (n == kLanes) {
      __builtin_memcpy(&mask, in.mask + i, kLanes);
    } else {
      __builtin_memcpy(&mask, in.mask + i, n);
    }
    active = __builtin_convertvector(mask, vint) != 0;
    logprob = load(in.logprobs);
    advantage = load(segment.advantages);
    weight = load(segment.weights);
    if (in.constants.policy_weights.values) weight *= load(segment.policy_weights);
    // on policy the ratio is 1 by definition, but NaN stays NaN
    const float* old = in.constants.old_logprobs;
    difference = difference_of<VectorMath>(logprob, old ? load(old) : logprob);
  }
  FASTRL_INLINE vfloat load(const float* values) const {
    vfloat x{};
    if (n == kLanes) {
      __builtin_memcpy(&x, values + i, kVecBytes);
    } else {
      __builtin_memcpy(&x, values + i, n * sizeof(float));
    }
    return where(active, x, vfloat{});
  }
  FASTRL_INLINE vfloat load(const SegmentConstant& constant) const {
    return constant.values ? load(constant.values) : where(active, constant.same, vfloat{});
  }
  // The KL to the reference, given the mean log-ratio of the sequence.
  FASTRL_INLINE KlTerms<vfloat> kl(float mean) const {
    const Objective<float>& o = in.objective;
    const vfloat policy_difference = o.kl_by_token() ? difference : fill(mean);
    return kl_terms<VectorMath>(o.kl_estimator, o.kl_gradient,
                                kl_difference<VectorMath>(load(in.constants.ref_logprobs), logprob),
                                policy_difference, o.coefficients);
  }
  FASTRL_INLINE void store(float* values, vfloat x) const {
    x = where(active, x, vfloat{});
    if (n == kLanes) {
      __builtin_memcpy(values + i, &x, kVecBytes);
    } else {
      __builtin_memcpy(values + i, &x, n * sizeof(float));
    }
  }
};

// The terms of a token of a sequence with this mean log-ratio.
FASTRL_INLINE Terms shared_terms(const Tokens& t, float mean) {
  const Objective<float>& o = t.in.objective;
  if (o.surrogate != Surrogate::kGmpo) {
    return objective_terms<VectorMath>(o.surrogate, fill(mean), t.advantage, t.logprob,
                                       o.coefficients);
  }
  const vfloat shared = VectorMath::exp(fill(mean)), loss = -t.advantage * shared;
  const vfloat clip = gmpo_terms<VectorMath>(t.difference, t.advantage, o.coefficients).clip;
  return {loss, loss, clip, fill(mean), shared};
}

void sum_log_ratios(const TokenInputs& in, const Segment& sequence, double* sum, int64_t* count) {
  const Coefficients<float> c = in.objective.coefficients;
  const bool gmpo = in.objective.surrogate == Surrogate::kGmpo;
  const SegmentInputs segment(in, sequence);
  DoubleSum total;
  vint active{};
  for (int64_t i = sequence.begin; i < sequence.end; i += kLanes) {
    const Tokens t(segment, i);
    active += t.active;
    total.add(gmpo ? gmpo_terms<VectorMath>(t.difference, t.advantage, c).log_ratio : t.difference);
  }
  *sum = total.total();
  *count = count_of(active);
}

// Whether all tokens of a sequence with one ratio have the same terms: not if the loss depends on
// the token itself.
FASTRL_INLINE bool terms_are_shared(const TokenInputs& in) {
  return in.objective.level != Level::kToken && in.constants.advantages.by_sequence &&
         flows_through_ratio(in.objective.surrogate) && in.objective.surrogate != Surrogate::kGmpo;
}

// The terms of every active token of such a sequence.
FASTRL_INLINE Terms terms_of_sequence(const TokenInputs& in, const Segment& sequence) {
  const vfloat advantage = fill(in.constants.advantages.values[sequence.sequence]);
  return objective_terms<VectorMath>(in.objective.surrogate, fill(sequence.shared.mean), advantage,
                                     vfloat{}, in.objective.coefficients);
}

double sum_slopes(const TokenInputs& in, const Segment& sequence, int64_t active) {
  const Objective<float>& o = in.objective;
  const float kl_coef = o.coefficients.kl_coef;
  const SharedRatio shared = sequence.shared;
  const bool policy = flows_through_ratio(o.surrogate);
  const bool kl = kl_coef != 0 && !o.kl_by_token() && !shared.alone;
  if (!policy && !kl) return 0;
  const LossConstants& constants = in.constants;
  const bool one_weight = constants.weights.by_sequence && (!constants.policy_weights.values ||
                                                            constants.policy_weights.by_sequence);
  if (one_weight && !kl && terms_are_shared(in)) {
    float weight = constants.weights.values[sequence.sequence];
    if (constants.policy_weights.values) {
      weight *= constants.policy_weights.values[sequence.sequence];
    }
    const vfloat slope = weighted<VectorMath>(fill(weight), terms_of_sequence(in, sequence).slope);
    return active ? static_cast<double>(slope[0]) * static_cast<double>(active) : 0.0;
  }
  const SegmentInputs segment(in, sequence);
  DoubleSum total;
  for (int64_t i = sequence.begin; i < sequence.end; i += kLanes) {
    const Tokens t(segment, i);
    if (policy) total.add(weighted<VectorMath>(t.weight, shared_terms(t, shared.mean).slope));
    if (kl) {
      total.add(t.load(segment.kl_weights) * kl_coef * t.kl(shared.mean).ratio_slope);
    }
  }
  return total.total();
}

// The sums of a few vectors of tokens, as exact as their terms.
struct StepSums {
  vfloat policy{}, weighted_kl{}, weighted_entropy{}, kl{}, kl_old{}, entropy{}, ratio{};
};
constexpr int kVectorsPerStep = 4;

// The sums over tokens, one per lane.
struct LaneSums {
  DoubleSum policy, weighted_kl, weighted_entropy, kl, kl_old, entropy, ratio;
  vint active{}, clip_low{}, clip_high{}, zero_grad{};
  vfloat ratio_max, ratio_min;

  FASTRL_INLINE void add(const StepSums& step) {
    policy.add(step.policy);
    weighted_kl.add(step.weighted_kl);
    weighted_entropy.add(step.weighted_entropy);
    kl.add(step.kl);
    kl_old.add(step.kl_old);
    entropy.add(step.entropy);
    ratio.add(step.ratio);
  }

  FASTRL_INLINE void write(TokenSums* sums) const {
    sums->policy = policy.total();
    sums->weighted_kl = weighted_kl.total();
    sums->weighted_entropy = weighted_entropy.total();
    sums->kl = kl.total();
    sums->kl_old = kl_old.total();
    sums->entropy = entropy.total();
    sums->ratio = ratio.total();
    sums->ratio_max = ratio_max[0];
    sums->ratio_min = ratio_min[0];
    for (int k = 1; k < kLanes; ++k) {
      const float high = ratio_max[k], low = ratio_min[k];
      if (high > sums->ratio_max || high != high) sums->ratio_max = high;
      if (low < sums->ratio_min || low != low) sums->ratio_min = low;
    }
    sums->active = count_of(active);
    sums->clip_low = count_of(clip_low);
    sums->clip_high = count_of(clip_high);
    sums->zero_grad = count_of(zero_grad);
  }
};

// Loss, slope and metrics of one vector of tokens.
// `known` has the terms of the whole sequence, if they are shared.
FASTRL_INLINE void add_tokens(const Tokens& t, SharedRatio shared, const Terms* known,
                              LaneSums* sums, StepSums* step) {
  const TokenInputs& in = t.in;
  const Objective<float>& o = in.objective;
  const Coefficients<float>& c = o.coefficients;
  const bool by_token = o.level == Level::kToken;
  const bool own_slope = o.level != Level::kSequence || !flows_through_ratio(o.surrogate);
  Terms terms;
  if (known) {
    const auto active = [&](vfloat x) { return where(t.active, x, vfloat{}); };
    terms = {active(known->loss), active(known->slope), active(known->clip), known->log_ratio,
             known->ratio};
  } else if (by_token) {
    terms = objective_terms<VectorMath>(o.surrogate, t.difference, t.advantage, t.logprob, c);
  } else {
    terms = shared_terms(t, shared.mean);
  }
  vfloat slope = fill(shared.slope);
  if (own_slope) slope += weighted<VectorMath>(t.weight, terms.slope);
  if (o.surrogate == Surrogate::kGmpo) {
    const vint unclipped = gmpo_terms<VectorMath>(t.difference, t.advantage, c).unclipped;
    slope = where(unclipped, slope, vfloat{});
  }
  if (in.constants.ref_logprobs) {
    const KlTerms<vfloat> kl = t.kl(shared.mean);
    step->kl += kl.value;
    if (c.kl_coef != 0) {
      const vfloat weight = t.load(t.segment.kl_weights);
      const bool own_kl_slope = o.level != Level::kSequence || o.kl_by_token() || shared.alone;
      step->weighted_kl += weight * kl.value;
      slope += weight * (c.kl_coef * (own_kl_slope ? kl.own_slope : kl.slope));
    }
  }
  slope = token_slope<VectorMath>(t.logprob, slope);
  t.store(in.slope, slope);

  step->policy += weighted<VectorMath>(t.weight, terms.loss);
  vint idle = t.active & (slope == 0.0f);
  if (in.entropy) {
    const vfloat entropy = t.load(in.entropy);
    step->entropy += entropy;
    if (c.entropy_coef != 0) {
      const vfloat weight = t.load(t.segment.entropy_weights);
      const vfloat entropy_slope = -c.entropy_coef * weight;
      step->weighted_entropy += weight * entropy;
      t.store(in.entropy_slope, entropy_slope);
      idle &= entropy_slope == 0.0f;
    }
  } else {
    step->entropy += -t.logprob;
  }
  if (in.constants.old_logprobs) {
    const vfloat log_ratio =
        clamp<VectorMath>(t.difference, fill(c.lowest_log_ratio()), fill(c.highest_log_ratio()));
    step->kl_old += VectorMath::expm1(log_ratio) - log_ratio;
  } else {
    step->kl_old += t.difference;  // 0 or NaN
  }
  step->ratio += where(t.active, terms.ratio, vfloat{});
  const vint is_nan = terms.ratio != terms.ratio;
  const vint higher = t.active & ((terms.ratio > sums->ratio_max) | is_nan);
  const vint lower = t.active & ((terms.ratio < sums->ratio_min) | is_nan);
  sums->ratio_max = where(higher, terms.ratio, sums->ratio_max);
  sums->ratio_min = where(lower, terms.ratio, sums->ratio_min);
  sums->active += t.active;
  sums->clip_low += terms.clip < 0.0f;
  sums->clip_high += terms.clip > 0.0f;
  sums->zero_grad += idle;
}

void token_losses(const TokenInputs& inputs, const Segment* segments, int64_t count,
                  TokenSums* sums) {
  const TokenInputs in = inputs;  // no other code writes to a copy, so it stays in registers
  const bool shared = terms_are_shared(in);
  LaneSums lanes;
  lanes.ratio_max = fill(-__builtin_inff());
  lanes.ratio_min = fill(__builtin_inff());
  for (int64_t k = 0; k < count; ++k) {
    const SegmentInputs segment(in, segments[k]);
    Terms of_sequence{};
    if (shared) of_sequence = terms_of_sequence(in, segments[k]);
    for (int64_t i = segments[k].begin; i < segments[k].end;) {
      StepSums step{};
      for (int j = 0; j < kVectorsPerStep && i < segments[k].end; ++j, i += kLanes) {
        add_tokens(Tokens(segment, i), segments[k].shared, shared ? &of_sequence : nullptr, &lanes,
                   &step);
      }
      lanes.add(step);
    }
  }
  lanes.write(sums);
}
