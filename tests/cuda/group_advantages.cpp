// Group advantages: groups by id have the bits of the same groups in consecutive order, whether a
// single block or many work on them.
#include "cuda/groups/group_advantages.cuh"

#include <cstdio>

#include "host/program.h"

using namespace fastrl;
using namespace fastrl::cuda;
using fastrl::cuda::host::Random;

FASTRL_SIZE_OF(GroupAdvantagesParams)

constexpr int kThreads = 2 * kWarp, kThreadsAlone = 4 * kWarp;

// By a single block up to so many rewards. Scratch is made here, where the operator makes it, and
// holds what was there before.
int run_kernels(GroupAdvantagesParams p, int64_t single_block_to) {
  if (p.group_ids) p.num_entries = group_entries(p.count);
  const GroupEntry used{7, 7, 7, 7, 7, 7};
  std::vector<GroupEntry> entries(p.num_entries + 1, used);
  std::vector<uint32_t> entry_of(p.count, 7);
  if (p.group_ids) p.entry_of = entry_of.data();
  if (p.group_ids || p.kinds.scale == Scale::kBatch) p.entries = entries.data();
  return launch_group_advantages<kThreads, kThreadsAlone>(p, 0, single_block_to);
}

extern "C" int group_advantages(const GroupAdvantagesParams* given) {
  return run_kernels(*given, kSingleBlockTo<kThreadsAlone>);
}

struct Result {
  explicit Result(int64_t n) : advantages(n), mean(n), std(n), informative(n) {}
  std::vector<float> advantages, mean, std;
  std::vector<char> informative;

  bool operator==(const Result& other) const {
    return advantages == other.advantages && mean == other.mean && std == other.std &&
           informative == other.informative;
  }
};

bool agrees(int64_t groups, int64_t size, Scale scale, Random random) {
  const int64_t n = groups * size;
  std::vector<float> rewards(n), shuffled(n);
  std::vector<int64_t> ids(n), place(n);
  for (int64_t i = 0; i < n; ++i) place[i] = i;
  for (int64_t i = n - 1; i > 0; --i) std::swap(place[i], place[random.below(i + 1)]);
  for (int64_t i = 0; i < n; ++i) {
    rewards[i] = 0.1f * static_cast<float>(random.below(4)) + 1e4f;
    shuffled[place[i]] = rewards[i];
    ids[place[i]] = (i / size) * 0x100000000 - 7;
  }
  const auto run = [&](const std::vector<float>& from, const int64_t* group_ids,
                       int64_t single_block_to) {
    Result result(n);
    GroupAdvantagesParams p{};
    p.rewards = from.data(), p.group_ids = group_ids;
    p.count = n, p.group_size = group_ids ? 0 : size;
    p.kinds.scale = scale, p.correction = 1.0f, p.eps = 1e-4f;
    p.advantages = result.advantages.data(), p.mean = result.mean.data();
    p.std = result.std.data(), p.informative = reinterpret_cast<bool*>(result.informative.data());
    run_kernels(p, single_block_to);
    return result;
  };
  const Result consecutive = run(rewards, nullptr, 0), found = run(shuffled, ids.data(), 0);
  const bool same_alone =
      consecutive == run(rewards, nullptr, n) && found == run(shuffled, ids.data(), n);
  Result in_order(n);
  for (int64_t i = 0; i < n; ++i) {
    in_order.advantages[i] = found.advantages[place[i]];
    in_order.mean[i] = found.mean[place[i]];
    in_order.std[i] = found.std[place[i]];
    in_order.informative[i] = found.informative[place[i]];
  }
  if (in_order == consecutive && same_alone) return true;
  std::printf("%d groups of %d, scale %d\n", int(groups), int(size), int(scale));
  return false;
}

int main() {
  bool ok = true;
  for (const Scale scale : {Scale::kGroup, Scale::kBatch}) {
    ok = agrees(9, 4, scale, Random(1)) && ok;
    ok = agrees(2, kWholeBlockFrom<kThreads> + 6, scale, Random(2)) && ok;  // a block per group
    ok = agrees(5, 1, scale, Random(3)) && ok;
    ok = agrees(50, 6, scale, Random(4)) && ok;
  }
  return ok ? 0 : 1;
}
