// What instructions compute, lane by lane.
#include "lanes.h"

namespace ptx {
namespace {

#define INTEGERS(u, T, bits)                                                                   \
  PLAIN("add." u#bits, T, uint64_t(a) + b), PLAIN("sub." u#bits, T, uint64_t(a) - b),          \
      PLAIN("mul.lo." u#bits, T, uint64_t(a) * b),                                             \
      PLAIN("mad.lo." u#bits, T, uint64_t(a) * b + c), PLAIN("min." u#bits, T, a < b ? a : b), \
      PLAIN("max." u#bits, T, a > b ? a : b),                                                  \
      PLAIN("div." u#bits, T, b == 0 ? T(-1) : quotient(a, b)),                                \
      PLAIN("rem." u#bits, T, b == 0 ? a : remainder_of(a, b)),                                \
      SHIFT("shr." u#bits, T, b >= bits ? (a < 0 ? T(-1) : T(0)) : T(a >> b)),                 \
      COMPARISON("eq." u#bits, T, a == b), COMPARISON("ne." u#bits, T, a != b),                \
      COMPARISON("lt." u#bits, T, a < b), COMPARISON("le." u#bits, T, a <= b),                 \
      COMPARISON("gt." u#bits, T, a > b), COMPARISON("ge." u#bits, T, a >= b),                 \
      SELECTION(u#bits, T)
#define BITS(T, bits)                                                                              \
  PLAIN("and.b" #bits, T, a& b), PLAIN("or.b" #bits, T, a | b), PLAIN("xor.b" #bits, T, a ^ b),    \
      PLAIN("not.b" #bits, T, ~a),                                                                 \
      SHIFT("shl.b" #bits, T, b >= bits ? T(0) : T(uint64_t(a) << b)), PLAIN("mov.b" #bits, T, a), \
      SELECTION("b" #bits, T), COMPARISON("eq.b" #bits, T, a == b),                                \
      COMPARISON("ne.b" #bits, T, a != b)
#define FLOATS(name, T)                                                          \
  COMPARISON("eq." name, T, float(a) == float(b)),                               \
      COMPARISON("ne." name, T, float(a) < float(b) || float(a) > float(b)),     \
      COMPARISON("lt." name, T, float(a) < float(b)),                            \
      COMPARISON("le." name, T, float(a) <= float(b)),                           \
      COMPARISON("gt." name, T, float(a) > float(b)),                            \
      COMPARISON("ge." name, T, float(a) >= float(b)),                           \
      COMPARISON("neu." name, T, !(float(a) == float(b))),                       \
      COMPARISON("equ." name, T, !(float(a) < float(b) || float(a) > float(b))), \
      COMPARISON("ltu." name, T, !(float(a) >= float(b))),                       \
      COMPARISON("leu." name, T, !(float(a) > float(b))),                        \
      COMPARISON("gtu." name, T, !(float(a) <= float(b))),                       \
      COMPARISON("geu." name, T, !(float(a) < float(b))),                        \
      COMPARISON("num." name, T, float(a) == float(a) && float(b) == float(b)),  \
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

// A GPU has one NaN, so that lanes that add the same numbers in another order agree on it.
float canonical(float x) { return x == x ? x : std::bit_cast<float>(0x7fffffffu); }
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
// The sum of an exact product and c, rounded down (or, for c alone, towards zero).
float toward(double sum, double rest, bool to_zero) {
  float x = static_cast<float>(sum);
  const double above = static_cast<double>(x) - sum;  // > 0: rounded up
  const bool up = above > 0 || (above == 0 && rest < 0),
             down = above < 0 || (above == 0 && rest > 0);
  if (!std::isfinite(sum)) return x;
  if (up && (!to_zero || sum > 0)) return std::nextafter(x, -INFINITY);
  if (down && to_zero && sum < 0) return std::nextafter(x, INFINITY);
  return x;
}
float rounded_sum(double a, double b, bool to_zero) {
  const double sum = a + b, of_b = sum - a;
  return toward(sum, (a - (sum - of_b)) + (b - of_b), to_zero);
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
#define APPROXIMATE(name, units, ftz, expression)                                           \
  Operation {                                                                               \
    name, [](Machine& machine, Warp& w, const Instruction& i, uint32_t lanes) {             \
      const float* x = w.reg<float>(i.s[0]);                                                \
      const float* y = w.reg<float>(i.s[1]);                                                \
      return each<float>(w, i, lanes, [&](int l) {                                          \
        const double a = ftz ? flushed(x[l]) : x[l];                                        \
        [[maybe_unused]] const double b = y[l];                                             \
        const double exact = expression;                                                    \
        int exponent;                                                                       \
        const bool power = std::fabs(std::frexp(exact, &exponent)) == 0.5;                  \
        if (!std::isfinite(exact) || exact == 0 || power) return static_cast<float>(exact); \
        const double off = machine.error(i.operation, std::bit_cast<uint32_t>(x[l]));       \
        const float found = static_cast<float>(exact + off * (units - 0.5) * unit(exact));  \
        return ftz ? flushed(found) : found;                                                \
      });                                                                                   \
    }                                                                                       \
  }

}  // namespace

const std::vector<Operation>& arithmetic() {
  static const std::vector<Operation> all = {
      INTEGERS("s", int64_t, 64),
      INTEGERS("u", uint64_t, 64),
      INTEGERS("s", int32_t, 32),
      INTEGERS("u", uint32_t, 32),
      INTEGERS("s", int16_t, 16),
      INTEGERS("u", uint16_t, 16),
      BITS(uint64_t, 64),
      BITS(uint32_t, 32),
      BITS(uint16_t, 16),
      FLOATS("f32", float),
      FLOATS("f16", Half),
      FLOATS("bf16", BFloat16),
      SELECTION("f32", float),
      PREDICATES("and", a & b),
      PREDICATES("or", a | b),
      PREDICATES("xor", a ^ b),
      PREDICATES("not", ~a),
      PREDICATES("mov", a),
      PLAIN("neg.s64", int64_t, -uint64_t(a)),
      PLAIN("neg.s32", int32_t, -uint32_t(a)),
      PLAIN("abs.s32", int32_t, a < 0 ? -uint32_t(a) : uint32_t(a)),
      OPERATION("mul.wide.s32", int64_t, int32_t, int32_t, int64_t, int64_t(a) * b),
      OPERATION("mul.wide.u32", uint64_t, uint32_t, uint32_t, uint64_t, uint64_t(a) * b),
      OPERATION("mul.wide.s16", int32_t, int16_t, int16_t, int32_t, int32_t(a) * b),
      OPERATION("mul.wide.u16", uint32_t, uint16_t, uint16_t, uint32_t, uint32_t(a) * b),
      OPERATION("mad.wide.s32", int64_t, int32_t, int32_t, int64_t, int64_t(a) * b + uint64_t(c)),
      OPERATION("mad.wide.u32", uint64_t, uint32_t, uint32_t, uint64_t, uint64_t(a) * b + c),
      OPERATION("mad.wide.s16", int32_t, int16_t, int16_t, int32_t, int32_t(a) * b + uint32_t(c)),
      OPERATION("popc.b32", uint32_t, uint32_t, uint32_t, uint32_t, std::popcount(a)),
      OPERATION("shf.r.wrap.b32", uint32_t, uint32_t, uint32_t, uint32_t,
                (uint64_t(b) << 32 | a) >> (c & 31)),
      PLAIN("mov.f32", float, a),
      PLAIN("add.f32", float, canonical(a + b)),
      PLAIN("add.rn.f32", float, canonical(a + b)),
      PLAIN("sub.f32", float, canonical(a - b)),
      PLAIN("sub.rn.f32", float, canonical(a - b)),
      PLAIN("mul.f32", float, canonical(a * b)),
      PLAIN("mul.rn.f32", float, canonical(a * b)),
      PLAIN("fma.rn.f32", float, canonical(std::fma(a, b, c))),
      PLAIN("fma.rn.ftz.f32", float, flushed(std::fma(flushed(a), flushed(b), flushed(c)))),
      PLAIN("fma.rm.f32", float, rounded_sum(double(a) * b, c, false)),
      PLAIN("add.rz.f32", float, rounded_sum(a, b, true)),
      PLAIN("neg.f32", float, -a),
      PLAIN("abs.f32", float, std::fabs(a)),
      PLAIN("min.f32", float, smaller(a, b)),
      PLAIN("max.f32", float, larger(a, b)),
      PLAIN("max.NaN.f32", float, max_nan(a, b)),
      PLAIN("div.rn.f32", float, a / b),
      PLAIN("rcp.rn.f32", float, 1.0f / a),
      PLAIN("sqrt.rn.f32", float, std::sqrt(a)),
      APPROXIMATE("ex2.approx.f32", 2, false, std::exp2(a)),
      APPROXIMATE("ex2.approx.ftz.f32", 2, true, std::exp2(a)),
      APPROXIMATE("rcp.approx.ftz.f32", 1, true, 1 / a),
      APPROXIMATE("rsqrt.approx.ftz.f32", 2, true, 1 / std::sqrt(a)),
      APPROXIMATE("div.full.f32", 2, false, a / b),
  };
  return all;
}

}  // namespace ptx
