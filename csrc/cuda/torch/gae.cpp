// The operator gae_fwd on CUDA tensors.
#include <tuple>

#include "../../check_gae.h"
#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor> gae_fwd(const Tensor& rewards, const Tensor& values,
                                   const std::optional<Tensor>& mask,
                                   const std::optional<Tensor>& terminated,
                                   const std::optional<Tensor>& truncated,
                                   const std::optional<Tensor>& bootstrap_values,
                                   const std::optional<Tensor>& cu_seqlens, double gamma,
                                   double lam) {
  const Call call(rewards, "rewards");
  GaeParams params{};
  params.sequences = sequences_of(rewards, cu_seqlens);
  params.in = check_gae({rewards, values, mask, terminated, truncated, bootstrap_values},
                        params.sequences.count);
  const Tensor advantages = empty_like_tokens(rewards, ScalarType::Float);
  const Tensor returns = empty_like_tokens(rewards, ScalarType::Float);
  params.advantages = advantages.mutable_data_ptr<float>();
  params.returns = returns.mutable_data_ptr<float>();
  params.gamma = static_cast<float>(gamma);
  params.decay = static_cast<float>(gamma * lam);
  std::optional<Tensor> maps, flags;
  const int64_t chunks = gae_chunks(params.sequences.tokens);
  if (chunks > 1) {
    maps = scratch(rewards, chunks * kGaeMapBytes);
    flags = zeroed_words(rewards, chunks + 1, call);
    params.maps = maps->mutable_data_ptr();
    params.ticket_and_flags = words_of(*flags);
  }
  check_launch(gae(params, call.stream()), "gae");
  return {advantages, returns};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("gae_fwd", TORCH_BOX(&fastrl::cuda::gae_fwd));
}
