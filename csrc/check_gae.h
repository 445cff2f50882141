// Checks the arguments of gae_fwd.
#pragma once

#include "check.h"
#include "gae_inputs.h"

namespace fastrl {

struct GaeArguments {
  Tensor rewards, values;
  std::optional<Tensor> mask, terminated, truncated, bootstrap_values;

  auto fields() { return std::tie(rewards, values, mask, terminated, truncated, bootstrap_values); }
};

inline Bootstrap check_bootstrap(const std::optional<Tensor>& values, const Tensor& rewards,
                                 int64_t sequences) {
  if (!values) return Bootstrap::kNone;
  if (values->dim() == 2) {
    check_like(*values, rewards, ScalarType::Float, "bootstrap_values", "rewards");
    return Bootstrap::kToken;
  }
  check_device(*values, rewards, "bootstrap_values", "rewards");
  check_dtype(*values, ScalarType::Float, "bootstrap_values");
  STD_TORCH_CHECK(values->dim() == 1 && values->is_contiguous() && values->size(0) == sequences,
                  "bootstrap_values must have one value per sequence (", sequences,
                  ") or per token, got ", shape_text(*values));
  return Bootstrap::kSequence;
}

inline GaeInputs check_gae(const GaeArguments& in, int64_t sequences) {
  const Tensor& rewards = in.rewards;
  STD_TORCH_CHECK(rewards.dim() == 2, "rewards must have shape [B, T], got ", shape_text(rewards));
  check_like(rewards, rewards, ScalarType::Float, "rewards", "rewards");
  check_like(in.values, rewards, ScalarType::Float, "values", "rewards");
  check_like(in.mask, rewards, ScalarType::Bool, "mask", "rewards");
  check_like(in.terminated, rewards, ScalarType::Bool, "terminated", "rewards");
  check_like(in.truncated, rewards, ScalarType::Bool, "truncated", "rewards");
  const Bootstrap bootstrap = check_bootstrap(in.bootstrap_values, rewards, sequences);
  return {rewards.const_data_ptr<float>(),
          in.values.const_data_ptr<float>(),
          data_or_null<float>(in.bootstrap_values),
          data_or_null<bool>(in.mask),
          data_or_null<bool>(in.terminated),
          data_or_null<bool>(in.truncated),
          bootstrap};
}

}  // namespace fastrl
