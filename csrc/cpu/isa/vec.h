// Vectors of floats on the compiler's vector extensions: kVecBytes wide, the same code for every
// instruction set. Included by isa.h only, inside the namespace of one instruction set.

constexpr int kVecBytes = FASTRL_VEC_BYTES;
constexpr int kLanes = kVecBytes / 4;

typedef float vfloat __attribute__((vector_size(kVecBytes)));
typedef int32_t vint __attribute__((vector_size(kVecBytes)));
typedef uint32_t vuint __attribute__((vector_size(kVecBytes)));
typedef uint16_t vhalfwords __attribute__((vector_size(kVecBytes / 2)));

#define FASTRL_INLINE inline __attribute__((always_inline))

FASTRL_INLINE vfloat fill(float x) { return vfloat{} + x; }
FASTRL_INLINE vuint bits_of(vfloat x) { return reinterpret_cast<vuint>(x); }
FASTRL_INLINE vfloat float_of(vuint x) { return reinterpret_cast<vfloat>(x); }
FASTRL_INLINE vfloat where(vint mask, vfloat yes, vfloat no) { return mask ? yes : no; }

// The larger (smaller) of bound and x; x if x is NaN. Operand order as in x86's max and min.
#if FASTRL_VEC_BYTES == 64
constexpr __mmask16 kAllLanes = 0xffff;  // GCC 12 warns about its own unmasked intrinsics
FASTRL_INLINE vfloat at_least(vfloat bound, vfloat x) {
  return _mm512_maskz_max_ps(kAllLanes, bound, x);
}
FASTRL_INLINE vfloat at_most(vfloat bound, vfloat x) {
  return _mm512_maskz_min_ps(kAllLanes, bound, x);
}
#elif FASTRL_VEC_BYTES == 32
FASTRL_INLINE vfloat at_least(vfloat bound, vfloat x) { return _mm256_max_ps(bound, x); }
FASTRL_INLINE vfloat at_most(vfloat bound, vfloat x) { return _mm256_min_ps(bound, x); }
#else
FASTRL_INLINE vfloat at_least(vfloat bound, vfloat x) { return where(bound > x, bound, x); }
FASTRL_INLINE vfloat at_most(vfloat bound, vfloat x) { return where(bound < x, bound, x); }
#endif

FASTRL_INLINE float largest_lane(vfloat x) {
  float largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = largest < x[i] ? x[i] : largest;
  return largest;
}
FASTRL_INLINE double sum_of_lanes(vfloat x) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += static_cast<double>(x[i]);
  return sum;
}

// --- logits in memory -------------------------------------------------------------------------
// Two vectors at a time. 16-bit floats may come in any order of lanes, as long as store_pair writes
// them to where load_pair found them: bfloat16 takes the even elements, then the odd ones.

struct VecPair {
  vfloat a, b;
};

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

FASTRL_INLINE VecPair load_pair(const float* x) {
  VecPair pair;
  __builtin_memcpy(&pair.a, x, kVecBytes);
  __builtin_memcpy(&pair.b, x + kLanes, kVecBytes);
  return pair;
}
FASTRL_INLINE void store_pair(float* x, VecPair pair) {
  __builtin_memcpy(x, &pair.a, kVecBytes);
  __builtin_memcpy(x + kLanes, &pair.b, kVecBytes);
}

FASTRL_INLINE VecPair load_pair(const BFloat16* x) {
  vuint both;
  __builtin_memcpy(&both, x, kVecBytes);
  return {float_of(both << 16), float_of(both & 0xffff0000u)};
}
// Rounds to nearest even, in the upper half of each lane. NaN needs no special case: it comes from
// a bfloat16, from an operation, or from rows.cpp, so its lower half is 0, and rounding cannot
// carry into the sign.
FASTRL_INLINE vuint round_to_bfloat16(vfloat x) {
  const vuint bits = bits_of(x);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}
FASTRL_INLINE void store_pair(BFloat16* x, VecPair pair) {
  const vuint both = (round_to_bfloat16(pair.a) >> 16) | (round_to_bfloat16(pair.b) & 0xffff0000u);
  __builtin_memcpy(x, &both, kVecBytes);
}

#if FASTRL_VEC_BYTES == 64
FASTRL_INLINE vfloat load_half(const Half* x) {
  return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
FASTRL_INLINE void store_half(Half* x, vfloat y) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(x),
      _mm512_maskz_cvtps_ph(kAllLanes, y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif FASTRL_VEC_BYTES == 32
FASTRL_INLINE vfloat load_half(const Half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
FASTRL_INLINE void store_half(Half* x, vfloat y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(x),
                   _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
FASTRL_INLINE vfloat load_half(const Half* x) {
  vhalfwords words;
  __builtin_memcpy(&words, x, kVecBytes / 2);
  const vuint half = __builtin_convertvector(words, vuint);
  const vuint exponent = half & 0x7c00u;
  const vuint shifted = (half & 0x7fffu) << 13;
  const vuint normal = shifted + ((127u - 15u) << 23);
  const vuint special = shifted + ((255u - 31u) << 23);  // inf, NaN
  // 2^-14 * (1 + mantissa) - 2^-14
  const vuint subnormal =
      bits_of(float_of(shifted + (113u << 23)) - float_of(vuint{} + (113u << 23)));
  const vuint is_special = reinterpret_cast<vuint>(exponent == 0x7c00u);
  const vuint is_subnormal = reinterpret_cast<vuint>(exponent == 0u);
  const vuint magnitude =
      (special & is_special) | (subnormal & is_subnormal) | (normal & ~(is_special | is_subnormal));
  return float_of(magnitude | ((half & 0x8000u) << 16));
}
FASTRL_INLINE void store_half(Half* x, vfloat y) {
  const vuint sign = bits_of(y) & 0x80000000u;
  const vuint bits = bits_of(y) ^ sign;
  // below 2^-14 an addition of 0.5 rounds to multiples of 2^-24
  const vuint subnormal = bits_of(float_of(bits) + fill(0.5f)) - 0x3f000000u;
  const vuint normal = (bits - ((127u - 15u) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const vuint is_subnormal = reinterpret_cast<vuint>(bits < (113u << 23));
  const vuint is_huge = reinterpret_cast<vuint>(bits >= (143u << 23));
  const vuint is_nan = reinterpret_cast<vuint>(bits > 0x7f800000u);
  const vuint huge = 0x7c00u | (is_nan & 0x0200u);
  const vuint half = (huge & is_huge) | (subnormal & is_subnormal) |
                     (normal & ~(is_huge | is_subnormal)) | (sign >> 16);
  const vhalfwords words = __builtin_convertvector(half, vhalfwords);
  __builtin_memcpy(x, &words, kVecBytes / 2);
}
#endif
FASTRL_INLINE VecPair load_pair(const Half* x) { return {load_half(x), load_half(x + kLanes)}; }
FASTRL_INLINE void store_pair(Half* x, VecPair pair) {
  store_half(x, pair.a);
  store_half(x + kLanes, pair.b);
}

// --- functions --------------------------------------------------------------------------------

// 2^t for t <= 127 to about one unit in the last place: exactly 1 at 0, and 0 for -inf and wherever
// the result would be subnormal (AVX-512: smaller still). NaN stays NaN. The polynomials are
// minimax fits of 2^r with the constant held at 1.
#if FASTRL_VEC_BYTES == 64
FASTRL_INLINE vfloat exp2(vfloat t) {
  // 2^t = 2^r 2^floor(t); scalef takes the floor itself
  const vfloat r = _mm512_maskz_reduce_ps(kAllLanes, t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vfloat p = fill(0x1.e974fcp-10f);
  p = p * r + 0x1.277854p-7f;
  p = p * r + 0x1.c91ce6p-5f;
  p = p * r + 0x1.ebdb56p-3f;
  p = p * r + 0x1.62e4bap-1f;
  p = p * r + 1.0f;
  return _mm512_maskz_scalef_ps(kAllLanes, p, t);
}
#else
FASTRL_INLINE vfloat exp2(vfloat t) {
  constexpr float kMagic = 0x1.8p23f + 127.0f;  // adding it rounds to an integer, exponent biased
  const vfloat bounded = at_least(fill(-127.0f), t);
  const vfloat biased = bounded + kMagic;
  const vfloat r = bounded - (biased - kMagic);
  vfloat p = fill(0x1.5bba14p-10f);
  p = p * r + 0x1.3cea88p-7f;
  p = p * r + 0x1.c6b752p-5f;
  p = p * r + 0x1.ebf9bcp-3f;
  p = p * r + 0x1.62e42ap-1f;
  p = p * r + 1.0f;
  return p * float_of(bits_of(biased) << 23);
}
#endif

// exp and expm1 to a few units in the last place, also next to 0: x = n ln 2 + r in two parts.
struct Exponential {
  vfloat value, minus_one;
};
FASTRL_INLINE Exponential exponential(vfloat x) {
  constexpr float kMagic = 0x1.8p23f + 127.0f;
  const vfloat bounded = at_most(fill(88.0f), at_least(fill(-87.0f), x));
  const vfloat biased = bounded * 1.44269504f + kMagic;
  const vfloat n = biased - kMagic;
  const vfloat r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  vfloat p = fill(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const vfloat growth = p * (r * r) + r;
  const vfloat scale = float_of(bits_of(biased) << 23);
  const vfloat value = growth * scale + scale;
  return {where(x < -87.0f, vfloat{}, value), growth * scale + (scale - 1.0f)};
}

// tanh(by x) and its derivative 1 - tanh^2, both to a few units in the last place of the result;
// x = -inf stays -inf.
struct Squashed {
  vfloat value, derivative;
};
FASTRL_INLINE Squashed squash(vfloat x, float by) {
  const vfloat u = x * by;
  const vuint sign = bits_of(u) & 0x80000000u;
  const vfloat magnitude = float_of(bits_of(u) ^ sign);
  const vfloat u2 = u * u;
  vfloat p = fill(-5.70498872745e-3f);
  p = p * u2 + 2.06390887954e-2f;
  p = p * u2 - 5.37397155531e-2f;
  p = p * u2 + 1.33314422036e-1f;
  p = p * u2 - 3.33332819422e-1f;
  const vfloat near = u + u * u2 * p;
  const vfloat q = exp2(at_most(fill(60.0f), magnitude) * -2.885390081777927f);  // exp(-2 |u|)
  const vfloat far = float_of(bits_of((1.0f - q) / (1.0f + q)) | sign);
  const vint is_near = magnitude < 0.625f;
  const vint is_excluded = x == fill(-HUGE_VALF);  // a logit of -inf stays -inf
  return {where(is_excluded, x, where(is_near, near, far)),
          where(is_near, 1.0f - near * near, 4.0f * q / ((1.0f + q) * (1.0f + q)))};
}
