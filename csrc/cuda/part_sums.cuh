// A block's sweep over a whole row in global memory, part by part.
#pragma once

#include "row_sums.cuh"
#include "sources.cuh"

namespace fastrl::cuda {

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

  // Fills `parts`; they are combined in their order, by every warp that asks.
  template <typename T, bool kAligned, Wanted kWanted, bool kStreaming, bool kSoftcap>
  __device__ __forceinline__ void sweep(const RowGeometry& rows, const unsigned char* row,
                                        const Exponents<kSoftcap>& exponents) const {
    const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
    for (int part = 0; part < count; ++part) {
      const T* data =
          reinterpret_cast<const T*>(row) + static_cast<int64_t>(part) * rows.parts.columns;
      const GlobalSource<T, kAligned, kStreaming> source{data, rows.columns(part)};
      const RowSums sums = reduce_sums<kWanted>(
          sweep_sums<T, kSoftcap, kWanted, kThreads>(source, exponents), exponents);
      if (lane == 0) warps[part * kWarps + warp] = sums;
    }
    sync_block();
    for (int part = warp; part < count; part += kWarps) {
      const RowSums sums = reduce_sums<kWanted>(warps + part * kWarps, kWarps, exponents);
      if (lane == 0) parts[part] = sums;
    }
    sync_block();
  }
};

}  // namespace fastrl::cuda
