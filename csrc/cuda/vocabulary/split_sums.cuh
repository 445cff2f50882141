// A block's sweep over a whole row in global memory, split by split.
#pragma once

#include <cstring>

#include "row_sums.cuh"
#include "sources.cuh"

namespace fastrl::cuda {

// Stores to the same place in every block of the cluster; called by one warp, all lanes of which
// have `x`, a struct of four floats.
template <typename T>
__device__ __forceinline__ void broadcast(const T& x, T* shared) {
  constexpr int kFields = 4;
  static_assert(sizeof(T) == kFields * sizeof(float), "four floats");
  float fields[kFields];
  memcpy(fields, &x, sizeof(x));
  for (unsigned i = thread_index() % kWarp; i < kFields * cluster_size(); i += kWarp) {
    const unsigned field = i % kFields;
    const float low = field & 1 ? fields[1] : fields[0], high = field & 1 ? fields[3] : fields[2];
    store_remote(reinterpret_cast<float*>(shared) + field, i / kFields, field & 2 ? high : low);
  }
}

// The sums of every warp over every split, then of every split, in shared memory.
template <int kThreads>
struct SplitSums {
  static constexpr int kWarps = kThreads / kWarp;
  RowSums* warps;  // [count][kWarps]
  RowSums* splits;
  int count;

  __device__ __forceinline__ SplitSums(void* shared, int splits_of_row)
      : warps(static_cast<RowSums*>(shared)),
        splits(warps + splits_of_row * kWarps),
        count(splits_of_row) {}
  static size_t bytes(int splits_of_row) { return sizeof(RowSums) * splits_of_row * (kWarps + 1); }

  // Fills `splits`, which every warp that needs the sums of the row combines in order. The blocks
  // of a cluster share the splits, and each has all sums in the end. Called once per launch: a
  // block that is ahead would overwrite sums that another still reads.
  template <typename T, bool kAligned, Wanted kWanted, bool kStreaming, bool kSoftcap>
  __device__ __forceinline__ void sweep(const RowGeometry& rows, const unsigned char* row,
                                        int64_t token, const Exponents<kSoftcap>& exponents) const {
    const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
    const int rank = static_cast<int>(cluster_rank()), ranks = static_cast<int>(cluster_size());
    for (int split = rank; split < count; split += ranks) {
      const int64_t first = static_cast<int64_t>(split) * rows.splits.columns;
      const T* data = reinterpret_cast<const T*>(row) + first;
      const GlobalSource<T, kAligned, kStreaming> source{data, rows.columns(split)};
      const RowSums sums = reduce_sums<kWanted>(
          sweep_sums<T, kSoftcap, kWanted, kThreads>(source, token - first, exponents), exponents);
      if (lane == 0) warps[split * kWarps + warp] = sums;
    }
    sync_block();
    if (ranks > 1) sync_cluster();  // every block runs and can be written to
    for (int split = rank + warp * ranks; split < count; split += kWarps * ranks) {
      const RowSums sums = reduce_sums<kWanted>(warps + split * kWarps, kWarps, exponents);
      if (ranks == 1) {
        if (lane == 0) splits[split] = sums;
      } else {
        broadcast(sums, splits + split);
      }
    }
    ranks > 1 ? sync_cluster() : sync_block();
  }
};

}  // namespace fastrl::cuda
