// A block's sweep over a whole row in global memory, part by part.
#pragma once

#include "row_sums.cuh"
#include "sources.cuh"

namespace fastrl::cuda {

// Stores to the same place in every block of the cluster; by one warp, all lanes of which have it.
__device__ __forceinline__ void broadcast(const RowSums& sums, RowSums* shared) {
  for (unsigned i = thread_index() % kWarp; i < 4 * cluster_size(); i += kWarp) {
    const unsigned field = i % 4;
    const float low = field & 1 ? sums.sum : sums.max, high = field & 1 ? sums.sum_sq : sums.sum_t;
    store_remote(&shared->max + field, i / 4, field & 2 ? high : low);
  }
}

// The sums of every warp about every part, then of every part, in shared memory.
template <int kThreads>
struct PartSums {
  static constexpr int kWarps = kThreads / kWarp;
  RowSums* warps;  // [parts][kWarps]
  RowSums* parts;
  int count;

  __device__ __forceinline__ PartSums(void* shared, int parts_of_row)
      : warps(static_cast<RowSums*>(shared)),
        parts(warps + parts_of_row * kWarps),
        count(parts_of_row) {}
  static size_t bytes(int parts_of_row) { return sizeof(RowSums) * parts_of_row * (kWarps + 1); }

  // Fills `parts`; they are combined in their order, by every warp that asks. The blocks of a
  // cluster share the parts out, and each has all of them in the end; once only, as a block that
  // is ahead would write over what another still reads.
  template <typename T, bool kAligned, Wanted kWanted, bool kStreaming, bool kSoftcap>
  __device__ __forceinline__ void sweep(const RowGeometry& rows, const unsigned char* row,
                                        const Exponents<kSoftcap>& exponents) const {
    const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
    const int rank = static_cast<int>(cluster_rank()), ranks = static_cast<int>(cluster_size());
    for (int part = rank; part < count; part += ranks) {
      const T* data =
          reinterpret_cast<const T*>(row) + static_cast<int64_t>(part) * rows.parts.columns;
      const GlobalSource<T, kAligned, kStreaming> source{data, rows.columns(part)};
      const RowSums sums = reduce_sums<kWanted>(
          sweep_sums<T, kSoftcap, kWanted, kThreads>(source, exponents), exponents);
      if (lane == 0) warps[part * kWarps + warp] = sums;
    }
    sync_block();
    if (ranks > 1) sync_cluster();  // every block is there to be written to
    for (int part = rank + warp * ranks; part < count; part += kWarps * ranks) {
      const RowSums sums = reduce_sums<kWanted>(warps + part * kWarps, kWarps, exponents);
      if (ranks == 1) {
        if (lane == 0) parts[part] = sums;
      } else {
        broadcast(sums, parts + part);
      }
    }
    ranks > 1 ? sync_cluster() : sync_block();
  }
};

}  // namespace fastrl::cuda
