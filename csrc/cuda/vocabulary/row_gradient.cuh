// From the sums of a row to its statistics, and the second sweep, which writes its gradient.
#pragma once

#include "row_sums.cuh"
#include "sources.cuh"

namespace fastrl::cuda {

using RowStats = RowStatsOf<float, bool>;

// The gradient of the loss with respect to the statistics of a row.
struct RowFlow {
  float logprob, logsumexp, entropy;
};

// gradient_j = (constant + linear t_j) 2^t_j [(v^2 + v)], except at the chosen token: the
// derivative of a softcap is 1 - tanh^2 = -4 (v^2 + v).
struct GradientTerms {
  float center, constant, linear, token_gradient;
};

// Below this, the logarithm of a sum near 1 is rounding noise, unless the sum excludes the token.
constexpr float kResolution = 1.2e-7f;

// The exponent of the largest logit: not quite 0, as the center is rounded.
template <bool kSoftcap>
__device__ __forceinline__ float residue(float max, const Exponents<kSoftcap>& exponents) {
  return std::fma(exponents.squashed(max), exponents.map.binary_gain, -exponents.center(max));
}

// `token` is the raw logit of the chosen token, NaN if its id is outside the vocabulary.
template <bool kSoftcap>
__device__ __forceinline__ float logprob_of(float token, float max, float log_sum,
                                            const Exponents<kSoftcap>& exponents) {
  if (kSoftcap && token == -INFINITY) return token - log_sum;  // stays excluded under a softcap
  const float below = exponents.squashed(token) - exponents.squashed(max);
  return std::fma(below, exponents.map.gain, -log_sum);
}

// The statistics of a row from the sums over the others and the token, if it is `known`.
template <bool kSoftcap>
__device__ __forceinline__ RowStats finish(const RowSums& others, float token, bool known,
                                           const Exponents<kSoftcap>& exponents) {
  const LogitMap& map = exponents.map;
  const float x = known ? max_nan(token, map.floor) : map.floor;
  RowSums sums = exponents.moved(others, max_nan(others.max, x));
  const float rest = sums.sum, t = exponents(x, exponents.center(sums.max));
  const float e = known ? fast_exp2(t) : 0.0f;
  sums.sum += e;
  sums.sum_t = std::fma(e, t, sums.sum_t);
  sums.sum_sq = std::fma(e, e, sums.sum_sq);
  const bool empty = sums.max <= map.floor;  // all logits count as -inf: there is no softmax
  const float sum = empty ? NAN : sums.sum;
  const float log_of_sum = std::log(sum);
  RowStats stats;
  stats.row_max = sums.max;
  // explicit multiply-adds, here and below: every kernel computes the same bits
  const float of_max = residue(sums.max, exponents);
  const float log_sum = std::fma(of_max, -kLn2, log_of_sum);
  stats.log_sum = log_sum < kResolution ? 0.0f : log_sum;
  if (x >= others.max && !empty) stats.log_sum = std::log1p(rest * std::exp2(-of_max));
  stats.logprobs = logprob_of(token, sums.max, stats.log_sum, exponents);
  const float entropy = std::fma(sums.sum_t / sum, -kLn2, log_of_sum);
  stats.entropy = entropy < kResolution ? 0.0f : entropy;
  const float top = exponents.squashed(sums.max);
  const float largest = kSoftcap ? top + 0.5f : top;
  stats.logsumexp = empty ? -INFINITY : std::fma(largest, map.gain, stats.log_sum);
  stats.sum_sq_probs = sums.sum_sq / (sum * sum);
  // a logit that counts as -inf; under a softcap it has a value, too
  stats.is_top1 = token <= map.floor ? empty : exponents.squashed(token) >= top;
  return stats;
}

// dL/dz_j = (flow.logsumexp - flow.logprob - flow.entropy (log p_j + H)) p_j + flow.logprob at the
// token, with log p_j = (t_j - residue) ln 2 - log_sum.
template <bool kSoftcap>
__device__ __forceinline__ GradientTerms gradient_terms(float max, float log_sum, float entropy,
                                                        const RowFlow& flow,
                                                        const Exponents<kSoftcap>& exponents) {
  const float rest = residue(max, exponents);
  const float chain = kSoftcap ? -4 * exponents.map.raw_gain : exponents.map.raw_gain;
  const float norm = chain * std::exp(-log_sum - rest * kLn2);
  const float outer = flow.logsumexp - flow.logprob;
  const float inner = entropy - log_sum - rest * kLn2;
  return {exponents.center(max), (outer - flow.entropy * inner) * norm, -flow.entropy * kLn2 * norm,
          0.0f};
}

// At the token, the two terms would cancel as p approaches 1.
template <bool kSoftcap>
__device__ __forceinline__ float token_gradient(float token, float logprob, float entropy,
                                                const RowFlow& flow, const LogitMap& map) {
  const float p = std::exp(logprob);
  float gradient = -flow.logprob * std::expm1(logprob) + flow.logsumexp * p;
  if (p != 0) gradient -= flow.entropy * (logprob + entropy) * p;
  if (logprob == -INFINITY) gradient = 0;  // a logit of -inf excludes its token
  if (kSoftcap) {
    const float decay = std::exp(-kLn2 * std::fabs(token * map.squash));
    gradient *= 4 * decay / ((1 + decay) * (1 + decay));  // 1 - tanh^2
  }
  return gradient * map.raw_gain;
}

// The gradient at one logit.
template <bool kSoftcap, bool kLinear>
__device__ __forceinline__ float gradient_at(float x, const GradientTerms& terms,
                                             const Exponents<kSoftcap>& exponents) {
  if constexpr (kSoftcap) {
    const float squashed = exponents.squashed(x);
    const float t = x <= exponents.map.floor
                        ? -1e4f
                        : std::fma(squashed, exponents.map.binary_gain, -terms.center);
    const float factor = std::fma(terms.linear, t, terms.constant);
    return factor * std::fma(squashed, squashed, squashed) * fast_exp2(t);
  }
  const float t = exponents(x, terms.center);
  return (kLinear ? std::fma(terms.linear, t, terms.constant) : terms.constant) * fast_exp2(t);
}

template <typename T, bool kSoftcap, bool kLinear>
__device__ __forceinline__ Vec16 gradient_vector(Vec16 x, uint32_t floor,
                                                 const GradientTerms& terms,
                                                 const Exponents<kSoftcap>& exponents) {
  using E = Element<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float pair[2];
    E::unpack(kLinear ? E::max(x.word[i], floor) : x.word[i], pair);
#pragma unroll
    for (int j = 0; j < E::kPerWord; ++j) {
      pair[j] = gradient_at<kSoftcap, kLinear>(pair[j], terms, exponents);
    }
    x.word[i] = E::pack(pair);
  }
  return x;
}

// The layout of the stores of a split's gradient. Vectors are aligned in memory, so that each is
// one store; single threads store the elements before the first vector and after the last.
template <typename T, bool kAligned>
struct Stores {
  static constexpr int kLanes = Element<T>::kLanes;
  T* grad;
  int head, end, columns;  // the vectors lie in [head, end)

  __device__ __forceinline__ Stores(T* to, int n) : grad(to), head(0), columns(n) {
    if (!kAligned) {
      const int before = static_cast<int>((16 - misalignment(to)) % 16 / sizeof(T));
      head = before < n ? before : n;
    }
    end = head + (n - head) / kLanes * kLanes;
  }
  // The element outside the vectors that a thread stores, or -1.
  __device__ __forceinline__ int beside(int thread) const {
    if (kAligned || thread >= head + columns - end) return -1;
    return thread < head ? thread : thread - head + end;
  }
  // The thread that stores a column, and the only one that may store it again.
  template <int kThreads>
  __device__ __forceinline__ int writer(int column) const {
    if (column < head) return column;
    return column < end ? (column - head) / kLanes % kThreads : column - end + head;
  }
};

// This thread's part of writing the gradient of a split.
template <bool kLinear, int kThreads, typename T, bool kAligned, bool kSoftcap, typename Source>
__device__ __forceinline__ void sweep_gradient(const Source& source,
                                               const Stores<T, kAligned>& stores,
                                               const GradientTerms& terms,
                                               const Exponents<kSoftcap>& exponents) {
  constexpr int kAtOnce = Source::kStores;
  constexpr ptrdiff_t kStride = kThreads * Element<T>::kLanes;
  static_assert(kThreads >= 2 * Element<T>::kLanes, "the elements beside need a thread each");
  const uint32_t floor = filled_word<T>(exponents.map.floor);
  const unsigned shift = source.shift(stores.head);
  ptrdiff_t at = stores.head + thread_index() * Element<T>::kLanes;
  const auto write_steps = [&](unsigned known) {
    for (; at + (kAtOnce - 1) * kStride < stores.end; at += kAtOnce * kStride) {
      Vec16 x[kAtOnce];
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) x[v] = source.vector(at + v * kStride, known);
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) {
        store16_once(stores.grad + at + v * kStride,
                     gradient_vector<T, kSoftcap, kLinear>(x[v], floor, terms, exponents));
      }
    }
  };
  with_known_words<Source>(shift, write_steps);
#pragma unroll 1
  for (; at < stores.end; at += kStride) {
    store16_once(stores.grad + at, gradient_vector<T, kSoftcap, kLinear>(source.vector(at, shift),
                                                                         floor, terms, exponents));
  }
  const int column = stores.beside(thread_index());
  if (column >= 0) {
    const float x = source.element(column), low = exponents.map.floor;
    store_element(stores.grad + column, Element<T>::from(gradient_at<kSoftcap, kLinear>(
                                            x < low ? low : x, terms, exponents)));
  }
}

template <int kThreads, typename T, bool kAligned>
__device__ __forceinline__ void write_zeros(const Stores<T, kAligned>& stores) {
  constexpr int kLanes = Element<T>::kLanes;
  for (ptrdiff_t at = stores.head + thread_index() * kLanes; at < stores.end;
       at += kThreads * kLanes) {
    store16_once(stores.grad + at, Vec16{});
  }
  const int column = stores.beside(thread_index());
  if (column >= 0) store_element(stores.grad + column, Element<T>::from(0.0f));
}

// Overwrites the gradient at the chosen token; `token` may lie outside the split.
template <int kThreads, typename T, bool kAligned>
__device__ __forceinline__ void store_token_gradient(const Stores<T, kAligned>& stores,
                                                     int64_t token, const GradientTerms& terms) {
  if (token < 0 || token >= stores.columns) return;
  const int column = static_cast<int>(token);
  if (thread_index() == stores.template writer<kThreads>(column)) {
    store_element(stores.grad + column, Element<T>::from(terms.token_gradient));
  }
}

// The gradient of a split; `token` is the chosen column relative to it.
template <int kThreads, typename T, bool kAligned, bool kSoftcap, typename Source>
__device__ __forceinline__ void write_gradient(const Source& source,
                                               const Stores<T, kAligned>& stores, int64_t token,
                                               const GradientTerms& terms,
                                               const Exponents<kSoftcap>& exponents) {
  if (terms.linear != 0) {
    sweep_gradient<true, kThreads>(source, stores, terms, exponents);
  } else {
    sweep_gradient<false, kThreads>(source, stores, terms, exponents);
  }
  store_token_gradient<kThreads>(stores, token, terms);
}

}  // namespace fastrl::cuda
