// Conversions, and operations on the bits and halves of a word.
#include <functional>

#include "lanes.h"

namespace ptx {
namespace {

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
#define FROM(d, signed_to, to)                                                \
  Operation{"cvt." d ".s64", convert<signed_to, to, true, 64>},               \
      Operation{"cvt." d ".u64", convert<signed_to, to, false, 64>},          \
      Operation{"cvt." d ".s32", convert<signed_to, to, true, 32>},           \
      Operation{"cvt." d ".u32", convert<signed_to, to, false, 32>},          \
      Operation{"cvt." d ".s16", convert<signed_to, to, true, 16>},           \
      Operation{"cvt." d ".u16", convert<signed_to, to, false, 16>},          \
      Operation{"cvt." d ".s8", convert<signed_to, to, true, 8>}, Operation { \
    "cvt." d ".u8", convert<signed_to, to, false, 8>                          \
  }

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
  return each<Wide>(w, i, lanes,
                    [&](int l) { return static_cast<Wide>(high[l]) << 8 * sizeof(Part) | low[l]; });
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
  return each<uint32_t>(w, i, lanes,
                        [&](int l) { return inserted(s[0][l], s[1][l], s[2][l], s[3][l]); });
}

// Of the lower halves, then of the upper ones.
template <typename T, typename Compare>
Outcome compare_pairs(Machine&, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int half = 0; half < 2; ++half) {
    const auto *a = w.reg<T>(i.s[0]) + half, *b = w.reg<T>(i.s[1]) + half;
    uint32_t bits = 0;
    for (int l = 0; l < kLanes; ++l)
      bits |= static_cast<uint32_t>(Compare()(float(a[2 * l]), float(b[2 * l]))) << l;
    if (i.d[half] != kNowhere) put_predicate(w, i.d[half], lanes, bits);
  }
  return Outcome::kNext;
}

#define OF_PAIRS(name, Compare)                                               \
  Operation{"setp." name ".f16x2", compare_pairs<Half, Compare>}, Operation { \
    "setp." name ".bf16x2", compare_pairs<BFloat16, Compare>                  \
  }

}  // namespace

const std::vector<Operation>& conversions() {
  static const std::vector<Operation> all = {
      OF_PAIRS("eq", std::equal_to<>),
      OF_PAIRS("lt", std::less<>),
      OF_PAIRS("le", std::less_equal<>),
      OF_PAIRS("gt", std::greater<>),
      OF_PAIRS("ge", std::greater_equal<>),
      OPERATION("prmt.b32", uint32_t, uint32_t, uint32_t, uint32_t, permuted(a, b, c)),
      OPERATION("bfe.u32", uint32_t, uint32_t, uint32_t, uint32_t, field(a, b, c)),
      OPERATION("bfe.u64", uint64_t, uint64_t, uint32_t, uint32_t, field(a, b, c)),
      OPERATION("bfe.s32", int32_t, int32_t, uint32_t, uint32_t, field(a, b, c)),
      Operation{"bfi.b32", insert_bits},
      Operation{"pack.b64", pack<uint64_t, uint32_t>},
      Operation{"pack.b32", pack<uint32_t, uint16_t>},
      Operation{"unpack.b64", unpack<uint64_t, uint32_t>},
      Operation{"unpack.b32", unpack<uint32_t, uint16_t>},
      PLAIN("max.NaN.bf16x2", uint32_t, max_of_pairs<BFloat16>(a, b)),
      PLAIN("max.NaN.f16x2", uint32_t, max_of_pairs<Half>(a, b)),
      FROM("s64", true, 64),
      FROM("u64", false, 64),
      FROM("s32", true, 32),
      FROM("u32", false, 32),
      FROM("s16", true, 16),
      FROM("u16", false, 16),
      FROM("s8", true, 8),
      FROM("u8", false, 8),
      Operation{"cvt.rn.f32.s64", to_float<true, 64>},
      Operation{"cvt.rn.f32.u64", to_float<false, 64>},
      Operation{"cvt.rn.f32.s32", to_float<true, 32>},
      Operation{"cvt.rn.f32.u32", to_float<false, 32>},
      Operation{"cvt.rn.f32.s16", to_float<true, 16>},
      Operation{"cvt.rn.f32.u16", to_float<false, 16>},
      OPERATION("cvt.rni.f32.f32", float, float, float, float, std::nearbyint(a)),
      OPERATION("cvt.sat.f32.f32", float, float, float, float,
                std::isnan(a) ? 0.0f : std::fmin(std::fmax(a, 0.0f), 1.0f)),
      OPERATION("cvt.rzi.s64.f32", int64_t, float, float, float, truncated<int64_t>(a)),
      OPERATION("cvt.rzi.s32.f32", int32_t, float, float, float, truncated<int32_t>(a)),
      OPERATION("mul.rn.f16", uint16_t, Half, Half, Half, narrow_half(float(a) * float(b))),
      OPERATION("mul.rn.bf16", uint16_t, BFloat16, BFloat16, BFloat16,
                narrow_bfloat16(float(a) * float(b))),
      OPERATION("cvt.rn.f32.f64", float, double, double, double, a),
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
