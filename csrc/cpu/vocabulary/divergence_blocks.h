// The divergence of a block of two rows and its derivative by the logits of the first one, the
// student's. Included by isa.h only, inside the namespace of one instruction set.
//
// With the student's q and the teacher's p, everything is computed from y = log2 q/p, which comes
// from the logits themselves, from the larger of the two, and from expm1(-|ln q/p|), so differences
// of nearly equal rows keep their digits.

FASTRL_INLINE vfloat load_lanes(const float* x) {
  vfloat value;
  __builtin_memcpy(&value, x, kVecBytes);
  return value;
}
FASTRL_INLINE vfloat load_lanes(const Half* x) { return load_half(x); }
FASTRL_INLINE vfloat load_lanes(const BFloat16* x) {
  vhalfwords words;
  __builtin_memcpy(&words, x, kVecBytes / 2);
  return float_of(__builtin_convertvector(words, vuint) << 16);
}
FASTRL_INLINE void store_lanes(float* x, vfloat y) { __builtin_memcpy(x, &y, kVecBytes); }
FASTRL_INLINE void store_lanes(Half* x, vfloat y) { store_half(x, y); }
FASTRL_INLINE void store_lanes(BFloat16* x, vfloat y) {
  const vhalfwords words = __builtin_convertvector(round_to_bfloat16(y) >> 16, vhalfwords);
  __builtin_memcpy(x, &words, kVecBytes / 2);
}

// The next of the n remaining elements, as many as fit a vector, with -inf beyond them.
template <typename T>
FASTRL_INLINE vfloat load_next(const T* x, int64_t n) {
  if (n >= kLanes) return load_lanes(x);
  T lanes[kLanes];
  for (int64_t i = n; i < kLanes; ++i) set_minus_infinity(lanes + i);
  __builtin_memcpy(lanes, x, n * sizeof(T));
  return load_lanes(lanes);
}
template <typename T>
FASTRL_INLINE void store_next(T* x, int64_t n, vfloat y) {
  if (n >= kLanes) return store_lanes(x, y);
  T lanes[kLanes];
  store_lanes(lanes, y);
  __builtin_memcpy(x, lanes, n * sizeof(T));
}

// Logits under the softcap, if there is one, as floats.
template <typename T, bool kSoftcap>
void block_values(const void* logits, int64_t n, float squash_by, float* out) {
  const T* x = static_cast<const T*>(logits);
  for (int64_t i = 0; i < n; i += kLanes) {
    prefetch_step(x + i, kPrefetchSums);
    vfloat value = load_next(x + i, n - i);
    if (kSoftcap) value = squash(value, squash_by).value;
    store_next(out + i, n - i, value);
  }
}

// Stores raw_gain * slope, under a softcap times its derivative, as the gradient of these logits.
template <typename T, bool kSoftcap>
void block_slopes(const void* logits, const float* slopes, int64_t n, float squash_by,
                  float raw_gain, void* grad_logits) {
  const T* x = static_cast<const T*>(logits);
  T* grad = static_cast<T*>(grad_logits);
  for (int64_t i = 0; i < n; i += kLanes) {
    vfloat slope = load_next(slopes + i, n - i) * raw_gain;
    if (kSoftcap) slope *= squash(load_next(x + i, n - i), squash_by).derivative;
    store_next(grad + i, n - i, slope);
  }
}

// log(1 + c) for c in [-1, 0], with all its digits next to 0.
FASTRL_INLINE vfloat log1p_of_negative(vfloat c) {
  const vfloat v = 1.0f + c;
  // v = m 2^k with m in [2/3, 4/3)
  const vint k = reinterpret_cast<vint>(bits_of(v) - 0x3f2aaaabu) >> 23;
  const vfloat m = float_of(bits_of(v) - (reinterpret_cast<vuint>(k) << 23));
  const vfloat f = where(k == 0, c, m - 1.0f);
  const vfloat s = f / (2.0f + f), s2 = s * s;
  vfloat p = fill(0.151797686f);
  p = p * s2 + 0.199789373f;
  p = p * s2 + 0.333334734f;
  const vfloat log_m = 2.0f * (s * s2 * p + s);
  const vfloat value = __builtin_convertvector(k, vfloat) * 0.69314718f + log_m;
  return where(v == 0.0f, fill(-HUGE_VALF), value);
}

enum Divergence { kForwardKl, kReverseKl, kJensenShannon };

// One vector of both rows.
struct RowPair {
  vfloat y;  // log2 q/p
  vfloat log2_q;
  vfloat larger;       // of q and p
  vfloat growth;       // the smaller one over it, minus 1
  vint student_leads;  // q >= p
  vfloat q, p;
};

FASTRL_INLINE RowPair compare(vfloat u, vfloat v, const DivergenceMap& map) {
  const vfloat lowest = fill(-HUGE_VALF);
  const vfloat binary_gain = fill(map.binary_gain),
               teacher_binary_gain = fill(map.teacher_binary_gain);
  const vfloat t = u - map.max, teacher_t = v - map.teacher_max;
  RowPair pair;
  if (map.binary_gain == map.teacher_binary_gain) {
    // u - v with its rounding error, so that neither equal rows nor rows far from 0 lose digits
    const vfloat difference = u - v, back = difference - u;
    const vfloat error = (u - (difference - back)) - (v + back);
    const vfloat rest = where(error == error, error, vfloat{}) - map.max_difference_error;
    pair.y = ((difference - map.max_difference) + rest) * binary_gain - map.offset;
  } else {
    pair.y = (t * binary_gain - teacher_t * teacher_binary_gain) - map.offset;
  }
  const vint excluded = (u == lowest) & (v == lowest);
  pair.y = where(excluded, vfloat{}, pair.y);
  pair.student_leads = pair.y >= 0.0f;
  pair.log2_q = t * binary_gain - map.log2_sum;
  const vfloat log2_p = teacher_t * teacher_binary_gain - map.teacher_log2_sum;
  pair.larger = exp2(where(pair.student_leads, pair.log2_q, log2_p));
  const vfloat distance = where(pair.student_leads, -pair.y, pair.y) * 0.69314718f;
  const Exponential quotient = exponential(distance);
  pair.growth = quotient.minus_one;
  const vfloat smaller = pair.larger * quotient.value;
  pair.q = where(pair.student_leads, pair.larger, smaller);
  pair.p = where(pair.student_leads, smaller, pair.larger);
  return pair;
}

FASTRL_INLINE vfloat product_or_zero(vfloat probability, vfloat log) {
  return where(probability == 0.0f, vfloat{}, probability * log);
}

// A column's term of the divergence, and q times the derivative of the divergence by ln q.
struct DivergenceTerms {
  vfloat value, slope;
};

template <Divergence kKind>
FASTRL_INLINE DivergenceTerms divergence_terms(const RowPair& pair, float beta) {
  const vfloat log_ratio = pair.y * 0.69314718f;  // ln q/p
  const vfloat change = pair.larger * pair.growth;
  const vfloat excess = where(pair.student_leads, -change, change);  // q - p
  if (kKind == kForwardKl) return {excess - product_or_zero(pair.p, log_ratio), excess};
  if (kKind == kReverseKl) {
    const vfloat slope = product_or_zero(pair.q, log_ratio);
    return {slope - excess, slope};
  }
  // with m = (1 - beta) q + beta p
  const vfloat share = where(pair.student_leads, fill(beta), fill(1.0f - beta));
  const vfloat of_larger = -log1p_of_negative(share * pair.growth);  // ln larger/m
  const vfloat of_smaller = of_larger - where(pair.student_leads, log_ratio, -log_ratio);
  const vfloat of_q = where(pair.student_leads, of_larger, of_smaller);
  const vfloat of_p = where(pair.student_leads, of_smaller, of_larger);
  const vfloat slope = (1.0f - beta) * product_or_zero(pair.q, of_q);
  return {beta * product_or_zero(pair.p, of_p) + slope, slope};
}

// `u` and `v` come from block_values.
template <Divergence kKind>
void block_divergence(const float* u, const float* v, int64_t n, const DivergenceMap& map,
                      DivergenceSums* sums) {
  vfloat value{}, slope{};
  vint agrees{};
  for (int64_t i = 0; i < n; i += kLanes) {
    prefetch_step(u + i, kPrefetchSums);
    prefetch_step(v + i, kPrefetchSums);
    const vfloat x = load_next(u + i, n - i), y = load_next(v + i, n - i);
    const DivergenceTerms terms = divergence_terms<kKind>(compare(x, y, map), map.beta);
    value += terms.value;
    slope += terms.slope;
    agrees |= (x == fill(map.max)) & (y == fill(map.teacher_max));
  }
  sums->value += sum_of_lanes(value);
  sums->slope += sum_of_lanes(slope);
  for (int i = 0; i < kLanes; ++i) sums->agrees |= agrees[i] != 0;
}

// The derivative of the loss by z; `slopes` may be `u`.
template <Divergence kKind>
void block_divergence_slopes(const float* u, const float* v, int64_t n, const DivergenceMap& map,
                             const DivergenceSlopes& by, float* slopes) {
  for (int64_t i = 0; i < n; i += kLanes) {
    prefetch_step(u + i, kPrefetchGradient);
    prefetch_step(v + i, kPrefetchGradient);
    const vfloat x = load_next(u + i, n - i);
    const RowPair pair = compare(x, load_next(v + i, n - i), map);
    const vfloat of_divergence =
        divergence_terms<kKind>(pair, map.beta).slope - product_or_zero(pair.q, fill(by.mean));
    const vfloat of_row = by.linear * at_least(fill(-200.0f), pair.log2_q) + by.constant;
    vfloat slope = by.divergence * of_divergence + pair.q * of_row;
    slope = where(x == fill(-HUGE_VALF), vfloat{}, slope);  // an excluded token
    store_next(slopes + i, n - i, slope);
  }
}
