// One pass on chip, from sm_90 on: a row is spread over the shared memory of a cluster of blocks,
// so each logit is loaded once and its gradient stored once.
//
//   stage 0   | row i: sums, exchange, gradient | row i+2 arrives ...
//   stage 1   ... row i+1 arrives               | row i+1: sums, exchange, gradient |
#pragma once

#include "narrow_gradient.cuh"
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
  // Called by one thread.
  __device__ __forceinline__ void start(ByteBarrier* full) const {
    arm(full, bulk_bytes);
    if (bulk_bytes > 0) bulk_load(shared + head, global + head, bulk_bytes, full);
  }
  // Called by every thread; visible after a barrier.
  __device__ __forceinline__ void copy_rest() const {
    if (kAligned) return;
    const int bulk = static_cast<int>(bulk_bytes / sizeof(T)), t = thread_index();
    if (t >= columns - bulk) return;
    const int column = t < head ? t : t + bulk;
    shared[column] = load_element(global + column);
  }
};

// RowSums without the sum that this kernel does not use.
struct PartialSums {
  float max, sum, sum_t;

  __device__ __forceinline__ operator RowSums() const { return {max, sum, sum_t, 0.0f}; }
};

// The report of a block to its cluster about its split of a row.
struct SplitReport : PartialSums {
  float token;  // the logit of the chosen token, in the split that contains it

  __device__ __forceinline__ Vec16 packed() const {
    return {{float_to_bits(max), float_to_bits(sum), float_to_bits(sum_t), float_to_bits(token)}};
  }
};

template <int kThreads>
struct ClusterShared {
  static constexpr int kWarps = kThreads / kWarp;
  // Reports of every block's split, in alternation: a block may be one exchange ahead but not two,
  // since it sends its next report after it has read all reports of this row.
  alignas(16) SplitReport splits[2][kMaxCluster];
  ByteBarrier exchanged[2];
  ByteBarrier full[2];
  RowInputs inputs[2];
  uint32_t tickets[2];  // along with the reports
  PartialSums warps[kWarps];
  GradientTerms terms;
  bool zero;
  uint32_t sequence;  // that of the last fetched row; row numbers rise

  // For unaligned rows there is room for the shift, and for a vector after the last.
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

template <typename T, bool kAligned, bool kSoftcap, int kThreads, typename Gradient>
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

  // The words of a row's inputs: the first warp fetches them, and begins the row one turn later.
  constexpr int kFetched = (RowInputs::kWords + kWarp - 1) / kWarp;
  const auto fetch = [&](unsigned row, uint32_t* words) {
    if (t == 0 && row < rows.rows) {
      s.sequence = p.sequences.of(row, s.sequence);
    }
    sync_warp();
#pragma unroll
    for (int i = 0; i < kFetched; ++i) {
      const int name = lane + i * kWarp;
      const bool wanted = warp == 0 && row < rows.rows && name < RowInputs::kWords;
      words[i] = wanted ? fetch_input(call, name, row, s.sequence) : 0;
    }
  };
  const auto begin = [&](unsigned row, int stage, const uint32_t* words) {
#pragma unroll
    for (int i = 0; i < kFetched; ++i) {
      const int name = lane + i * kWarp;
      if (warp == 0 && name < RowInputs::kWords) s.inputs[stage].word[name] = words[i];
    }
    kAligned ? sync_warp() : sync_block();
    if (kAligned && warp != 0) return;  // these warps copy nothing, so they read nothing
    if (row < rows.rows && s.inputs[stage].active(p.in)) fill(row, stage);
  };

  if (t == 0) s.sequence = 0;
  if (t < 2) init(&s.full[t]);
  if (t < 2) init(&s.exchanged[t]);
  sync_block();
  for (int stage = 0; stage < 2; ++stage) {
    const unsigned row = block_index() / ranks + stage * clusters;
    uint32_t words[kFetched];
    fetch(row, words);
    begin(row, stage, words);
  }
  sync_cluster();  // every block runs and can be written to; copies by threads are visible

  // The first three rows of a cluster follow from its index, the others from tickets, which it
  // draws as it goes: a cluster that starts late, or shares its SMs, takes fewer.
  const unsigned of_number = 3 * clusters;
  unsigned row = block_index() / ranks, next = row + clusters, after = next + clusters;
  unsigned parity = 0;  // of the next wait for each stage, one bit per stage
  for (unsigned turn = 0; row < rows.rows; ++turn) {
    const int stage = turn % 2;
    uint32_t words[kFetched];  // used at the end of this iteration, when they have arrived
    fetch(after, words);
    const unsigned drawn = t == 0 && rank == 0 ? atomic_add(p.ticket, 1u) : 0;
    const RowInputs& in = s.inputs[stage];
    const bool active = in.active(p.in);
    const Exponents<kSoftcap> exponents{call.scaling.map<T>(in.value(RowInputs::kTemperature))};
    // narrow rows begin with a vector, and so do their splits
    constexpr bool kShifted = !kAligned && !kNarrow<T, Gradient>;
    const SharedSource<T, kAligned, kShifted> source{split_of(row, stage).shared, columns};
    const int id = in.token(rows);
    const int64_t token = id - first;
    if (active) {
      wait(&s.full[stage], parity >> stage & 1);
      parity ^= 1u << stage;
      const RowSums sums = reduce_sums<Wanted::kEntropy>(
          sweep_sums<T, kSoftcap, Wanted::kEntropy, kThreads>(source, token, exponents), exponents);
      if (lane == 0) s.warps[warp] = {sums.max, sums.sum, sums.sum_t};
      sync_block();
    }
    if (warp == 0) {
      SplitReport report{};
      if (active) {
        const RowSums own = reduce_sums<Wanted::kEntropy>(s.warps, kWarps, exponents);
        const bool here = token >= 0 && token < columns;
        report = {{own.max, own.sum, own.sum_t},
                  here ? source.element(static_cast<int>(token)) : 0.0f};
      }
      SplitReport* splits = s.splits[stage];
      ByteBarrier* exchanged = &s.exchanged[stage];
      const unsigned ticket = shuffle(drawn, 0);
      if (lane == 0) arm(exchanged, ranks * sizeof(SplitReport) + sizeof(ticket));
      for (unsigned to = lane; to < ranks; to += kWarp) {
        send16(report.packed(), splits + rank, exchanged, to);
        if (rank == 0) send4(ticket, &s.tickets[stage], exchanged, to);
      }
      wait<true>(exchanged, turn / 2 % 2);
      RowOutcome outcome{};
      outcome.zero = true;
      if (active) {
        const RowSums total =
            reduce_sums<Wanted::kEntropy>(splits, static_cast<int>(ranks), exponents);
        const float x = id >= 0 ? splits[id / rows.splits.columns].token : NAN;
        outcome = outcome_of(p, in, total, x, id >= 0, exponents);
      }
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
    const unsigned following = of_number + s.tickets[stage];
    const Stores<Gradient, kAligned> stores(reinterpret_cast<Gradient*>(rows.grad_row(row)) + first,
                                            columns);
    const GradientTerms terms = s.terms;
    if (s.zero) {
      write_zeros<kThreads>(stores);
    } else if constexpr (kNarrow<T, Gradient>) {
      write_staged_gradient<kThreads>(source.data, stores, token, terms, exponents);
    } else {
      write_gradient<kThreads>(source, stores, token, terms, exponents);
    }

    if (!kAligned) fence_bulk();  // a bulk copy will overwrite elements stored by threads
    sync_block();                 // no thread reads this stage any more
    begin(after, stage, words);
    row = next;
    next = after;
    after = following;
  }
  // A block may exit here: it has received everything that others send to it.
}

template <typename T, bool kAligned, bool kSoftcap, int kThreads, typename Gradient = T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    one_pass_cluster_kernel(const __grid_constant__ LogitsPolicyLossCall call) {
  if constexpr (kHasClusters) one_pass_cluster<T, kAligned, kSoftcap, kThreads, Gradient>(call);
}

}  // namespace fastrl::cuda
