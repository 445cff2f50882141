// The host version of csrc/cuda/device/primitives.cuh: the same names, on the machine of machine.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "machine.h"
#include "traffic.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define FASTRL_UNROLL

namespace fastrl::cuda {

using Stream = void*;
using Status = int;
constexpr Status kSuccess = 0, kInvalid = 1;
constexpr int kWarp = host::kLanes;
constexpr bool kHasClusters = true;

// --- where this thread is

inline int thread_index() { return host::here.thread; }
inline unsigned block_index() { return host::here.block_index; }
inline unsigned num_blocks() { return host::here.shape->blocks; }
template <typename T>
T* shared_memory() {
  return reinterpret_cast<T*>(host::here.block->shared);
}

// --- barriers and shuffles

inline void sync_block() { host::here.block->barrier.wait(); }
inline void sync_warp() { host::here.warp->barrier.wait(); }
template <typename T>
T shuffle(T x, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  host::Here& here = host::here;
  uint64_t* slots = here.warp->slots[here.parity ^= 1];
  std::memcpy(&slots[here.lane], &x, sizeof(T));
  here.warp->barrier.wait();
  std::memcpy(&x, &slots[lane % kWarp], sizeof(T));
  return x;
}
template <typename T>
T shuffle_xor(T x, int lanes) {
  return shuffle(x, host::here.lane ^ lanes);
}
template <typename T>
T shuffle_up(T x, int by) {
  return shuffle(x, host::here.lane >= by ? host::here.lane - by : host::here.lane);
}
template <typename T>
T shuffle_down(T x, int by) {
  return shuffle(x, host::here.lane + by < kWarp ? host::here.lane + by : host::here.lane);
}
inline uint32_t lanes_where(bool x) {
  host::Here& here = host::here;
  uint64_t* slots = here.warp->slots[here.parity ^= 1];
  slots[here.lane] = x;
  here.warp->barrier.wait();
  uint32_t lanes = 0;
  for (int lane = 0; lane < kWarp; ++lane) lanes |= static_cast<uint32_t>(slots[lane]) << lane;
  return lanes;
}

// --- memory that several blocks write

template <typename T>
T atomic_add(T* p, T x) {
  return std::atomic_ref<T>(*p).fetch_add(x, std::memory_order_relaxed);
}
template <typename T>
T atomic_max(T* p, T x) {
  const std::atomic_ref<T> shared(*p);
  T old = shared.load(std::memory_order_relaxed);
  while (old < x && !shared.compare_exchange_weak(old, x, std::memory_order_relaxed)) {
  }
  return old;
}
template <typename T>
T atomic_compare_and_swap(T* p, T expected, T x) {
  std::atomic_ref<T>(*p).compare_exchange_strong(expected, x, std::memory_order_relaxed);
  return expected;
}
inline void store_release(unsigned* p, unsigned x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
inline unsigned load_acquire(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline unsigned add_acquire_release(unsigned* p, unsigned x) {
  return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}
inline void pause() { std::this_thread::yield(); }

// --- vector access

inline Vec16 copy16(const void* from) {
  host::require(reinterpret_cast<uintptr_t>(from) % 16 == 0, "a vector load is not aligned");
  return *static_cast<const Vec16*>(from);
}
inline Vec16 load16(const void* global) {
  host::count_loads(global, 16);
  return copy16(global);
}
inline Vec16 load16_once(const void* global) { return load16(global); }
// Touches only the bytes that count; NaN in place of the others would show in any result.
template <bool kOnce>
Vec16 load16_within(const void* global, const void* begin, const void* end) {
  host::require(reinterpret_cast<uintptr_t>(global) % 16 == 0, "a vector load is not aligned");
  const auto from = static_cast<const unsigned char*>(global);
  const auto first = std::max(from, static_cast<const unsigned char*>(begin));
  const auto last = std::min(from + 16, static_cast<const unsigned char*>(end));
  host::require(first < last, "a vector load holds nothing of the row");
  Vec16 x;
  std::memset(&x, 0xff, sizeof(x));
  std::memcpy(reinterpret_cast<unsigned char*>(&x) + (first - from), first, last - first);
  host::count_loads(first, last - first);
  return x;
}
inline void store16_once(void* global, Vec16 x) {
  host::count_stores(global, 16);
  host::require(reinterpret_cast<uintptr_t>(global) % 16 == 0, "a vector store is not aligned");
  *static_cast<Vec16*>(global) = x;
}
inline Vec16 load16_shared(const void* shared) { return copy16(shared); }
template <typename T>
T load_element(const T* global) {
  host::count_loads(global, sizeof(T));
  return *global;
}
template <typename T>
void store_element(T* global, T x) {
  host::count_stores(global, sizeof(T));
  *global = x;
}

// --- arithmetic

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? 0.0f : x; }
inline float fast_exp2(float x) { return flush(std::exp2(x)); }
inline float fast_reciprocal(float x) { return flush(1.0f / x); }
inline float multiply_rounded(float a, float b) { return a * b; }
inline float add_rounded(float a, float b) { return a + b; }
inline float max_nan(float a, float b) { return a != a ? a : (b != b ? b : (a > b ? a : b)); }
inline uint32_t count_bits(uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }
inline uint32_t shift_pair(uint32_t low, uint32_t high, unsigned bits) {
  return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (bits & 31));
}

inline float widen_bf16(uint32_t bits) { return bits_to_float(bits << 16); }
inline uint32_t round_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float unpack_f16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
inline uint32_t round_f16(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return x != x ? 0x7fff : bits;
}
inline uint32_t pack_bf16x2(float low, float high) {
  return round_bf16(low) | round_bf16(high) << 16;
}
inline uint32_t pack_f16x2(float low, float high) { return round_f16(low) | round_f16(high) << 16; }
inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(max_nan(widen_bf16(a & 0xffff), widen_bf16(b & 0xffff)),
                     max_nan(widen_bf16(a >> 16), widen_bf16(b >> 16)));
}
inline uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
  return pack_f16x2(max_nan(unpack_f16(a & 0xffff), unpack_f16(b & 0xffff)),
                    max_nan(unpack_f16(a >> 16), unpack_f16(b >> 16)));
}

// --- clusters

inline unsigned cluster_rank() { return host::here.rank; }
inline unsigned cluster_size() { return host::here.shape->cluster; }
inline void sync_cluster() { host::here.cluster->barrier.wait(); }
namespace host {
// The same place in another block's shared memory.
template <typename T>
T* in_block(T* shared, unsigned rank) {
  const auto offset = reinterpret_cast<unsigned char*>(shared) - here.block->shared;
  require(offset >= 0 && offset + sizeof(T) <= here.shape->shared_bytes && rank < cluster_size(),
          "a remote store outside the shared memory of the cluster");
  require(here.cluster->barrier.met(), "a remote store to a block that may not run yet");
  return reinterpret_cast<T*>(here.cluster->blocks[rank]->shared + offset);
}
}  // namespace host
inline void store_remote(float* shared, unsigned rank, float x) {
  *host::in_block(shared, rank) = x;
}

// --- transfers that run beside the threads

struct ByteBarrier {
  std::atomic<int64_t> state;  // twice the missing bytes, plus 1 once the phase is armed
  std::atomic<uint32_t> phase;

  void change(int64_t by) {
    int64_t old = state.load(std::memory_order_relaxed), now;
    do {
      host::require(!(old & by & 1), "a barrier is armed twice in a phase");
      now = old + by;
      host::require(std::abs(now) < 2 << 20, "a barrier cannot count as many bytes");
    } while (!state.compare_exchange_weak(old, now == 1 ? 0 : now, std::memory_order_acq_rel,
                                          std::memory_order_relaxed));
    if (now != 1) return;
    phase.fetch_add(1, std::memory_order_release);
    host::wake_all(phase);
  }
};
inline void init(ByteBarrier* barrier) { new (barrier) ByteBarrier{{0}, {0}}; }
inline void arm(ByteBarrier* barrier, unsigned bytes) { barrier->change(2 * int64_t{bytes} + 1); }
inline void bulk_load(void* shared, const void* global, unsigned bytes, ByteBarrier* barrier) {
  host::require(reinterpret_cast<uintptr_t>(shared) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(global) % 16 == 0 && bytes % 16 == 0 && bytes > 0,
                "a bulk copy is not of whole aligned vectors");
  host::count_loads(global, bytes);
  host::here.block->copies.submit([=] {
    std::memcpy(shared, global, bytes);
    barrier->change(-2 * int64_t{bytes});
  });
}
// Delivered some time later, as on a GPU: by the thread that copies for the block it goes to.
template <typename T>
void send(T x, void* shared, ByteBarrier* barrier, unsigned rank) {
  host::require(reinterpret_cast<uintptr_t>(shared) % sizeof(T) == 0, "a send is not aligned");
  T* const to = host::in_block(static_cast<T*>(shared), rank);
  ByteBarrier* const counted = host::in_block(barrier, rank);
  host::Block* const block = host::here.cluster->blocks[rank].get();
  block->copies.submit([=] {
    host::require(block->running.load() != 0, "a store to a block that has exited");
    *to = x;
    counted->change(-2 * int64_t{sizeof(x)});
  });
}
inline void send4(uint32_t x, void* shared, ByteBarrier* barrier, unsigned rank) {
  send(x, shared, barrier, rank);
}
inline void send16(const Vec16& x, void* shared, ByteBarrier* barrier, unsigned rank) {
  send(x, shared, barrier, rank);
}
template <bool kCluster = false>
void wait(ByteBarrier* barrier, unsigned parity) {
  for (uint32_t phase; (phase = barrier->phase.load(std::memory_order_acquire)) % 2 == parity;) {
    host::sleep_while(barrier->phase, phase);
  }
}
inline void fence_bulk() {}

// --- launches

template <typename Params>
Status launch(void (*kernel)(Params), const LaunchShape& shape, const Params& params, Stream) {
  if (shape.blocks == 0) return kInvalid;
  host::run(shape, [&] { kernel(params); });
  return kSuccess;
}
// Those that host::run has at work at once, if the device that `limits` tells of holds one.
template <typename Params>
int resident_clusters(void (*)(Params), const LaunchShape& shape, const DeviceLimits& limits) {
  const bool fits = shape.shared_bytes <= static_cast<size_t>(limits.shared_per_block) &&
                    shape.cluster <= static_cast<unsigned>(limits.sms);
  return fits ? host::kClustersAtOnce : 0;
}

}  // namespace fastrl::cuda
