// What the operator of group advantages passes to its kernels. No torch.
#pragma once

#include <cstdint>

#include "../../contract.h"

namespace fastrl::cuda {

// One group of arbitrary ids.
struct GroupEntry {
  uint32_t owner;                // the member that claimed the entry; kNobody where none did
  uint32_t highest, not_lowest;  // rewards in an order of integers
  uint32_t count;
  unsigned long long sum, squares;  // in fixed point
};
constexpr uint32_t kNobody = 0xffffffffu;

struct GroupAdvantagesParams {
  const float* rewards;
  const int64_t* group_ids;  // null where groups are consecutive
  int64_t count, group_size;
  GroupKinds kinds;
  float correction, eps;
  float *advantages, *mean, *std;
  bool* informative;
  // with ids: 2 * count entries or more, a power of two, and the entry of each reward
  GroupEntry* entries;
  uint32_t* entry_of;
  int64_t num_entries;
  uint32_t* arrived;  // 0 before; only with Scale::kBatch and consecutive groups
};

inline int64_t group_entries(int64_t count) {
  int64_t entries = 2;
  while (entries < 2 * count) entries *= 2;
  return entries;
}

}  // namespace fastrl::cuda
