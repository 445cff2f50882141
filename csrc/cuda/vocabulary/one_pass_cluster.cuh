// One pass on chip, from sm_90 on: a row is spread over the shared memory of a cluster of blocks,
// so each logit is loaded once and its gradient stored once.
//
//   stage 0   | row i: sums, exchange, gradient | row i+2 arrives ...
//   stage 1   ... row i+1 arrives               | row i+1: sums, exchange, gradient |
#pragma once

#include "row_loss.cuh"
#include "split_sums.cuh"

namespace fastrl::cuda {

// A block's split of a row: the vectors of 16 bytes in it arrive in bulk, the elements before the
// first and after the last one through registers, all at the same distance from a vector's start.
template <typename T, bool kAligned>
struct StagedSplit {
  const T* global;
  T* shared;
  int head, columns;
  unsigned bulk_bytes;

  __device__ __forceinline__ StagedSplit(const unsigned char* row, int64_t first, int n,
                                         unsigned char* stage)
      : global(reinterpret_cast<const T*>(row) + first), columns(n) {
    const unsigned shift = kAligned ? 0 : misalignment(global);
    shared = reinterpret_cast<T*>(stage + shift);
    const int before = static_cast<int>((16 - shift) % 16 / sizeof(T));
    head = before < n ? before : n;
    bulk_bytes = static_cast<unsigned>((n - head) * static_cast<int>(sizeof(T))) / 16 * 16;
  }
  // By one thread.
  __device__ __forceinline__ void start(BulkBarrier* full) const {
    arm(full, bulk_bytes);
    if (bulk_bytes > 0) bulk_load(shared + head, global + head, bulk_bytes, full);
  }
  // By every thread; visible after a barrier.
  __device__ __forceinline__ void copy_rest() const {
    if (kAligned) return;
    const int bulk = static_cast<int>(bulk_bytes / sizeof(T)), t = thread_index();
    if (t >= columns - bulk) return;
    const int column = t < head ? t : t + bulk;
    shared[column] = load_element(global + column);
  }
};

// What the blocks of a cluster tell each other about their splits of a row.
struct SplitReport {
  float max, sum, sum_t;  // as in RowSums
  float token;            // the logit of the chosen token, in the split where it lies

  __device__ __forceinline__ operator RowSums() const { return {max, sum, sum_t, 0.0f}; }
};

template <int kThreads>
struct ClusterShared {
  static constexpr int kWarps = kThreads / kWarp;
  BulkBarrier full[2];
  RowInputs inputs[2];
  RowSums warps[kWarps];
  // Of every block's split, by turns: a block may be one exchange ahead.
  SplitReport splits[2][kMaxCluster];
  GradientTerms terms;
  bool zero;

  // Beside rows that are not aligned there is room for the shift, and for a vector after the last.
  template <typename T, bool kAligned>
  __host__ __device__ static unsigned stage_bytes(const RowGeometry& rows) {
    return rows.splits.columns * static_cast<unsigned>(sizeof(T)) + (kAligned ? 0 : 32);
  }
  template <typename T, bool kAligned>
  static size_t bytes(const RowGeometry& rows) {
    static_assert(sizeof(ClusterShared) <= kClusterHeader, "the stages begin behind it");
    return kClusterHeader + 2 * size_t{stage_bytes<T, kAligned>(rows)};
  }
};

template <typename T, bool kAligned, bool kSoftcap, int kThreads>
__device__ __forceinline__ void one_pass_cluster(const LogitsPolicyLossCall& call) {
  constexpr int kWarps = kThreads / kWarp;
  using Shared = ClusterShared<kThreads>;
  const LogitsPolicyLossParams& p = call.p;
  const RowGeometry& rows = call.rows;
  Shared& s = *shared_memory<Shared>();
  const int t = thread_index(), warp = t / kWarp, lane = t % kWarp;
  const unsigned rank = cluster_rank(), ranks = cluster_size();
  const unsigned clusters = num_blocks() / ranks;
  const int64_t first = static_cast<int64_t>(rank) * rows.splits.columns;
  const int columns = rows.columns(static_cast<int>(rank));
  const unsigned stage_bytes = Shared::template stage_bytes<T, kAligned>(rows);
  const auto split_of = [&](unsigned row, int stage) {
    unsigned char* at = shared_memory<unsigned char>() + kClusterHeader + stage * stage_bytes;
    return StagedSplit<T, kAligned>(rows.row(row), first, columns, at);
  };
  const auto fill = [&](unsigned row, int stage) {
    const StagedSplit<T, kAligned> split = split_of(row, stage);
    if (t == 0) split.start(&s.full[stage]);
    split.copy_rest();
  };

  if (t < 2) init(&s.full[t]);
  for (int stage = 0; stage < 2; ++stage) {
    const unsigned row = block_index() / ranks + stage * clusters;
    if (t < RowInputs::kWords && row < rows.rows) {
      s.inputs[stage].word[t] = fetch_input(call, t, row);
    }
  }
  sync_block();
  for (int stage = 0; stage < 2; ++stage) {
    const unsigned row = block_index() / ranks + stage * clusters;
    if (row < rows.rows && s.inputs[stage].active()) fill(row, stage);
  }
  sync_cluster();  // every block runs and can be written to; what threads copied is visible

  int stage = 0, exchange = 0;
  unsigned parity = 0;  // of the next wait, a bit per stage
  for (unsigned row = block_index() / ranks; row < rows.rows; row += clusters, stage ^= 1) {
    const unsigned next = row + 2 * clusters;
    const bool has_next = next < rows.rows && next > row;
    // used at the end of this iteration, when it has arrived
    const uint32_t fetched = t < RowInputs::kWords && has_next ? fetch_input(call, t, next) : 0;
    const RowInputs& in = s.inputs[stage];
    const Stores<T, kAligned> stores(reinterpret_cast<T*>(rows.grad_row(row)) + first, columns);
    bool zero = true;
    if (in.active()) {
      const Exponents<kSoftcap> exponents{call.scaling.map<T>(in.value(RowInputs::kTemperature))};
      const T* data = split_of(row, stage).shared;
      const SharedSource<T, kAligned> source{data, columns};
      const int64_t token = in.token() - first;
      wait(&s.full[stage], parity >> stage & 1);
      parity ^= 1u << stage;

      const RowSums sums = reduce_sums<Wanted::kEntropy>(
          sweep_sums<T, kSoftcap, Wanted::kEntropy, kThreads>(source, exponents), exponents);
      if (lane == 0) s.warps[warp] = sums;
      sync_block();
      if (warp == 0) {
        const RowSums own = reduce_sums<Wanted::kEntropy>(s.warps, kWarps, exponents);
        const bool here = in.token() >= 0 && token >= 0 && token < columns;
        const float x = here ? source.element(static_cast<int>(token)) : 0.0f;
        broadcast(SplitReport{own.max, own.sum, own.sum_t, x}, &s.splits[exchange][rank]);
      }
      sync_cluster();
      if (warp == 0) {
        const SplitReport* splits = s.splits[exchange];
        const RowSums total =
            reduce_sums<Wanted::kEntropy>(splits, static_cast<int>(ranks), exponents);
        const float x = in.token() >= 0 ? splits[in.token() / rows.splits.columns].token : NAN;
        const RowOutcome outcome = outcome_of(p, in, total, x, exponents);
        if (lane == 0) {
          s.terms = outcome.terms;
          s.zero = outcome.zero;
        }
        if (lane == 0 && rank == 0) {
          p.logprobs[row] = outcome.logprob;
          p.entropy[row] = outcome.entropy;
        }
      }
      sync_block();
      exchange ^= 1;
      zero = s.zero;
      if (!zero) {
        const GradientTerms terms = s.terms;
        write_gradient<kThreads>(source, stores, in.token() < 0 ? -1 : token, terms, exponents);
      }
    } else if (t == 0 && rank == 0) {
      p.logprobs[row] = 0.0f;
      p.entropy[row] = 0.0f;
    }
    if (zero) write_zeros<kThreads>(stores);

    if (!kAligned) fence_bulk();  // a copy will overwrite elements that threads stored
    sync_block();                 // no thread reads this stage any more
    if (t < RowInputs::kWords) s.inputs[stage].word[t] = fetched;
    if (kAligned) {
      if (t == 0 && fetched) fill(next, stage);  // thread 0 fetched `active`
    } else {
      sync_block();
      if (s.inputs[stage].active()) fill(next, stage);
    }
  }
}

template <typename T, bool kAligned, bool kSoftcap, int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    one_pass_cluster_kernel(const __grid_constant__ LogitsPolicyLossCall call) {
  if constexpr (kHasClusters) one_pass_cluster<T, kAligned, kSoftcap, kThreads>(call);
}

}  // namespace fastrl::cuda
