// The policy loss of vectors of tokens: the functions of objectives.h on VectorMath.
// Included by isa.h only, inside the namespace of one instruction set.

struct VectorMath {
  using Real = vfloat;
  using Mask = vint;
  FASTRL_INLINE static vfloat fill(float x) { return vfloat{} + x; }
  FASTRL_INLINE static vfloat exp(vfloat x) { return exponential(x).value; }
  FASTRL_INLINE static vfloat expm1(vfloat x) { return exponential(x).minus_one; }
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

// Up to a vector of tokens from i on; what is not active is 0 in every input and enters as such.
struct Tokens {
  const TokenInputs& in;
  int64_t i, n;
  vint active;
  vfloat logprob, advantage, weight, difference;

  FASTRL_INLINE Tokens(const TokenInputs& inputs, int64_t begin, int64_t end)
      : in(inputs), i(begin), n(end - begin < kLanes ? end - begin : kLanes) {
    typedef uint8_t vbytes __attribute__((vector_size(kLanes)));
    vbytes mask{};
    __builtin_memcpy(&mask, in.mask + i, n);
    active = __builtin_convertvector(mask, vint) != 0;
    logprob = load(in.logprobs);
    advantage = load(in.advantages);
    weight = load(in.weights);
    // on policy the ratio is 1 by definition, but NaN stays NaN
    difference =
        difference_of<VectorMath>(logprob, in.old_logprobs ? load(in.old_logprobs) : logprob);
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
  // The KL to the reference, given the difference that the policy's ratio comes from.
  FASTRL_INLINE KlTerms<vfloat> kl(const Coefficients<float>& c, vfloat policy_difference) const {
    return kl_terms<VectorMath>(
        static_cast<KlEstimator>(in.kl_estimator), static_cast<KlGradient>(in.kl_gradient),
        difference_of<VectorMath>(load(in.ref_logprobs), logprob), policy_difference, c);
  }
  FASTRL_INLINE void store_slope(vfloat slope) const {
    const vfloat x = where(active, slope, vfloat{});
    if (n == kLanes) {
      __builtin_memcpy(in.slope + i, &x, kVecBytes);
    } else {
      __builtin_memcpy(in.slope + i, &x, n * sizeof(float));
    }
  }
};

FASTRL_INLINE Coefficients<float> coefficients_of(const TokenInputs& in) {
  Coefficients<float> c;
  static_assert(sizeof(c) == sizeof(in.coefficients), "one float each, in the same order");
  __builtin_memcpy(&c, in.coefficients, sizeof(c));
  return c;
}

// The terms of a token of a sequence with this mean log-ratio.
FASTRL_INLINE Terms shared_terms(const Tokens& t, const Coefficients<float>& c, float mean) {
  const Ratio ratio = static_cast<Ratio>(t.in.ratio);
  if (ratio != Ratio::kGmpo) {
    return objective_terms<VectorMath>(ratio, fill(mean), t.advantage, t.logprob, c);
  }
  const vfloat shared = VectorMath::exp(fill(mean)), loss = -t.advantage * shared;
  const vfloat clip = gmpo_terms<VectorMath>(t.difference, t.advantage, c).clip;
  return {loss, loss, clip, fill(mean), shared};
}

void sum_log_ratios(const TokenInputs& in, int64_t begin, int64_t end, double* sum,
                    int64_t* count) {
  const Coefficients<float> c = coefficients_of(in);
  const bool gmpo = static_cast<Ratio>(in.ratio) == Ratio::kGmpo;
  DoubleSum total;
  vint active{};
  for (int64_t i = begin; i < end; i += kLanes) {
    const Tokens t(in, i, end);
    active += t.active;
    total.add(gmpo ? gmpo_terms<VectorMath>(t.difference, t.advantage, c).log_ratio : t.difference);
  }
  *sum = total.total();
  *count = count_of(active);
}

// Where the ratio is only a weight, the gradient flows through the token's own log-probability.
FASTRL_INLINE bool moves_the_ratio(const TokenInputs& in) {
  const Ratio ratio = static_cast<Ratio>(in.ratio);
  return ratio != Ratio::kCispo && ratio != Ratio::kReinforce;
}

double sum_slopes(const TokenInputs& in, int64_t begin, int64_t end, SharedRatio shared) {
  const Coefficients<float> c = coefficients_of(in);
  const bool policy = moves_the_ratio(in);
  const bool corrected = static_cast<KlGradient>(in.kl_gradient) == KlGradient::kBiasCorrected;
  const bool kl = c.kl_coef != 0 && corrected && !shared.alone;
  DoubleSum total;
  if (!policy && !kl) return 0;
  for (int64_t i = begin; i < end; i += kLanes) {
    const Tokens t(in, i, end);
    if (policy) {
      total.add(weighted<VectorMath>(t.weight, shared_terms(t, c, shared.mean).slope));
    }
    if (kl) total.add(t.load(in.kl_weights) * c.kl_coef * t.kl(c, fill(shared.mean)).ratio_slope);
  }
  return total.total();
}

void token_losses(const TokenInputs& in, int64_t begin, int64_t end, SharedRatio shared,
                  TokenSums* sums) {
  const Coefficients<float> c = coefficients_of(in);
  const Ratio ratio = static_cast<Ratio>(in.ratio);
  const Level level = static_cast<Level>(in.level);
  const bool own_slope = level != Level::kSequence || !moves_the_ratio(in);
  const bool own_kl_slope = level != Level::kSequence || shared.alone;
  const vfloat lowest = fill(c.lowest_log_ratio()), highest = fill(c.highest_log_ratio());
  DoubleSum policy, weighted_kl, weighted_entropy, kl_sum, kl_old, entropy_sum, ratio_sum;
  vint active{}, clip_low{}, clip_high{}, zero_grad{};
  vfloat ratio_max = fill(-__builtin_inff()), ratio_min = fill(__builtin_inff());
  for (int64_t i = begin; i < end; i += kLanes) {
    const Tokens t(in, i, end);
    const Terms terms =
        level != Level::kToken
            ? shared_terms(t, c, shared.mean)
            : objective_terms<VectorMath>(ratio, t.difference, t.advantage, t.logprob, c);
    vfloat slope = fill(shared.slope);
    if (own_slope) slope += weighted<VectorMath>(t.weight, terms.slope);
    if (ratio == Ratio::kGmpo) {
      const vint moves = gmpo_terms<VectorMath>(t.difference, t.advantage, c).moves;
      slope = where(moves, slope, vfloat{});
    }
    if (in.ref_logprobs) {
      const KlTerms<vfloat> kl = t.kl(c, level == Level::kToken ? t.difference : fill(shared.mean));
      kl_sum.add(kl.value);
      if (c.kl_coef != 0) {
        const vfloat weight = t.load(in.kl_weights);
        weighted_kl.add(weight * kl.value);
        slope += weight * (c.kl_coef * (own_kl_slope ? kl.own_slope : kl.slope));
      }
    }
    slope = token_slope<VectorMath>(t.logprob, slope);
    t.store_slope(slope);

    policy.add(weighted<VectorMath>(t.weight, terms.loss));
    if (in.entropy) {
      const vfloat entropy = t.load(in.entropy);
      entropy_sum.add(entropy);
      if (c.entropy_coef != 0) weighted_entropy.add(t.load(in.entropy_weights) * entropy);
    } else {
      entropy_sum.add(-t.logprob);
    }
    if (in.old_logprobs) {
      const vfloat log_ratio = clamp<VectorMath>(t.difference, lowest, highest);
      kl_old.add(VectorMath::expm1(log_ratio) - log_ratio);
    } else {
      kl_old.add(t.difference);  // 0 or NaN
    }
    ratio_sum.add(where(t.active, terms.ratio, vfloat{}));
    const vint is_nan = terms.ratio != terms.ratio;
    ratio_max = where(t.active & ((terms.ratio > ratio_max) | is_nan), terms.ratio, ratio_max);
    ratio_min = where(t.active & ((terms.ratio < ratio_min) | is_nan), terms.ratio, ratio_min);
    active += t.active;
    clip_low += terms.clip < 0.0f;
    clip_high += terms.clip > 0.0f;
    vint idle = t.active & (slope == 0.0f);
    if (c.entropy_coef != 0) idle &= t.load(in.entropy_weights) * c.entropy_coef == 0.0f;
    zero_grad += idle;
  }
  sums->policy = policy.total();
  sums->weighted_kl = weighted_kl.total();
  sums->weighted_entropy = weighted_entropy.total();
  sums->kl = kl_sum.total();
  sums->kl_old = kl_old.total();
  sums->entropy = entropy_sum.total();
  sums->ratio = ratio_sum.total();
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
