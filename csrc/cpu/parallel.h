// Tasks on torch's thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastrl::cpu {

// Calls run(task) for every task in [0, count); each thread takes the next remaining task. The
// result must not depend on which thread runs a task, and run must not throw.
template <typename Run>
void for_each_task(int64_t count, const Run& run) {
  const int64_t workers =
      count > 1 ? std::min<int64_t>(count, torch::stable::get_num_threads()) : 1;
  if (workers == 1) {
    for (int64_t task = 0; task < count; ++task) run(task);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(task);
  });
}

// The same over ranges: run(begin, end) with at most `grain` items each, split at multiples of it.
template <typename Run>
void for_each_range(int64_t count, int64_t grain, const Run& run) {
  for_each_task((count + grain - 1) / grain,
                [&](int64_t task) { run(task * grain, std::min(count, (task + 1) * grain)); });
}

}  // namespace fastrl::cpu
