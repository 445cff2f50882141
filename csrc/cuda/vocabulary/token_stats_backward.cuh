// The gradient of token statistics: each logit is read once and its gradient written once, to a
// buffer or in place.
#pragma once

#include "dispatch.cuh"
#include "narrow_gradient.cuh"

namespace fastrl::cuda {

struct TokenStatsBackwardCall {
  TokenStatsBackwardParams p;
  RowGeometry rows;
  Scaling scaling;
};

struct BackwardShared {
  GradientTerms terms;
};

// A block per split of a row, or per row in the narrow mode. Only the block that overwrites the
// chosen token's logit needs that logit.
template <typename T, bool kAligned, bool kSoftcap, int kThreads, typename Gradient = T>
__global__ void __launch_bounds__(kThreads, kSoftcap ? 2 : (kAligned ? 4 : 3))
    token_stats_backward_kernel(const __grid_constant__ TokenStatsBackwardCall call) {
  const TokenStatsBackwardParams& p = call.p;
  BackwardShared& s = *shared_memory<BackwardShared>();
  constexpr bool kWholeRows = kNarrow<T, Gradient>;
  const int splits = kWholeRows ? 1 : call.rows.splits.count;
  const int64_t tasks = static_cast<int64_t>(call.rows.rows) * splits;
  for (int64_t task = block_index(); task < tasks; task += num_blocks()) {
    const unsigned row = static_cast<unsigned>(task / splits);
    const int split = static_cast<int>(task % splits);
    const int64_t first = static_cast<int64_t>(split) * call.rows.splits.columns;
    const int columns =
        kWholeRows ? static_cast<int>(call.rows.vocabulary) : call.rows.columns(split);
    const Stores<Gradient, kAligned> stores(
        reinterpret_cast<Gradient*>(call.rows.grad_row(row)) + first, columns);
    // independent loads
    const int64_t token_id = p.in.token_ids[row];
    const float max = p.row_max[row], log_sum = p.log_sum[row], entropy = p.entropy[row];
    const float temperature = p.in.temperatures ? p.in.temperatures[row] : 1.0f;
    RowFlow flow{};
    if (row_counts(p.in, row, token_id)) {
      flow = {p.grad_logprobs ? p.grad_logprobs[row] : 0.0f,
              p.grad_logsumexp ? p.grad_logsumexp[row] : 0.0f,
              p.grad_entropy ? p.grad_entropy[row] : 0.0f};
    }
    if (flow.logprob == 0 && flow.logsumexp == 0 && flow.entropy == 0) {
      write_zeros<kThreads>(stores);
      continue;
    }
    const Exponents<kSoftcap> exponents{call.scaling.map<T>(temperature)};
    const GlobalSource<T, kAligned, true> source{
        reinterpret_cast<const T*>(call.rows.row(row)) + first, columns};
    const int64_t token = token_id - first;
    if (thread_index() == 0) {
      const bool here = token >= 0 && token < columns;
      const float x = here ? source.element(static_cast<int>(token)) : 0.0f;
      s.terms = gradient_terms(max, log_sum, entropy, flow, exponents);
      if (here) {
        const float logprob = logprob_of(x, max, log_sum, exponents);
        s.terms.token_gradient = token_gradient<kSoftcap>(x, logprob, entropy, flow, exponents.map);
      }
    }
    sync_block();
    const GradientTerms terms = s.terms;
    if constexpr (kWholeRows) {
      write_narrow_gradient<kThreads>(source.data, stores, token, terms, exponents);
    } else {
      write_gradient<kThreads>(source, stores, token, terms, exponents);
    }
    sync_block();  // before the terms of the next task are stored
  }
}

template <int kThreads = kVocabularyThreads>
Status launch_token_stats_backward(const TokenStatsBackwardParams& p, const DeviceLimits&,
                                   Stream stream) {
  if (!fits(p.in)) return kInvalid;
  const TokenStatsBackwardCall call{p, geometry(p.in, &p.out), Scaling::of(p.in)};
  if (call.rows.rows == 0) return kSuccess;
  const int64_t splits = is_narrow(p.in, p.out) ? 1 : call.rows.splits.count;
  const int64_t tasks = call.rows.rows * splits;
  const LaunchShape shape{static_cast<unsigned>(tasks < INT32_MAX ? tasks : INT32_MAX), kThreads, 1,
                          sizeof(BackwardShared)};
  return dispatch(p.in, p.out, call.rows, [&](auto element, auto out, auto aligned, auto softcap) {
    return launch(
        token_stats_backward_kernel<decltype(element), aligned, softcap, kThreads, decltype(out)>,
        shape, call, stream);
  });
}

}  // namespace fastrl::cuda
