// All machine features that kernels use: their place in the grid, barriers, shuffles, clusters,
// asynchronous copies, ordered memory, fast exponentials. From CUDA they use nothing else but
// `__global__`, `__device__` and `__launch_bounds__`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastrl::cuda {

// The widest load and store of a thread.
struct alignas(16) Vec16 {
  uint32_t word[4];
};

// Properties of the device that a launch needs.
struct DeviceLimits {
  int major, sms;
  int shared_per_block, shared_per_sm, l2_bytes;
};

struct LaunchShape {
  unsigned blocks, threads;
  unsigned cluster = 1;     // blocks that share memory; divides `blocks`
  size_t shared_bytes = 0;  // per block, all of it dynamic
};

}  // namespace fastrl::cuda

#include <cuda_runtime.h>

namespace fastrl::cuda {

using Stream = cudaStream_t;
using Status = cudaError_t;
constexpr Status kSuccess = cudaSuccess, kInvalid = cudaErrorInvalidValue;
constexpr int kWarp = 32;

// Before a loop over an array that must stay in registers.
#define FASTRL_UNROLL _Pragma("unroll")

// --- where this thread is

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ unsigned block_index() { return blockIdx.x; }
__device__ __forceinline__ unsigned num_blocks() { return gridDim.x; }

// The block's dynamic shared memory; there is no other.
template <typename T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(128) unsigned char fastrl_shared[];
  return reinterpret_cast<T*>(fastrl_shared);
}

// --- barriers and shuffles; every thread of the block or warp takes part

__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
template <typename T>
__device__ __forceinline__ T shuffle_xor(T x, int lanes) {
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}
template <typename T>
__device__ __forceinline__ T shuffle_up(T x, int by) {  // lanes below `by` keep their own
  return __shfl_up_sync(0xffffffffu, x, by);
}
template <typename T>
__device__ __forceinline__ T shuffle_down(T x, int by) {  // the last `by` lanes keep their own
  return __shfl_down_sync(0xffffffffu, x, by);
}
template <typename T>
__device__ __forceinline__ T shuffle(T x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
// One bit per lane.
__device__ __forceinline__ uint32_t lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }

// --- memory that several blocks write

template <typename T>
__device__ __forceinline__ T atomic_add(T* p, T x) {
  return atomicAdd(p, x);
}
template <typename T>
__device__ __forceinline__ T atomic_max(T* p, T x) {
  return atomicMax(p, x);
}
template <typename T>
__device__ __forceinline__ T atomic_compare_and_swap(T* p, T expected, T x) {
  return atomicCAS(p, expected, x);
}
// Earlier writes of this thread, and of threads that it met at a barrier, are visible to a thread
// that reads `x`.
__device__ __forceinline__ void store_release(unsigned* p, unsigned x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ unsigned add_acquire_release(unsigned* p, unsigned x) {
  unsigned old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(x)
               : "memory");
  return old;
}
__device__ __forceinline__ void pause() { __nanosleep(40); }  // between reads of a flag

// --- vector access; addresses are multiples of 16 bytes. `_once`: will not be needed again.

__device__ __forceinline__ Vec16 as_vec16(uint4 x) { return {{x.x, x.y, x.z, x.w}}; }
__device__ __forceinline__ Vec16 load16(const void* global) {
  return as_vec16(*static_cast<const uint4*>(global));
}
__device__ __forceinline__ Vec16 load16_once(const void* global) {
  return as_vec16(__ldcs(static_cast<const uint4*>(global)));
}
// Only the bytes [begin, end) of the vector count, at least one; the others may lie outside the row
// and have any value.
template <bool kOnce>
__device__ __forceinline__ Vec16 load16_within(const void* global, const void*, const void*) {
  return kOnce ? load16_once(global) : load16(global);
}
__device__ __forceinline__ void store16_once(void* global, Vec16 x) {
  __stcs(static_cast<uint4*>(global), make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]));
}
__device__ __forceinline__ Vec16 load16_shared(const void* shared) {
  return as_vec16(*static_cast<const uint4*>(shared));
}
// One element, of the types that the vectors hold.
template <typename T>
__device__ __forceinline__ T load_element(const T* global) {
  return *global;
}
template <typename T>
__device__ __forceinline__ void store_element(T* global, T x) {
  *global = x;
}

// --- arithmetic

__device__ __forceinline__ float fast_exp2(float x) {  // 0 where the result is not normal
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {  // the same
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t count_bits(uint32_t x) { return __popc(x); }
// A product and a sum that are never fused to a multiply-add.
__device__ __forceinline__ float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add_rounded(float a, float b) { return __fadd_rn(a, b); }
// Maxima that propagate NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ float unpack_f16(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
__device__ __forceinline__ float bits_to_float(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }
// The low 32 bits of `high:low` shifted right by `bits` (0 to 31).
__device__ __forceinline__ uint32_t shift_pair(uint32_t low, uint32_t high, unsigned bits) {
  return __funnelshift_r(low, high, bits);
}

}  // namespace fastrl::cuda

#include "clusters.cuh"
#include "launch.cuh"
