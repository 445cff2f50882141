// Counts of loads from and stores to global memory, byte by byte, of ranges that a test watches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fastrl::cuda::host {

struct Watched {
  const unsigned char* begin = nullptr;
  size_t bytes = 0;
  unsigned char *loads = nullptr, *stores = nullptr;  // one count per byte
};
constexpr int kMaxWatched = 2;
inline Watched watched[kMaxWatched];

inline void count(const void* at, size_t bytes, unsigned char* Watched::* counts) {
  for (const Watched& range : watched) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(at) - range.begin;
    if (!range.begin || offset + static_cast<ptrdiff_t>(bytes) <= 0 ||
        offset >= static_cast<ptrdiff_t>(range.bytes)) {
      continue;
    }
    for (size_t i = 0; i < bytes; ++i) {
      const ptrdiff_t byte = offset + static_cast<ptrdiff_t>(i);
      if (byte < 0 || byte >= static_cast<ptrdiff_t>(range.bytes)) continue;
      __atomic_fetch_add(&(range.*counts)[byte], 1, __ATOMIC_RELAXED);
    }
  }
}
inline void count_loads(const void* at, size_t bytes) { count(at, bytes, &Watched::loads); }
inline void count_stores(const void* at, size_t bytes) { count(at, bytes, &Watched::stores); }

}  // namespace fastrl::cuda::host
