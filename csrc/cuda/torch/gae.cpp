// The operator gae_fwd on CUDA tensors.
#include <tuple>

#include "../../check_gae.h"
#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor> gae_fwd(const GaeArguments& arguments,
                                   const std::optional<Tensor>& cu_seqlens, double gamma,
                                   double lam) {
  const Call call(arguments.rewards, "rewards");
  GaeParams params{};
  params.sequences = sequences_of(arguments.rewards, cu_seqlens);
  params.in = check_gae(arguments, params.sequences.count);
  const Tensor advantages = empty_like_tokens(arguments.rewards, ScalarType::Float);
  const Tensor returns = empty_like_tokens(arguments.rewards, ScalarType::Float);
  params.advantages = advantages.mutable_data_ptr<float>();
  params.returns = returns.mutable_data_ptr<float>();
  params.gamma = static_cast<float>(gamma);
  params.decay = static_cast<float>(gamma * lam);
  std::optional<Tensor> maps, flags;
  const int64_t chunks = gae_chunks(params.sequences.tokens);
  if (chunks > 1) {
    maps = scratch(arguments.rewards, chunks * kGaeMapBytes);
    flags = zeroed_words(arguments.rewards, chunks + 1, call);
    params.maps = maps->mutable_data_ptr();
    params.ticket_and_flags = words_of(*flags);
  }
  check_launch(gae(params, call.stream()), "gae");
  return {advantages, returns};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("gae_fwd", fastrl::boxed<fastrl::cuda::gae_fwd>);
}
