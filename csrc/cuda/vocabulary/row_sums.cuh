// The first sweep over a row: its largest logit and the sums of exponentials relative to it.
#pragma once

#include "logits.cuh"
#include "sources.cuh"

namespace fastrl::cuda {

// Sums over all logits but the chosen token's, with t_j = binary_gain * x_j - center(max), an
// exponent of two.
struct RowSums {
  float max;                 // largest raw logit, at least the floor
  float sum, sum_t, sum_sq;  // sum 2^t, sum t 2^t, sum 2^2t
};

enum class Wanted { kSum, kEntropy, kSquares };  // each with those before it

// The exponents of one row.
template <bool kSoftcap>
struct Exponents {
  LogitMap map;

  // The value v in which z is linear; under a softcap it is finite even for a logit of -inf. Both
  // approximations together give v an absolute error of 2^-22; with tanh.approx it would be 2^-11.
  __device__ __forceinline__ float squashed(float x) const {
    return kSoftcap ? fast_reciprocal(-1.0f - fast_exp2(x * map.squash)) : x;
  }
  // The reference of the exponents. The product is rounded on its own, so that every use has the
  // same bits. If all logits are excluded it is 0: the exponent of the floor has a large residue.
  __device__ __forceinline__ float center(float max) const {
    const float center = multiply_rounded(squashed(max), map.binary_gain);
    return max <= map.floor ? 0.0f : center;
  }
  __device__ __forceinline__ float operator()(float x, float center) const {
    if constexpr (kSoftcap) {
      const float t = std::fma(squashed(x), map.binary_gain, -center);
      return x <= map.floor ? -1e4f : t;  // the softcap makes -inf finite
    }
    return std::fma(x, map.binary_gain, -center);
  }
  // The sums relative to `max`, which is at least s.max. The bounds prevent 0 * inf.
  __device__ __forceinline__ RowSums moved(RowSums s, float max) const {
    const float by = std::fmin(std::fmax(center(s.max) - center(max), -1e4f), 0.0f);
    const float factor = fast_exp2(by);
    return {max, s.sum * factor, std::fma(by, s.sum, s.sum_t) * factor,
            s.sum_sq * (factor * factor)};
  }
  __device__ __forceinline__ RowSums nothing() const { return {map.floor, 0, 0, 0}; }
};

// Adds kVectors vectors of a row, with one rescaling for all; values stay packed until used.
template <typename T, bool kSoftcap, Wanted kWanted, int kVectors>
__device__ __forceinline__ void add_vectors(RowSums* sums, const Vec16* x, uint32_t floor,
                                            const Exponents<kSoftcap>& exponents) {
  using E = Element<T>;
  Vec16 raised[kVectors];
  uint32_t largest = floor;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raised[v].word[i] = E::max(x[v].word[i], floor);
      largest = E::max(largest, raised[v].word[i]);
    }
  }
  float halves[2];
  E::unpack(largest, halves);
  const float top = E::kPerWord == 2 ? max_nan(halves[0], halves[1]) : halves[0];
  const RowSums before = exponents.moved(*sums, max_nan(sums->max, top));
  const float center = exponents.center(before.max);

  // two chains of additions each
  float sum[2] = {}, sum_t[2] = {}, sum_sq[2] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2];
      E::unpack(raised[v].word[i], pair);
#pragma unroll
      for (int j = 0; j < E::kPerWord; ++j) {
        const int chain = E::kPerWord == 2 ? j : i % 2;
        const float t = exponents(pair[j], center), e = fast_exp2(t);
        sum[chain] += e;
        if (kWanted >= Wanted::kEntropy) sum_t[chain] = std::fma(e, t, sum_t[chain]);
        if (kWanted >= Wanted::kSquares) sum_sq[chain] = std::fma(e, e, sum_sq[chain]);
      }
    }
  }
  *sums = {before.max, before.sum + (sum[0] + sum[1]), before.sum_t + (sum_t[0] + sum_t[1]),
           before.sum_sq + (sum_sq[0] + sum_sq[1])};
}

// This thread's part of a split: vectors k = thread, thread + kThreads, ... The column `token` of
// the split, if it has one, is left out: a sum near 1 does not tell how far a token is ahead.
template <typename T, bool kSoftcap, Wanted kWanted, int kThreads, typename Source>
__device__ __forceinline__ RowSums sweep_sums(const Source& source, int64_t token,
                                              const Exponents<kSoftcap>& exponents) {
  constexpr int kLanes = Element<T>::kLanes, kAtOnce = 4;
  // with a constant distance between the vectors of a step, addresses cost no instructions
  constexpr ptrdiff_t kStride = kThreads * kLanes;
  const uint32_t floor = filled_word<T>(exponents.map.floor);
  const unsigned shift = source.shift(0);
  RowSums sums = exponents.nothing();
  ptrdiff_t column = thread_index() * kLanes;
  const bool own =
      token >= 0 && token < source.columns && token / kLanes % kThreads == thread_index();
  // the step with the token is left to the end, when its vectors are added one by one
  constexpr ptrdiff_t kStep = kAtOnce * kStride;
  const ptrdiff_t own_step = own ? token / kStep * kStep + column : -1;
  const auto add_steps = [&](unsigned known) {
    for (; column + (kAtOnce - 1) * kStride + kLanes <= source.columns; column += kStep) {
      if (column == own_step) continue;
      Vec16 x[kAtOnce];
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) x[v] = source.vector(column + v * kStride, known);
      add_vectors<T, kSoftcap, kWanted, kAtOnce>(&sums, x, floor, exponents);
    }
  };
  with_known_words<Source>(shift, add_steps);
  int postponed = own && own_step < column ? kAtOnce : 0;
#pragma unroll 1
  for (; column < source.columns || postponed > 0; column += kStride) {
    const ptrdiff_t at =
        column < source.columns ? column : own_step + (kAtOnce - postponed--) * kStride;
    const int place = own ? static_cast<int>(token - at) : -1;
    const Vec16 x = exclude_lanes<T>(source.last_vector(at, shift),
                                     [place](int lane) { return lane == place; });
    add_vectors<T, kSoftcap, kWanted, 1>(&sums, &x, floor, exponents);
  }
  if (own) {  // in float16 the floor times a tiny binary_gain has an exponential
    const float t = exponents(exponents.map.floor, exponents.center(sums.max)), e = fast_exp2(t);
    sums.sum -= e;
    sums.sum_t -= e * t;
    sums.sum_sq -= e * e;
  }
  return sums;
}

// The sums of a warp's lanes together, in every lane.
template <Wanted kWanted, bool kSoftcap>
__device__ __forceinline__ RowSums reduce_sums(RowSums s, const Exponents<kSoftcap>& exponents) {
  float max = s.max;
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) max = max_nan(max, shuffle_xor(max, by));
  s = exponents.moved(s, max);
  // rounded apart: a multiply-add in some of the lanes would give them other bits
  const auto add_lanes = [](float x, int by) { return add_rounded(x, shuffle_xor(x, by)); };
#pragma unroll
  for (int by = kWarp / 2; by > 0; by /= 2) {
    s.sum = add_lanes(s.sum, by);
    if (kWanted >= Wanted::kEntropy) s.sum_t = add_lanes(s.sum_t, by);
    if (kWanted >= Wanted::kSquares) s.sum_sq = add_lanes(s.sum_sq, by);
  }
  return s;
}

// The same for `n` sums in shared memory, or values that convert to sums, by one warp, in turns if
// they are more than its lanes.
template <Wanted kWanted, bool kSoftcap, typename Sums>
__device__ __forceinline__ RowSums reduce_sums(const Sums* all, int n,
                                               const Exponents<kSoftcap>& exponents) {
  RowSums s = exponents.nothing();
  for (int i = thread_index() % kWarp; i < n; i += kWarp) {
    const RowSums other = all[i];
    const float max = max_nan(s.max, other.max);
    const RowSums next = exponents.moved(other, max);
    s = exponents.moved(s, max);
    s = {max, add_rounded(s.sum, next.sum), add_rounded(s.sum_t, next.sum_t),
         add_rounded(s.sum_sq, next.sum_sq)};
  }
  return reduce_sums<kWanted>(s, exponents);
}

}  // namespace fastrl::cuda
