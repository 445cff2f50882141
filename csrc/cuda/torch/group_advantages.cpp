// The operator group_advantages_fwd on CUDA tensors.
#include <tuple>

#include "../../check_groups.h"
#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> group_advantages_fwd(
    const Tensor& rewards, const std::optional<Tensor>& group_ids, int64_t group_size,
    int64_t baseline, int64_t scale, double correction, double eps, int64_t singleton) {
  const Call call(rewards, "rewards");
  const auto kinds = check_groups(rewards, group_ids, group_size, baseline, scale, singleton);
  const Tensor advantages = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor mean = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor std = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor informative = empty_like_tokens(rewards, ScalarType::Bool);

  GroupAdvantagesParams params{};
  params.rewards = rewards.const_data_ptr<float>();
  params.count = rewards.numel();
  STD_TORCH_CHECK(params.count < int64_t{1} << 30, "rewards must be fewer than 2^30, got ",
                  params.count);
  params.group_size = group_size;
  params.kinds = kinds;
  params.correction = static_cast<float>(correction);
  params.eps = static_cast<float>(eps);
  params.advantages = advantages.mutable_data_ptr<float>();
  params.mean = mean.mutable_data_ptr<float>();
  params.std = std.mutable_data_ptr<float>();
  params.informative = informative.mutable_data_ptr<bool>();
  std::optional<Tensor> entries, entry_of;
  if (group_size == 0) {
    params.group_ids = group_ids->const_data_ptr<int64_t>();
    params.num_entries = group_entries(params.count);
    entry_of = torch::stable::new_empty(rewards, {params.count}, ScalarType::Int);
    params.entry_of = words_of(*entry_of);
  }
  if (group_size == 0 || kinds.scale == Scale::kBatch) {
    entries = scratch(rewards, (params.num_entries + 1) * static_cast<int64_t>(sizeof(GroupEntry)));
    params.entries = static_cast<GroupEntry*>(entries->mutable_data_ptr());
  }
  check_launch(cuda::group_advantages(params, call.stream()), "group_advantages");
  return {advantages, mean, std, informative};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("group_advantages_fwd", fastrl::boxed<fastrl::cuda::group_advantages_fwd>);
}
