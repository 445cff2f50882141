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

enum Divergence { kForwardKl, kReverseKl, kJensenShannon };

// One vector of both rows.
struct RowPair {
  vfloat y;  // log2 q/p
  vfloat log2_q;
  vfloat larger;            // of q and p
  vfloat quotient, growth;  // the smaller one over it, and that minus 1
  vint student_leads;       // q >= p
  vfloat q, p;
};

FASTRL_INLINE RowPair compare(vfloat u, vfloat v, const DivergenceMap& map) {
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
  pair.student_leads = pair.y >= 0.0f;
  pair.log2_q = t * binary_gain - map.log2_sum;
  const vfloat log2_p = teacher_t * teacher_binary_gain - map.teacher_log2_sum;
  const vfloat log2_larger = where(pair.student_leads, pair.log2_q, log2_p);
  pair.larger = exp2(log2_larger);
  const vint excluded = log2_larger == fill(-HUGE_VALF);  // by both: y may be inf - inf
  pair.y = where(excluded, vfloat{}, pair.y);
  const vfloat distance = where(pair.student_leads, -pair.y, pair.y) * 0.69314718f;
  const Exponential quotient = exponential(distance);
  pair.quotient = quotient.value;
  pair.growth = quotient.minus_one;
  const vfloat smaller = pair.larger * quotient.value;
  pair.q = where(pair.student_leads, pair.larger, smaller);
  pair.p = where(pair.student_leads, smaller, pair.larger);
  return pair;
}

FASTRL_INLINE vfloat product_or_zero(vfloat probability, vfloat log) {
  return where(probability == 0.0f, vfloat{}, probability * log);
}

// ln larger/m and ln smaller/m of a mixture m, with all their digits however small a share is.
struct MixtureLogs {
  vfloat of_larger, of_smaller;
};
FASTRL_INLINE MixtureLogs mixture_logs(const RowPair& pair, const DivergenceMap& map) {
  const vfloat beta = fill(map.beta), student_share = fill(map.student_share);
  const vfloat share_of_larger = where(pair.student_leads, student_share, beta);
  const vfloat share_of_smaller = where(pair.student_leads, beta, student_share);
  // with larger = 1, m = v and smaller = quotient: where m is within a third of one of these, the
  // logarithm is that of a quotient next to 1, which the shares of larger - smaller give
  const vfloat v = share_of_larger + share_of_smaller * pair.quotient;
  const vfloat rise = -share_of_larger * pair.growth;  // from smaller to m
  const vint near_smaller = (share_of_larger < 0.5f) & (3.0f * rise < pair.quotient);
  // v = x 2^k with x in [2/3, 4/3)
  const vint k = reinterpret_cast<vint>(bits_of(v) - 0x3f2aaaabu) >> 23;
  const vfloat x = float_of(bits_of(v) - (reinterpret_cast<vuint>(k) << 23));
  const vfloat from_1 = where(k == 0, share_of_smaller * pair.growth, x - 1.0f);
  const vfloat s = where(near_smaller, rise, from_1) /
                   (where(near_smaller, v, x) + where(near_smaller, pair.quotient, fill(1.0f)));
  const vfloat s2 = s * s;
  vfloat p = fill(0.151797686f);
  p = p * s2 + 0.199789373f;
  p = p * s2 + 0.333334734f;
  const vfloat log_x = 2.0f * (s * s2 * p + s);
  const vfloat distance = where(pair.student_leads, pair.y, -pair.y) * 0.69314718f;
  const vfloat whole = __builtin_convertvector(k, vfloat) * 0.69314718f;
  const vfloat of_larger = -(where(near_smaller, -distance, whole) + log_x);
  return {of_larger, where(near_smaller, -log_x, of_larger - distance)};
}

// A column's term of the divergence, and q times the derivative of the divergence by ln q.
struct DivergenceTerms {
  vfloat value, slope;
};

template <Divergence kKind>
FASTRL_INLINE DivergenceTerms divergence_terms(const RowPair& pair, const DivergenceMap& map) {
  // ln q/p; a log2 of 2^50, as a logit of finfo.min makes it in one of the rows, becomes infinite
  const vfloat log_ratio = (pair.y * 0x1p78f) * (0x1p-78f * 0.69314718f);
  const vfloat change = pair.larger * pair.growth;
  const vfloat excess = where(pair.student_leads, -change, change);  // q - p
  if (kKind == kForwardKl) return {excess - product_or_zero(pair.p, log_ratio), excess};
  if (kKind == kReverseKl) {
    const vfloat slope = product_or_zero(pair.q, log_ratio);
    return {slope - excess, slope};
  }
  // with m = (1 - beta) q + beta p
  const MixtureLogs logs = mixture_logs(pair, map);
  const vfloat of_q = where(pair.student_leads, logs.of_larger, logs.of_smaller);
  const vfloat of_p = where(pair.student_leads, logs.of_smaller, logs.of_larger);
  const vfloat slope = map.student_share * product_or_zero(pair.q, of_q);
  return {map.beta * product_or_zero(pair.p, of_p) + slope, slope};
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
    const DivergenceTerms terms = divergence_terms<kKind>(compare(x, y, map), map);
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
        divergence_terms<kKind>(pair, map).slope - product_or_zero(pair.q, fill(by.mean));
    const vfloat of_row = by.linear * at_least(fill(-200.0f), pair.log2_q) + by.constant;
    vfloat slope = by.divergence * of_divergence + pair.q * of_row;
    slope = where(x == fill(-HUGE_VALF), vfloat{}, slope);  // an excluded token
    store_next(slopes + i, n - i, slope);
  }
}
