// What instructions compute, lane by lane.
#include <array>
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

struct BFloat16 {
  uint16_t bits;
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
using Half = _Float16;
BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <typename T, typename F>
[[gnu::always_inline]] inline Outcome each(Warp& w, const Instruction& i, uint32_t lanes, F&& f) {
  alignas(64) T out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = f(l);
  if (i.d[0] == kNowhere) return Outcome::kNext;
  T* to = w.reg<T>(i.d[0]);
  if (lanes == kAll) {
    std::memcpy(to, out, sizeof(out));
  } else {
    for (int l = 0; l < kLanes; ++l) {
      if (lanes >> l & 1) to[l] = out[l];
    }
  }
  return Outcome::kNext;
}
void put_predicate(Warp& w, int32_t slot, uint32_t lanes, uint32_t bits) {
  uint32_t& to = *w.reg<uint32_t>(slot);
  to = (to & ~lanes) | (bits & lanes);
}

// T: the type that is computed in; a, b, c: the sources; `expression` has the lane's values.
#define OPERATION(name, R, A, B, C, expression)                                               \
  Operation {                                                                                 \
    name, [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) {                       \
      const A* x = w.reg<A>(i.s[0]);                                                          \
      const B* y = w.reg<B>(i.s[1]);                                                          \
      const C* z = w.reg<C>(i.s[2]);                                                          \
      return each<R>(w, i, lanes, [&](int l) -> R {                                           \
        [[maybe_unused]] const A a = x[l];                                                    \
        [[maybe_unused]] const B b = y[l];                                                    \
        [[maybe_unused]] const C c = z[l];                                                    \
        return static_cast<R>(expression);                                                    \
      });                                                                                     \
    }                                                                                         \
  }
#define PLAIN(name, T, expression) OPERATION(name, T, T, T, T, expression)
#define SHIFT(name, T, expression) OPERATION(name, T, T, uint32_t, T, expression)
#define COMPARISON(name, T, expression)                                   \
  Operation {                                                             \
    "setp." name, [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) { \
      const T* x = w.reg<T>(i.s[0]);                                      \
      const T* y = w.reg<T>(i.s[1]);                                      \
      uint32_t bits = 0;                                                  \
      for (int l = 0; l < kLanes; ++l) {                                  \
        [[maybe_unused]] const T a = x[l], b = y[l];                      \
        bits |= static_cast<uint32_t>(expression) << l;                   \
      }                                                                   \
      put_predicate(w, i.d[0], lanes, bits);                              \
      return Outcome::kNext;                                              \
    }                                                                     \
  }
#define PREDICATES(name, expression)                                      \
  Operation {                                                             \
    name ".pred", [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) { \
      const uint32_t a = *w.reg<uint32_t>(i.s[0]);                        \
      [[maybe_unused]] const uint32_t b = i.s[1] ? *w.reg<uint32_t>(i.s[1]) : 0;  \
      put_predicate(w, i.d[0], lanes, expression);                        \
      return Outcome::kNext;                                              \
    }                                                                     \
  }
#define SELECTION(name, T)                                                \
  Operation {                                                             \
    "selp." name, [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) { \
      const T* x = w.reg<T>(i.s[0]);                                      \
      const T* y = w.reg<T>(i.s[1]);                                      \
      const uint32_t c = *w.reg<uint32_t>(i.s[2]);                        \
      return each<T>(w, i, lanes, [&](int l) { return c >> l & 1 ? x[l] : y[l]; });  \
    }                                                                     \
  }
#define INTEGERS(u, T, bits)                                                         \
  PLAIN("add." u #bits, T, uint64_t(a) + b), PLAIN("sub." u #bits, T, uint64_t(a) - b),  \
      PLAIN("mul.lo." u #bits, T, uint64_t(a) * b),                                  \
      PLAIN("mad.lo." u #bits, T, uint64_t(a) * b + c), PLAIN("min." u #bits, T, a < b ? a : b),  \
      PLAIN("max." u #bits, T, a > b ? a : b), PLAIN("div." u #bits, T, b == 0 ? T(-1) : quotient(a, b)),  \
      PLAIN("rem." u #bits, T, b == 0 ? a : remainder_of(a, b)),                     \
      SHIFT("shr." u #bits, T, b >= bits ? (a < 0 ? T(-1) : T(0)) : T(a >> b)),      \
      COMPARISON("eq." u #bits, T, a == b), COMPARISON("ne." u #bits, T, a != b),    \
      COMPARISON("lt." u #bits, T, a < b), COMPARISON("le." u #bits, T, a <= b),     \
      COMPARISON("gt." u #bits, T, a > b), COMPARISON("ge." u #bits, T, a >= b), SELECTION(u #bits, T)
#define BITS(T, bits)                                                                 \
  PLAIN("and.b" #bits, T, a & b), PLAIN("or.b" #bits, T, a | b), PLAIN("xor.b" #bits, T, a ^ b),  \
      PLAIN("not.b" #bits, T, ~a), SHIFT("shl.b" #bits, T, b >= bits ? T(0) : T(uint64_t(a) << b)),  \
      PLAIN("mov.b" #bits, T, a), SELECTION("b" #bits, T), COMPARISON("eq.b" #bits, T, a == b),  \
      COMPARISON("ne.b" #bits, T, a != b)
#define FLOATS(name, T)                                                               \
  COMPARISON("eq." name, T, float(a) == float(b)), COMPARISON("ne." name, T, float(a) < float(b) || float(a) > float(b)),  \
      COMPARISON("lt." name, T, float(a) < float(b)), COMPARISON("le." name, T, float(a) <= float(b)),  \
      COMPARISON("gt." name, T, float(a) > float(b)), COMPARISON("ge." name, T, float(a) >= float(b)),  \
      COMPARISON("neu." name, T, !(float(a) == float(b))), COMPARISON("equ." name, T, !(float(a) < float(b) || float(a) > float(b))),  \
      COMPARISON("ltu." name, T, !(float(a) >= float(b))), COMPARISON("leu." name, T, !(float(a) > float(b))),  \
      COMPARISON("gtu." name, T, !(float(a) <= float(b))), COMPARISON("geu." name, T, !(float(a) < float(b))),  \
      COMPARISON("num." name, T, float(a) == float(a) && float(b) == float(b)),       \
      COMPARISON("nan." name, T, !(float(a) == float(a) && float(b) == float(b)))

template <typename T>
T quotient(T a, T b) {
  if constexpr (std::is_signed_v<T>) {
    if (b == T(-1)) return static_cast<T>(-static_cast<uint64_t>(a));
  }
  return a / b;
}
template <typename T>
T remainder_of(T a, T b) {
  if constexpr (std::is_signed_v<T>) {
    if (b == T(-1)) return 0;
  }
  return a % b;
}

// --- float32

float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
// The sum of an exact product and c, rounded down (or, for c alone, towards zero).
float toward(double sum, double rest, bool to_zero) {
  float x = static_cast<float>(sum);
  const double above = static_cast<double>(x) - sum;  // > 0: rounded up
  const bool up = above > 0 || (above == 0 && rest < 0), down = above < 0 || (above == 0 && rest > 0);
  if (!std::isfinite(sum)) return x;
  if (up && (!to_zero || sum > 0)) return std::nextafter(x, -INFINITY);
  if (down && to_zero && sum < 0) return std::nextafter(x, INFINITY);
  return x;
}
float rounded_sum(double a, double b, bool to_zero) {
  const double sum = a + b, of_b = sum - a;
  return toward(sum, (a - (sum - of_b)) + (b - of_b), to_zero);
}
template <typename F>
float max_nan(F a, F b) {
  const float x = a, y = b;
  if (std::isnan(x) || std::isnan(y)) return std::numeric_limits<float>::quiet_NaN();
  if (x == 0 && y == 0) return std::signbit(x) ? y : x;
  return x > y ? x : y;
}
float smaller(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
float larger(float a, float b) { return -smaller(-a, -b); }

// Approximate functions: off by less than so many units in the last place, as NVIDIA states them.
// Powers of two are exact, on which its own expm1f relies.
double unit(double x) { return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 23); }
#define APPROXIMATE(name, units, ftz, expression)                                          \
  Operation {                                                                              \
    name, [](Machine& machine, Warp& w, const Instruction& i, uint32_t lanes) {            \
      const float* x = w.reg<float>(i.s[0]);                                               \
      const float* y = w.reg<float>(i.s[1]);                                               \
      return each<float>(w, i, lanes, [&](int l) {                                         \
        const double a = ftz ? flushed(x[l]) : x[l];                                       \
        [[maybe_unused]] const double b = y[l];                                            \
        const double exact = expression;                                                   \
        int exponent;                                                                      \
        const bool power = std::fabs(std::frexp(exact, &exponent)) == 0.5;                 \
        if (!std::isfinite(exact) || exact == 0 || power) return static_cast<float>(exact);  \
        const double off = machine.error(i.operation, std::bit_cast<uint32_t>(x[l]));      \
        const float found = static_cast<float>(exact + off * (units - 0.5) * unit(exact));   \
        return ftz ? flushed(found) : found;                                               \
      });                                                                                  \
    }                                                                                      \
  }

// --- conversions

int64_t integer(const Warp& w, int32_t slot, int width, bool is_signed, int bits, int lane) {
  Warp& warp = const_cast<Warp&>(w);
  uint64_t x = width == 64   ? warp.reg<uint64_t>(slot)[lane]
               : width == 32 ? warp.reg<uint32_t>(slot)[lane]
                             : warp.reg<uint16_t>(slot)[lane];
  if (bits == 64) return static_cast<int64_t>(x);
  x &= (uint64_t{1} << bits) - 1;
  if (is_signed && x >> (bits - 1) & 1) x |= ~uint64_t{0} << bits;
  return static_cast<int64_t>(x);
}
void put_integer(Warp& w, int32_t slot, int width, uint32_t lanes, int lane, uint64_t x) {
  if (!(lanes >> lane & 1)) return;
  if (width == 64) {
    w.reg<uint64_t>(slot)[lane] = x;
  } else if (width == 32) {
    w.reg<uint32_t>(slot)[lane] = static_cast<uint32_t>(x);
  } else {
    w.reg<uint16_t>(slot)[lane] = static_cast<uint16_t>(x);
  }
}
template <bool kSignedTo, int kTo, bool kSigned, int kBits>
Outcome convert(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    uint64_t x = integer(w, i.s[0], i.extra[1], kSigned, kBits, l);
    if constexpr (kTo < 64) {
      x &= (uint64_t{1} << kTo) - 1;
      if (kSignedTo && x >> (kTo - 1) & 1) x |= ~uint64_t{0} << kTo;
    }
    put_integer(w, i.d[0], i.extra[0], lanes, l, x);
  }
  return Outcome::kNext;
}
template <bool kSigned, int kBits>
Outcome to_float(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  return each<float>(w, i, lanes, [&](int l) {
    const int64_t x = integer(w, i.s[0], i.extra[1], kSigned, kBits, l);
    return kSigned ? static_cast<float>(x) : static_cast<float>(static_cast<uint64_t>(x));
  });
}
template <typename T>
T truncated(float x) {  // saturates; NaN is 0, in 64 bits the smallest
  if (std::isnan(x)) return sizeof(T) == 8 ? std::numeric_limits<T>::min() : 0;
  constexpr double most = sizeof(T) == 8 ? 9223372036854775808.0 : 2147483648.0;
  if (x >= most) return std::numeric_limits<T>::max();
  if (x < -most) return std::numeric_limits<T>::min();
  return static_cast<T>(x);
}
#define FROM(d, signed_to, to)                                                              \
  Operation{"cvt." d ".s64", convert<signed_to, to, true, 64>},                             \
      Operation{"cvt." d ".u64", convert<signed_to, to, false, 64>},                        \
      Operation{"cvt." d ".s32", convert<signed_to, to, true, 32>},                         \
      Operation{"cvt." d ".u32", convert<signed_to, to, false, 32>},                        \
      Operation{"cvt." d ".s16", convert<signed_to, to, true, 16>},                         \
      Operation{"cvt." d ".u16", convert<signed_to, to, false, 16>},                        \
      Operation{"cvt." d ".s8", convert<signed_to, to, true, 8>},                           \
      Operation{"cvt." d ".u8", convert<signed_to, to, false, 8>}

template <typename T, uint16_t (*kNarrow)(float)>
Outcome pack_two(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  const float *high = w.reg<float>(i.s[0]), *low = w.reg<float>(i.s[1]);
  return each<uint32_t>(w, i, lanes, [&](int l) {
    return static_cast<uint32_t>(kNarrow(high[l])) << 16 | kNarrow(low[l]);
  });
}
uint16_t narrow_bfloat16(float x) { return to_bfloat16(x).bits; }
uint16_t narrow_half(float x) {
  return std::isnan(x) ? 0x7fff : std::bit_cast<uint16_t>(static_cast<Half>(x));
}
template <typename T>
uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  uint32_t both = 0;
  for (int shift : {0, 16}) {
    const T x = std::bit_cast<T>(static_cast<uint16_t>(a >> shift));
    const T y = std::bit_cast<T>(static_cast<uint16_t>(b >> shift));
    const float most = max_nan(x, y);
    uint16_t bits;
    if constexpr (std::is_same_v<T, Half>) {
      bits = narrow_half(most);
    } else {
      bits = narrow_bfloat16(most);
    }
    both |= static_cast<uint32_t>(bits) << shift;
  }
  return both;
}
uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t which = selector >> 4 * n & 0xf;
    uint8_t byte = static_cast<uint8_t>(both >> 8 * (which & 7));
    if (which & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= static_cast<uint32_t>(byte) << 8 * n;
  }
  return out;
}
template <typename T>
T field(T a, uint32_t start, uint32_t length) {
  start &= 0xff, length &= 0xff;
  constexpr uint32_t kBits = 8 * sizeof(T);
  if (length == 0 || start >= kBits) return length && std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
  T x = a >> start;
  if (length >= kBits) return x;
  const uint64_t mask = (uint64_t{1} << length) - 1;
  const bool negative = std::is_signed_v<T> && x >> (length - 1) & 1;
  return static_cast<T>((x & mask) | (negative ? ~mask : 0));
}
uint32_t inserted(uint32_t a, uint32_t b, uint32_t start, uint32_t length) {
  start &= 0xff, length &= 0xff;
  if (start >= 32) return b;
  const uint32_t mask = (length >= 32 ? kAll : (1u << length) - 1) << start;
  return (a << start & mask) | (b & ~mask);
}

template <typename Wide, typename Part>
Outcome pack(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  const Part *low = w.reg<Part>(i.s[0]), *high = w.reg<Part>(i.s[1]);
  return each<Wide>(w, i, lanes, [&](int l) {
    return static_cast<Wide>(high[l]) << 8 * sizeof(Part) | low[l];
  });
}
template <typename Wide, typename Part>
Outcome unpack(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  alignas(64) Wide whole[kLanes];
  std::memcpy(whole, w.reg<Wide>(i.s[0]), sizeof(whole));
  for (int part = 0; part < 2; ++part) {
    if (i.d[part] == kNowhere) continue;
    Part* to = w.reg<Part>(i.d[part]);
    for (int l = 0; l < kLanes; ++l) {
      if (lanes >> l & 1) to[l] = static_cast<Part>(whole[l] >> part * 8 * sizeof(Part));
    }
  }
  return Outcome::kNext;
}
Outcome insert_bits(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t* s[4];
  for (int n = 0; n < 4; ++n) s[n] = w.reg<uint32_t>(i.s[n]);
  return each<uint32_t>(
      w, i, lanes, [&](int l) { return inserted(s[0][l], s[1][l], s[2][l], s[3][l]); });
}

// Of the lower halves, then of the upper ones.
template <typename T>
Outcome equal_pairs(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int half = 0; half < 2; ++half) {
    const auto *a = w.reg<T>(i.s[0]) + half, *b = w.reg<T>(i.s[1]) + half;
    uint32_t bits = 0;
    for (int l = 0; l < kLanes; ++l) bits |= static_cast<uint32_t>(float(a[2 * l]) == float(b[2 * l])) << l;
    if (i.d[half] != kNowhere) put_predicate(w, i.d[half], lanes, bits);
  }
  return Outcome::kNext;
}

}  // namespace

const std::vector<Operation>& arithmetic() {
  static const std::vector<Operation> all = {
      INTEGERS("s", int64_t, 64), INTEGERS("u", uint64_t, 64), INTEGERS("s", int32_t, 32),
      INTEGERS("u", uint32_t, 32), INTEGERS("s", int16_t, 16), INTEGERS("u", uint16_t, 16),
      BITS(uint64_t, 64), BITS(uint32_t, 32), BITS(uint16_t, 16),
      FLOATS("f32", float), FLOATS("f16", Half), FLOATS("bf16", BFloat16),
      SELECTION("f32", float), Operation{"setp.eq.f16x2", equal_pairs<Half>},
      Operation{"setp.eq.bf16x2", equal_pairs<BFloat16>},
      PREDICATES("and", a & b), PREDICATES("or", a | b), PREDICATES("xor", a ^ b),
      PREDICATES("not", ~a), PREDICATES("mov", a),
      PLAIN("neg.s64", int64_t, -uint64_t(a)), PLAIN("neg.s32", int32_t, -uint32_t(a)),
      PLAIN("abs.s32", int32_t, a < 0 ? -uint32_t(a) : uint32_t(a)),
      OPERATION("mul.wide.s32", int64_t, int32_t, int32_t, int64_t, int64_t(a) * b),
      OPERATION("mul.wide.u32", uint64_t, uint32_t, uint32_t, uint64_t, uint64_t(a) * b),
      OPERATION("mul.wide.s16", int32_t, int16_t, int16_t, int32_t, int32_t(a) * b),
      OPERATION("mul.wide.u16", uint32_t, uint16_t, uint16_t, uint32_t, uint32_t(a) * b),
      OPERATION("mad.wide.s32", int64_t, int32_t, int32_t, int64_t, int64_t(a) * b + uint64_t(c)),
      OPERATION("mad.wide.u32", uint64_t, uint32_t, uint32_t, uint64_t, uint64_t(a) * b + c),
      OPERATION("mad.wide.s16", int32_t, int16_t, int16_t, int32_t, int32_t(a) * b + uint32_t(c)),
      OPERATION("popc.b32", uint32_t, uint32_t, uint32_t, uint32_t, std::popcount(a)),
      OPERATION("prmt.b32", uint32_t, uint32_t, uint32_t, uint32_t, permuted(a, b, c)),
      OPERATION("bfe.u32", uint32_t, uint32_t, uint32_t, uint32_t, field(a, b, c)),
      OPERATION("bfe.u64", uint64_t, uint64_t, uint32_t, uint32_t, field(a, b, c)),
      OPERATION("bfe.s32", int32_t, int32_t, uint32_t, uint32_t, field(a, b, c)),
      OPERATION("shf.r.wrap.b32", uint32_t, uint32_t, uint32_t, uint32_t,
                (uint64_t(b) << 32 | a) >> (c & 31)),
      Operation{"bfi.b32", insert_bits},
      Operation{"pack.b64", pack<uint64_t, uint32_t>}, Operation{"pack.b32", pack<uint32_t, uint16_t>},
      Operation{"unpack.b64", unpack<uint64_t, uint32_t>},
      Operation{"unpack.b32", unpack<uint32_t, uint16_t>},
      PLAIN("mov.f32", float, a),
      PLAIN("add.f32", float, a + b), PLAIN("add.rn.f32", float, a + b),
      PLAIN("sub.f32", float, a - b), PLAIN("sub.rn.f32", float, a - b),
      PLAIN("mul.f32", float, a * b), PLAIN("mul.rn.f32", float, a * b),
      PLAIN("fma.rn.f32", float, std::fma(a, b, c)),
      PLAIN("fma.rn.ftz.f32", float, flushed(std::fma(flushed(a), flushed(b), flushed(c)))),
      PLAIN("fma.rm.f32", float, rounded_sum(double(a) * b, c, false)),
      PLAIN("add.rz.f32", float, rounded_sum(a, b, true)),
      PLAIN("neg.f32", float, -a), PLAIN("abs.f32", float, std::fabs(a)),
      PLAIN("min.f32", float, smaller(a, b)), PLAIN("max.f32", float, larger(a, b)),
      PLAIN("max.NaN.f32", float, max_nan(a, b)),
      PLAIN("max.NaN.bf16x2", uint32_t, max_of_pairs<BFloat16>(a, b)),
      PLAIN("max.NaN.f16x2", uint32_t, max_of_pairs<Half>(a, b)),
      PLAIN("div.rn.f32", float, a / b), PLAIN("rcp.rn.f32", float, 1.0f / a),
      PLAIN("sqrt.rn.f32", float, std::sqrt(a)),
      APPROXIMATE("ex2.approx.f32", 2, false, std::exp2(a)),
      APPROXIMATE("ex2.approx.ftz.f32", 2, true, std::exp2(a)),
      APPROXIMATE("rcp.approx.ftz.f32", 1, true, 1 / a),
      APPROXIMATE("rsqrt.approx.ftz.f32", 2, true, 1 / std::sqrt(a)),
      APPROXIMATE("div.full.f32", 2, false, a / b),
      FROM("s64", true, 64), FROM("u64", false, 64), FROM("s32", true, 32), FROM("u32", false, 32),
      FROM("s16", true, 16), FROM("u16", false, 16), FROM("s8", true, 8), FROM("u8", false, 8),
      Operation{"cvt.rn.f32.s64", to_float<true, 64>}, Operation{"cvt.rn.f32.u64", to_float<false, 64>},
      Operation{"cvt.rn.f32.s32", to_float<true, 32>}, Operation{"cvt.rn.f32.u32", to_float<false, 32>},
      Operation{"cvt.rn.f32.s16", to_float<true, 16>}, Operation{"cvt.rn.f32.u16", to_float<false, 16>},
      OPERATION("cvt.rni.f32.f32", float, float, float, float, std::nearbyint(a)),
      OPERATION("cvt.sat.f32.f32", float, float, float, float,
                std::isnan(a) ? 0.0f : std::fmin(std::fmax(a, 0.0f), 1.0f)),
      OPERATION("cvt.rzi.s64.f32", int64_t, float, float, float, truncated<int64_t>(a)),
      OPERATION("cvt.rzi.s32.f32", int32_t, float, float, float, truncated<int32_t>(a)),
      OPERATION("cvt.f32.f16", float, Half, Half, Half, a),
      OPERATION("cvt.f32.bf16", float, BFloat16, BFloat16, BFloat16, a),
      OPERATION("cvt.rn.f16.f32", uint16_t, float, float, float, narrow_half(a)),
      OPERATION("cvt.rn.bf16.f32", uint16_t, float, float, float, narrow_bfloat16(a)),
      Operation{"cvt.rn.bf16x2.f32", pack_two<BFloat16, narrow_bfloat16>},
      Operation{"cvt.rn.f16x2.f32", pack_two<Half, narrow_half>},
  };
  return all;
}

}  // namespace ptx
