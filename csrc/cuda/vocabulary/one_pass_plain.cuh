// Without clusters: a block reads a row twice, the second time from L2 as far as it fits there.
#pragma once

#include "narrow_gradient.cuh"
#include "row_loss.cuh"
#include "split_sums.cuh"

namespace fastrl::cuda {

template <int kThreads>
struct PlainShared {
  RowInputs inputs;
  RowOutcome outcome;
  alignas(16) RowSums sums[1];  // as many as SplitSums needs

  static size_t bytes(const RowGeometry& rows) {
    return offsetof(PlainShared, sums) + SplitSums<kThreads>::bytes(rows.splits.count);
  }
};

template <typename T, bool kAligned, bool kSoftcap, int kThreads, typename Gradient = T>
__global__ void __launch_bounds__(kThreads, 2)
    one_pass_plain_kernel(const __grid_constant__ LogitsPolicyLossCall call) {
  const LogitsPolicyLossParams& p = call.p;
  PlainShared<kThreads>& s = *shared_memory<PlainShared<kThreads>>();
  const SplitSums<kThreads> shared(s.sums, call.rows.splits.count);
  uint32_t sequence = 0;
  for (unsigned row = block_index(); row < call.rows.rows; row += num_blocks()) {
    Gradient* grad = reinterpret_cast<Gradient*>(call.rows.grad_row(row));
    const T* data = reinterpret_cast<const T*>(call.rows.row(row));
    Exponents<kSoftcap> exponents{};
    const bool active = row_counts(p.in, row, p.in.token_ids[row]);
    if (active) {
      exponents.map = call.scaling.map<T>(p.in.temperatures ? p.in.temperatures[row] : 1.0f);
      const auto row_bytes = reinterpret_cast<const unsigned char*>(data);
      shared.template sweep<T, kAligned, Wanted::kEntropy, false>(call.rows, row_bytes,
                                                                  p.in.token_ids[row], exponents);
      if (thread_index() < kWarp) {
        sequence = p.sequences.of(row, sequence);
        for (int i = thread_index(); i < RowInputs::kWords; i += kWarp) {
          s.inputs.word[i] = fetch_input(call, i, row, sequence);
        }
        sync_warp();
        const RowInputs& in = s.inputs;
        const int id = in.token(call.rows);
        const float token = id >= 0 ? Element<T>::value(load_element(data + id)) : NAN;
        const RowSums sums = reduce_sums<Wanted::kEntropy>(shared.splits, shared.count, exponents);
        const RowOutcome outcome = outcome_of(p, in, sums, token, id >= 0, exponents);
        if (thread_index() == 0) s.outcome = outcome;
      }
      sync_block();
    }
    const Stores<Gradient, kAligned> whole(grad, static_cast<int>(call.rows.vocabulary));
    if (!active || s.outcome.zero) {
      write_zeros<kThreads>(whole);
    } else if constexpr (kNarrow<T, Gradient>) {
      write_narrow_gradient<kThreads>(data, whole, s.inputs.token(call.rows), s.outcome.terms,
                                      exponents);
    } else {
      // Last first: L2 may hold only what was read last.
      for (int split = call.rows.splits.count - 1; split >= 0; --split) {
        const int64_t first = static_cast<int64_t>(split) * call.rows.splits.columns;
        const int columns = call.rows.columns(split);
        const Stores<T, kAligned> stores(grad + first, columns);
        const GlobalSource<T, kAligned, true> source{data + first, columns};
        const GradientTerms terms = s.outcome.terms;
        write_gradient<kThreads>(source, stores, s.inputs.token(call.rows) - first, terms,
                                 exponents);
      }
    }
    if (thread_index() == 0) {
      p.logprobs[row] = active ? s.outcome.logprob : 0.0f;
      p.entropy[row] = active ? s.outcome.entropy : 0.0f;
    }
  }
}

}  // namespace fastrl::cuda
