// How an operation computes a value of each lane, and the types of 16 bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {

struct BFloat16 {
  uint16_t bits;
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
using Half = _Float16;
inline BFloat16 to_bfloat16(float x) {
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
inline void put_predicate(Warp& w, int32_t slot, uint32_t lanes, uint32_t bits) {
  uint32_t& to = *w.reg<uint32_t>(slot);
  to = (to & ~lanes) | (bits & lanes);
}

// T: the type that is computed in; a, b, c: the sources; `expression` has the lane's values.
#define OPERATION(name, R, A, B, C, expression)                         \
  Operation {                                                           \
    name, [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) { \
      const A* x = w.reg<A>(i.s[0]);                                    \
      const B* y = w.reg<B>(i.s[1]);                                    \
      const C* z = w.reg<C>(i.s[2]);                                    \
      return each<R>(w, i, lanes, [&](int l) -> R {                     \
        [[maybe_unused]] const A a = x[l];                              \
        [[maybe_unused]] const B b = y[l];                              \
        [[maybe_unused]] const C c = z[l];                              \
        return static_cast<R>(expression);                              \
      });                                                               \
    }                                                                   \
  }
#define PLAIN(name, T, expression) OPERATION(name, T, T, T, T, expression)
#define SHIFT(name, T, expression) OPERATION(name, T, T, uint32_t, T, expression)
#define COMPARISON(name, T, expression)                                         \
  Operation {                                                                   \
    "setp." name, [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) { \
      const T* x = w.reg<T>(i.s[0]);                                            \
      const T* y = w.reg<T>(i.s[1]);                                            \
      uint32_t bits = 0;                                                        \
      for (int l = 0; l < kLanes; ++l) {                                        \
        [[maybe_unused]] const T a = x[l], b = y[l];                            \
        bits |= static_cast<uint32_t>(expression) << l;                         \
      }                                                                         \
      put_predicate(w, i.d[0], lanes, bits);                                    \
      return Outcome::kNext;                                                    \
    }                                                                           \
  }
#define PREDICATES(name, expression)                                             \
  Operation {                                                                    \
    name ".pred", [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) {  \
      const uint32_t a = *w.reg<uint32_t>(i.s[0]);                               \
      [[maybe_unused]] const uint32_t b = i.s[1] ? *w.reg<uint32_t>(i.s[1]) : 0; \
      put_predicate(w, i.d[0], lanes, expression);                               \
      return Outcome::kNext;                                                     \
    }                                                                            \
  }
#define SELECTION(name, T)                                                          \
  Operation {                                                                       \
    "selp." name, [](Machine&, Warp& w, const Instruction& i, uint32_t lanes) {     \
      const T* x = w.reg<T>(i.s[0]);                                                \
      const T* y = w.reg<T>(i.s[1]);                                                \
      const uint32_t c = *w.reg<uint32_t>(i.s[2]);                                  \
      return each<T>(w, i, lanes, [&](int l) { return c >> l & 1 ? x[l] : y[l]; }); \
    }                                                                               \
  }

// The larger one; NaN where one of both is.
template <typename F>
float max_nan(F a, F b) {
  const float x = a, y = b;
  if (std::isnan(x) || std::isnan(y)) return std::numeric_limits<float>::quiet_NaN();
  if (x == 0 && y == 0) return std::signbit(x) ? y : x;
  return x > y ? x : y;
}

}  // namespace ptx
