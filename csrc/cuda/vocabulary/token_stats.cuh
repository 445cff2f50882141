// The statistics of rows of logits, from reading each logit once.
#pragma once

#include "dispatch.cuh"
#include "row_gradient.cuh"
#include "split_sums.cuh"

namespace fastrl::cuda {

struct TokenStatsCall {
  TokenStatsParams p;
  RowGeometry rows;
  Scaling scaling;
};

template <typename T, bool kAligned, bool kSoftcap, Wanted kWanted, int kThreads>
__global__ void __launch_bounds__(kThreads, kWanted == Wanted::kSquares ? 3 : 4)
    token_stats_kernel(const __grid_constant__ TokenStatsCall call) {
  const TokenStatsParams& p = call.p;
  const SplitSums<kThreads> shared(shared_memory<unsigned char>(), call.rows.splits.count);
  const unsigned ranks = cluster_size();
  for (unsigned row = block_index() / ranks; row < call.rows.rows; row += num_blocks() / ranks) {
    RowStats stats{};
    const int64_t token = p.in.token_ids[row];
    if (row_counts(p.in, row, token)) {
      const float temperature = p.in.temperatures ? p.in.temperatures[row] : 1.0f;
      const Exponents<kSoftcap> exponents{call.scaling.map<T>(temperature)};
      const unsigned char* data = call.rows.row(row);
      shared.template sweep<T, kAligned, kWanted, true>(call.rows, data, token, exponents);
      if (thread_index() < kWarp) {
        const bool known = token >= 0 && token < call.rows.vocabulary;
        const float x =
            known ? Element<T>::value(load_element(reinterpret_cast<const T*>(data) + token)) : NAN;
        stats = finish(reduce_sums<kWanted>(shared.splits, shared.count, exponents), x, known,
                       exponents);
      }
    }
    if (thread_index() == 0 && cluster_rank() == 0) {
      if (kWanted < Wanted::kEntropy || !p.with_entropy) stats.entropy = 0;
      if (kWanted < Wanted::kSquares || !p.with_sum_sq_probs) stats.sum_sq_probs = 0;
      store_stats(stats, p.out, row);
    }
  }
}

template <int kThreads = kVocabularyThreads>
Status launch_token_stats(const TokenStatsParams& p, const DeviceLimits& limits, Stream stream) {
  if (!fits(p.in)) return kInvalid;
  const TokenStatsCall call{p, geometry(p.in, nullptr), Scaling::of(p.in)};
  if (call.rows.rows == 0) return kSuccess;
  const int splits = call.rows.splits.count;
  // a block per row, or a cluster if that would leave SMs with fewer blocks than fit; the results
  // are the same
  unsigned ranks = 1;
  while (limits.major >= 9 && ranks < 8 && 2 * ranks <= static_cast<unsigned>(splits) &&
         int64_t{ranks} * call.rows.rows < int64_t{4} * limits.sms) {
    ranks *= 2;
  }
  const LaunchShape shape{ranks * call.rows.rows, kThreads, ranks,
                          SplitSums<kThreads>::bytes(splits)};
  return dispatch(p.in, call.rows, [&](auto element, auto aligned, auto softcap) {
    using T = decltype(element);
    constexpr bool kAligned = aligned, kSoftcap = softcap;
    if constexpr (!kSoftcap) {  // with a softcap, everything is always computed
      if (!p.with_sum_sq_probs && !p.with_entropy) {
        return launch(token_stats_kernel<T, kAligned, false, Wanted::kSum, kThreads>, shape, call,
                      stream);
      }
      if (!p.with_sum_sq_probs) {
        return launch(token_stats_kernel<T, kAligned, false, Wanted::kEntropy, kThreads>, shape,
                      call, stream);
      }
    }
    return launch(token_stats_kernel<T, kAligned, kSoftcap, Wanted::kSquares, kThreads>, shape,
                  call, stream);
  });
}

}  // namespace fastrl::cuda
