// Arguments of the kernels of group advantages. No torch.
#pragma once

#include <cstdint>

#include "../../contract.h"

namespace fastrl::cuda {

// The sums of rewards in integers, which are the same in any order: of one group, or of the batch.
struct GroupEntry {
  uint32_t owner;                // the member that claimed the entry, plus 1; 0 if none did
  uint32_t highest, not_lowest;  // rewards in an order of integers
  uint32_t count;
  unsigned long long sum, squares;  // in fixed point
};

struct GroupAdvantagesParams {
  const float* rewards;
  const int64_t* group_ids;  // null if groups are consecutive
  int64_t count, group_size;
  GroupKinds kinds;
  float correction, eps;
  float *advantages, *mean, *std;
  bool* informative;
  // With ids: at least 2 * count entries, a power of two, and the entry of each reward; without ids
  // none. Behind them an entry of the batch, needed with ids or Scale::kBatch.
  GroupEntry* entries;
  uint32_t* entry_of;
  int64_t num_entries;
};

inline int64_t group_entries(int64_t count) {
  int64_t entries = 2;
  while (entries < 2 * count) entries *= 2;
  return entries;
}

}  // namespace fastrl::cuda
