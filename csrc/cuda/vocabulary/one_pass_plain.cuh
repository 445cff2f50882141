// One pass without clusters: a block reads a row, then reads it again, from L2 as far as it holds.
#pragma once

#include "part_sums.cuh"
#include "row_loss.cuh"

namespace fastrl::cuda {

template <int kThreads>
struct PlainShared {
  RowPlan plan;
  int token;
  alignas(16) RowSums sums[1];  // as many as PartSums wants

  static size_t bytes(const RowGeometry& rows) {
    return offsetof(PlainShared, sums) + PartSums<kThreads>::bytes(rows.parts.count);
  }
};

template <typename T, bool kAligned, bool kSoftcap, int kThreads>
__global__ void __launch_bounds__(kThreads, 2)
    one_pass_plain_kernel(const __grid_constant__ LogitsPolicyLossCall call) {
  const LogitsPolicyLossParams& p = call.p;
  PlainShared<kThreads>& s = *shared_memory<PlainShared<kThreads>>();
  const PartSums<kThreads> shared(s.sums, call.rows.parts.count);
  for (unsigned row = block_index(); row < call.rows.rows; row += num_blocks()) {
    T* grad = reinterpret_cast<T*>(call.rows.grad_row(row));
    const T* data = reinterpret_cast<const T*>(call.rows.row(row));
    Exponents<kSoftcap> exponents{};
    const bool active = p.in.active[row];
    if (active) {
      exponents.map = call.scaling.map<T>(p.in.temperatures ? p.in.temperatures[row] : 1.0f);
      const auto row_bytes = reinterpret_cast<const unsigned char*>(data);
      shared.template sweep<T, kAligned, Wanted::kEntropy, false>(call.rows, row_bytes, exponents);
      if (thread_index() < kWarp) {
        RowInputs in;
#pragma unroll
        for (int i = 0; i < RowInputs::kWords; ++i) in.word[i] = fetch_input(call, i, row);
        const float token =
            in.token() >= 0 ? Element<T>::value(load_element(data + in.token())) : NAN;
        const RowSums sums = reduce_sums<Wanted::kEntropy>(shared.parts, shared.count, exponents);
        const RowPlan plan = plan_row(p, in, sums, token, exponents);
        if (thread_index() == 0) {
          s.plan = plan;
          s.token = in.token();
        }
      }
      sync_block();
    }
    // Last first: of what L2 had no room for, the latest is there.
    for (int part = call.rows.parts.count - 1; part >= 0; --part) {
      const int64_t first = static_cast<int64_t>(part) * call.rows.parts.columns;
      const Stores<T, kAligned> stores(grad + first, call.rows.columns(part));
      if (!active || s.plan.zero) {
        write_zeros<kThreads>(stores);
        continue;
      }
      const GlobalSource<T, kAligned, true> source{data + first, call.rows.columns(part)};
      const GradientTerms terms = s.plan.terms;
      write_gradient<kThreads>(source, stores, s.token - first, terms, exponents);
    }
    if (thread_index() == 0) {
      p.logprobs[row] = active ? s.plan.logprob : 0.0f;
      p.entropy[row] = active ? s.plan.entropy : 0.0f;
    }
  }
}

}  // namespace fastrl::cuda
