// The part of primitives.cuh that begins with sm_90: clusters of blocks that reach into each
// other's shared memory, and bulk copies that run concurrently with the threads. Kernels that call
// these functions are only for such devices; for others the bodies are empty, and the kernels are
// not launched.
#pragma once

namespace fastrl::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FASTRL_SM90(...) __VA_ARGS__
#else
#define FASTRL_SM90(...)
#endif

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// --- clusters

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned x = 0;
  FASTRL_SM90(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));)
  return x;
}
__device__ __forceinline__ unsigned cluster_size() {
  unsigned x = 1;
  FASTRL_SM90(asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(x));)
  return x;
}
// Called by every thread of every block of the cluster; earlier stores are visible afterwards.
__device__ __forceinline__ void sync_cluster() {
  FASTRL_SM90(asm volatile("barrier.cluster.arrive.release;\n\t"
                           "barrier.cluster.wait.acquire;" :: : "memory");)
}
// The same place in the shared memory of a block of the cluster.
__device__ __forceinline__ unsigned remote_address(const void* shared, unsigned rank) {
  unsigned x = 0;
  FASTRL_SM90(asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(shared_address(shared)),
                  "r"(rank));)
  return x;
}
__device__ __forceinline__ void store_remote(float* shared, unsigned rank, float x) {
  FASTRL_SM90(asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote_address(shared, rank)),
                           "f"(x) : "memory");)
}

// --- transfers into shared memory that run concurrently with the threads

// A barrier in shared memory. It completes a phase once it was armed and the expected bytes have
// arrived, some of which may have arrived before.
struct ByteBarrier {
  uint64_t state;
};
// Called by one thread; sync_block before any use, sync_cluster before use by other blocks.
__device__ __forceinline__ void init(ByteBarrier* barrier) {
  FASTRL_SM90(asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
                           "fence.mbarrier_init.release.cluster;" ::"r"(
                               shared_address(barrier)) : "memory");)
}
// Called by one thread, once per phase and before it waits.
__device__ __forceinline__ void arm(ByteBarrier* barrier, unsigned bytes) {
  FASTRL_SM90(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                               shared_address(barrier)),
                           "r"(bytes) : "memory");)
}
// Addresses and size are multiples of 16 bytes. The data is read once and not kept in L2.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes,
                                          ByteBarrier* barrier) {
  FASTRL_SM90(const uint64_t evict_first = 0x12F0000000000000; asm volatile(
                  "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                  ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
                  "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)),
                  "l"(evict_first) : "memory");)
}
// Stores 4 or 16 bytes to the same place in a block of the cluster, and counts them for the barrier
// that lies in the same place there. That block must not exit before it has waited for them.
__device__ __forceinline__ void send4(uint32_t x, void* shared, ByteBarrier* barrier,
                                      unsigned rank) {
  FASTRL_SM90(asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 "
                           "[%0], %1, [%2];" ::"r"(remote_address(shared, rank)),
                           "r"(x), "r"(remote_address(barrier, rank)) : "memory");)
}
__device__ __forceinline__ void send16(const Vec16& x, void* shared, ByteBarrier* barrier,
                                       unsigned rank) {
  FASTRL_SM90(asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                           "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(shared, rank)),
                           "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3]),
                           "r"(remote_address(barrier, rank)) : "memory");)
}
// Waits until the phase of this parity is complete: 0 the first time, then 1, 0, ... For data from
// other blocks, the scope is the cluster.
template <bool kCluster = false>
__device__ __forceinline__ void wait(ByteBarrier* barrier, unsigned parity) {
  if constexpr (kCluster) {
    FASTRL_SM90(asm volatile("{\n\t.reg .pred done;\n\t"
                             "again:\n\t"
                             "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], "
                             "%1;\n\t"
                             "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
                             "r"(parity) : "memory");)
    return;
  }
  FASTRL_SM90(asm volatile("{\n\t.reg .pred done;\n\t"
                           "again:\n\t"
                           "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                           "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
                           "r"(parity) : "memory");)
}
// Called by threads whose stores a bulk copy will overwrite; then a barrier.
__device__ __forceinline__ void fence_bulk() {
  FASTRL_SM90(asm volatile("fence.proxy.async.shared::cta;" :: : "memory");)
}

#undef FASTRL_SM90

}  // namespace fastrl::cuda
