// Checks the arguments of group_advantages_fwd.
#pragma once

#include "check.h"

namespace fastrl {

inline GroupKinds check_groups(const Tensor& rewards, const std::optional<Tensor>& group_ids,
                               int64_t group_size, int64_t baseline, int64_t scale,
                               int64_t singleton) {
  check_like(rewards, rewards, ScalarType::Float, "rewards", "rewards");
  STD_TORCH_CHECK(rewards.dim() == 1, "rewards must have shape [N], got ", shape_text(rewards));
  if (group_size > 0) {
    STD_TORCH_CHECK(rewards.numel() % group_size == 0, "rewards must hold whole groups of ",
                    group_size, ", got ", rewards.numel());
  } else {
    STD_TORCH_CHECK(group_ids.has_value(), "group_ids must be given when group_size is 0");
    check_like(*group_ids, rewards, ScalarType::Long, "group_ids", "rewards");
  }
  return {check_kind<Baseline>(baseline, "baseline"), check_kind<Scale>(scale, "scale"),
          check_kind<Singleton>(singleton, "singleton")};
}

}  // namespace fastrl
