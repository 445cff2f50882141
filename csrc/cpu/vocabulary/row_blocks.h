// The two sweeps over a block of columns: sums of exponentials, and the gradient.
// Included by isa.h only, inside the namespace of one instruction set.

constexpr int kStep = 4 * kLanes;  // columns per iteration: two pairs of vectors
// Bytes to prefetch ahead: the hardware alone reaches little more than half of a core's bandwidth.
constexpr int64_t kPrefetchSums = 8192, kPrefetchGradient = 2048;

// Prefetches a step `bytes` ahead; no effect beyond the end of the logits.
template <typename T>
FASTRL_INLINE void prefetch_step(const T* x, int64_t bytes) {
  const char* at = reinterpret_cast<const char*>(x) + bytes;
  for (int64_t line = 0; line < static_cast<int64_t>(kStep * sizeof(T)); line += 64) {
    __builtin_prefetch(at + line);
  }
}

// Padding of the last step, which adds nothing to any sum.
FASTRL_INLINE void set_minus_infinity(float* x) { *x = -__builtin_inff(); }
FASTRL_INLINE void set_minus_infinity(BFloat16* x) { x->bits = 0xff80; }
FASTRL_INLINE void set_minus_infinity(Half* x) { x->bits = 0xfc00; }

template <typename T>
FASTRL_INLINE void copy_tail(T* step, const T* x, int64_t n) {
  for (int64_t i = n; i < kStep; ++i) set_minus_infinity(step + i);
  __builtin_memcpy(step, x, n * sizeof(T));
}

// Exponents of two relative to `max`, a raw logit.
template <bool kSoftcap>
struct Exponent {
  float max, binary_gain, squash_by;

  FASTRL_INLINE explicit Exponent(const LogitMap& map, float largest)
      : max(largest), binary_gain(map.binary_gain), squash_by(map.squash) {
    if (kSoftcap) max = squash(fill(largest), squash_by).value[0];
  }
  FASTRL_INLINE vfloat operator()(vfloat x) const {
    if (kSoftcap) x = squash(x, squash_by).value;
    return (x - max) * binary_gain;
  }
};

template <typename T>
float block_max(const T* x, int64_t n) {
  const vfloat lowest = fill(-__builtin_inff());
  vfloat m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
  T tail[kStep];
  for (int64_t i = 0; i < n; i += kStep) {
    const T* step = x + i;
    if (n - i < kStep) {
      copy_tail(tail, step, n - i);
      step = tail;
    }
    const VecPair low = load_pair(step), high = load_pair(step + 2 * kLanes);
    m0 = at_least(low.a, m0);  // keeps the maximum so far if x is NaN, which the sum will show
    m1 = at_least(low.b, m1);
    m2 = at_least(high.a, m2);
    m3 = at_least(high.b, m3);
  }
  return largest_lane(at_least(at_least(m0, m1), at_least(m2, m3)));
}

template <bool kEntropy, bool kSquares>
struct Sums {
  vfloat sum{}, sum_t{}, sum_sq{};

  FASTRL_INLINE void add(vfloat t) {
    const vfloat e = exp2(t);
    sum += e;
    if (kEntropy) sum_t += e * at_least(fill(-200.0f), t);  // 0 * -inf would be NaN
    if (kSquares) sum_sq += e * e;
  }
};

// Where a lane of the step's vectors lies: vector 0 to 3, in the order of the loads.
FASTRL_INLINE int64_t column_of(const BFloat16*, int vector, int lane) {
  return vector / 2 * 2 * kLanes + 2 * lane + vector % 2;
}
template <typename T>
FASTRL_INLINE int64_t column_of(const T*, int vector, int lane) {
  return vector * kLanes + lane;
}

// The sum without the 1 of the largest logit, if the others are far below it: the sum of all other
// lanes, plus that of the other columns in its lane, which are added once more.
template <typename T, bool kSoftcap>
double rest_of_peak(const T* x, int64_t n, const Exponent<kSoftcap>& exponent,
                    const vfloat (&sums)[4]) {
  double rest = 0;
  int64_t column = 0;
  for (int vector = 0; vector < 4; ++vector) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (sums[vector][lane] > 0.5f) {
        column = column_of(x, vector, lane);
      } else {
        rest += static_cast<double>(sums[vector][lane]);
      }
    }
  }
  while (column < n) {
    T some[kStep];
    copy_tail(some, x, 0);
    for (int i = 0; i < kStep && column < n; ++i, column += kStep) some[i] = x[column];
    const VecPair low = load_pair(some), high = load_pair(some + 2 * kLanes);
    const vfloat values[4] = {low.a, low.b, high.a, high.b};
    for (int vector = 0; vector < 4; ++vector) {
      const vfloat t = exponent(values[vector]);
      rest += sum_of_lanes(where(t < 0.0f, exp2(t), vfloat{}));
    }
  }
  return rest;
}

template <typename T, bool kSoftcap, bool kEntropy, bool kSquares>
void block_partial(const void* logits, int64_t n, const LogitMap& map, BlockPartial* partial) {
  const T* x = static_cast<const T*>(logits);
  const float max = block_max(x, n);
  // a block of -inf alone sums to exactly 0, whatever it is relative to
  const Exponent<kSoftcap> exponent(map, max == -__builtin_inff() ? 0.0f : max);
  Sums<kEntropy, kSquares> s0, s1, s2, s3;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    prefetch_step(x + i, kPrefetchSums);
    const VecPair low = load_pair(x + i), high = load_pair(x + i + 2 * kLanes);
    s0.add(exponent(low.a));
    s1.add(exponent(low.b));
    s2.add(exponent(high.a));
    s3.add(exponent(high.b));
  }
  if (i < n) {
    T tail[kStep], padding[kStep] = {};
    copy_tail(tail, x + i, n - i);
    copy_tail(padding, padding, n - i);
    const VecPair low = load_pair(tail), high = load_pair(tail + 2 * kLanes);
    const VecPair pad_low = load_pair(padding), pad_high = load_pair(padding + 2 * kLanes);
    s0.add(exponent(low.a) + pad_low.a);  // a softcap makes the padding finite, so add -inf again
    s1.add(exponent(low.b) + pad_low.b);
    s2.add(exponent(high.a) + pad_high.a);
    s3.add(exponent(high.b) + pad_high.b);
  }
  partial->max = max;
  const vfloat sums[4] = {s0.sum, s1.sum, s2.sum, s3.sum};
  partial->rest = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) - 1.0;
  if (partial->rest > -0.5 && partial->rest < 0.0625) {
    partial->rest = rest_of_peak(x, n, exponent, sums);
  }
  partial->sum_t = kEntropy ? sum_of_lanes((s0.sum_t + s1.sum_t) + (s2.sum_t + s3.sum_t)) : 0.0;
  partial->sum_sq =
      kSquares ? sum_of_lanes((s0.sum_sq + s1.sum_sq) + (s2.sum_sq + s3.sum_sq)) : 0.0;
}

template <bool kSoftcap, bool kLinear>
struct Gradient {
  float max, binary_gain, squash_by, constant, linear;

  FASTRL_INLINE Gradient(const LogitMap& map, const GradientTerms& terms)
      : max(terms.max),
        binary_gain(map.binary_gain),
        squash_by(map.squash),
        constant(terms.constant),
        linear(terms.linear) {
    if (kSoftcap) max = squash(fill(max), squash_by).value[0];
  }
  FASTRL_INLINE vfloat operator()(vfloat x) const {
    vfloat derivative{};
    if (kSoftcap) {
      const Squashed squashed = squash(x, squash_by);
      x = squashed.value;
      derivative = squashed.derivative;
    }
    const vfloat t = (x - max) * binary_gain;
    vfloat factor = fill(constant);
    if (kLinear) factor += linear * at_least(fill(-200.0f), t);
    if (kSoftcap) factor *= derivative;
    return factor * exp2(t);
  }
  FASTRL_INLINE VecPair operator()(VecPair x) const { return {(*this)(x.a), (*this)(x.b)}; }
};

template <typename T, bool kSoftcap, bool kLinear>
void block_gradient(const void* logits, void* grad_logits, int64_t n, const LogitMap& map,
                    const GradientTerms& terms) {
  const T* x = static_cast<const T*>(logits);
  T* grad = static_cast<T*>(grad_logits);
  const Gradient<kSoftcap, kLinear> gradient(map, terms);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    prefetch_step(x + i, kPrefetchGradient);
    const VecPair low = load_pair(x + i), high = load_pair(x + i + 2 * kLanes);
    store_pair(grad + i, gradient(low));
    store_pair(grad + i + 2 * kLanes, gradient(high));
  }
  if (i < n) {
    T tail[kStep];
    copy_tail(tail, x + i, n - i);
    const VecPair low = load_pair(tail), high = load_pair(tail + 2 * kLanes);
    store_pair(tail, gradient(low));
    store_pair(tail + 2 * kLanes, gradient(high));
    __builtin_memcpy(grad + i, tail, (n - i) * sizeof(T));
  }
}

float lane_tanh(float x, float by) { return squash(fill(x), by).value[0]; }
