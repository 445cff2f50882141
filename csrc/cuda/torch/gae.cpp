// The operator gae_fwd on CUDA tensors.
#include <tuple>

#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

Bootstrap check_bootstrap(const std::optional<Tensor>& values, const Tensor& rewards,
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

std::tuple<Tensor, Tensor> gae_fwd(const Tensor& rewards, const Tensor& values,
                                   const std::optional<Tensor>& mask,
                                   const std::optional<Tensor>& terminated,
                                   const std::optional<Tensor>& truncated,
                                   const std::optional<Tensor>& bootstrap_values,
                                   const std::optional<Tensor>& cu_seqlens, double gamma,
                                   double lam) {
  const Call call(rewards, "rewards");
  check_like(rewards, rewards, ScalarType::Float, "rewards", "rewards");
  STD_TORCH_CHECK(rewards.dim() == 2, "rewards must have shape [B, T], got ", shape_text(rewards));
  check_like(values, rewards, ScalarType::Float, "values", "rewards");
  check_like(mask, rewards, ScalarType::Bool, "mask", "rewards");
  check_like(terminated, rewards, ScalarType::Bool, "terminated", "rewards");
  check_like(truncated, rewards, ScalarType::Bool, "truncated", "rewards");
  const Tensor advantages = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor returns = empty_like_tokens(rewards, ScalarType::Float);

  GaeParams params{};
  params.rewards = rewards.const_data_ptr<float>();
  params.values = values.const_data_ptr<float>();
  params.bootstrap = data_or_null<float>(bootstrap_values);
  params.mask = data_or_null<bool>(mask);
  params.terminated = data_or_null<bool>(terminated);
  params.truncated = data_or_null<bool>(truncated);
  params.cu_seqlens = data_or_null<int32_t>(cu_seqlens);
  params.advantages = advantages.mutable_data_ptr<float>();
  params.returns = returns.mutable_data_ptr<float>();
  params.tokens = rewards.numel();
  params.sequences = check_sequences(rewards, cu_seqlens);
  params.row_length = rewards.size(1);
  params.kind = check_bootstrap(bootstrap_values, rewards, params.sequences);
  params.gamma = static_cast<float>(gamma);
  params.decay = static_cast<float>(gamma * lam);
  std::optional<Tensor> maps, flags;
  const int64_t chunks = gae_chunks(params.tokens);
  if (chunks > 1) {
    maps = scratch(rewards, chunks * kGaeMapBytes);
    flags = torch::stable::new_zeros(rewards, {chunks + 1}, ScalarType::Int);
    params.maps = maps->mutable_data_ptr();
    params.ticket_and_flags = words(*flags);
  }
  check_launch(gae(params, call.stream()), "gae");
  return {advantages, returns};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("gae_fwd", TORCH_BOX(&fastrl::cuda::gae_fwd));
}
