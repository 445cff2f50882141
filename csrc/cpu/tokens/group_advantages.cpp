// Advantages of rewards relative to their group, on one thread, since this is cheap.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "../../check_groups.h"

namespace fastrl::cpu {
namespace {

struct Moments {
  double mean, std;
};

// Two passes; the standard deviation is 0 without degrees of freedom.
template <typename Value>
Moments moments(int64_t begin, int64_t end, double correction, const Value& value) {
  const double n = static_cast<double>(end - begin), freedom = n - correction;
  double sum = 0, squares = 0;
  for (int64_t i = begin; i < end; ++i) sum += value(i);
  const double mean = n > 0 ? sum / n : 0.0;
  for (int64_t i = begin; i < end; ++i) squares += (value(i) - mean) * (value(i) - mean);
  return {mean, std::sqrt(freedom > 0 ? squares / freedom : 0.0 * squares)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_advantages_fwd(
    const Tensor& rewards, const std::optional<Tensor>& group_ids, int64_t group_size,
    int64_t baseline, int64_t scale, double correction, double eps, int64_t singleton) {
  const GroupKinds kinds = check_groups(rewards, group_ids, group_size, baseline, scale, singleton);
  const int64_t count = rewards.numel();

  // the members of a group side by side, in their own order
  std::vector<int64_t> order(count), bounds;
  std::iota(order.begin(), order.end(), 0);
  if (group_size > 0) {
    for (int64_t i = 0; i < count; i += group_size) bounds.push_back(i);
  } else {
    const int64_t* ids = group_ids->const_data_ptr<int64_t>();
    const auto before = [&](int64_t a, int64_t b) { return ids[a] < ids[b]; };
    if (!std::is_sorted(ids, ids + count)) std::stable_sort(order.begin(), order.end(), before);
    for (int64_t i = 0; i < count; ++i) {
      if (i == 0 || ids[order[i]] != ids[order[i - 1]]) bounds.push_back(i);
    }
  }
  bounds.push_back(count);

  const float* reward = rewards.const_data_ptr<float>();
  const auto member = [&](int64_t i) { return static_cast<double>(reward[order[i]]); };
  std::vector<Moments> groups;
  for (size_t g = 0; g + 1 < bounds.size(); ++g) {
    groups.push_back(moments(bounds[g], bounds[g + 1], correction, member));
  }
  double batch_std = 0;
  if (kinds.scale == Scale::kBatch) {
    std::vector<double> known;
    for (size_t g = 0; g < groups.size(); ++g) {
      if (!std::isfinite(groups[g].mean)) continue;
      for (int64_t i = bounds[g]; i < bounds[g + 1]; ++i) known.push_back(member(i));
    }
    const int64_t size = static_cast<int64_t>(known.size());
    batch_std = moments(0, size, correction, [&](int64_t i) { return known[i]; }).std;
  }

  const Tensor advantages = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor means = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor stds = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor informatives = empty_like_tokens(rewards, ScalarType::Bool);
  float* out_advantage = advantages.mutable_data_ptr<float>();
  float* out_mean = means.mutable_data_ptr<float>();
  float* out_std = stds.mutable_data_ptr<float>();
  bool* out_informative = informatives.mutable_data_ptr<bool>();
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t begin = bounds[g], end = bounds[g + 1];
    const double n = static_cast<double>(end - begin);
    const bool finite = std::isfinite(groups[g].mean), alone = end - begin == 1;
    bool equal = finite;
    for (int64_t i = begin; equal && i < end; ++i) equal = member(i) == member(begin);
    const double mean = equal ? member(begin) : groups[g].mean;
    const double std = equal ? 0.0 : groups[g].std;
    const double divisor = kinds.scale == Scale::kNone    ? 1.0
                           : kinds.scale == Scale::kGroup ? std + eps
                           : kinds.scale == Scale::kMean  ? mean + eps
                                                          : batch_std + eps;
    const bool raw = kinds.singleton == Singleton::kRaw;
    for (int64_t i = begin; i < end; ++i) {
      const double r = member(i);
      double advantage = r;
      if (kinds.baseline != Baseline::kNone) {
        advantage = r - mean;  // exactly 0 where all are equal
        if (kinds.baseline == Baseline::kLeaveOneOut) {
          advantage *= n / std::max(n - 1, 1.0);
        }
      }
      if (advantage != 0 || !finite) advantage /= divisor;  // 0 / 0 is 0 here
      if (alone) advantage = raw ? r : 0.0 * r;
      const int64_t at = order[i];
      out_advantage[at] = static_cast<float>(advantage);
      out_mean[at] = static_cast<float>(mean);
      out_std[at] = static_cast<float>(std);
      out_informative[at] = finite && (alone ? raw : !equal);
    }
  }
  return {advantages, means, stds, informatives};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("group_advantages_fwd", fastrl::boxed<fastrl::cpu::group_advantages_fwd>);
}
