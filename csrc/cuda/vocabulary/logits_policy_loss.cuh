// The policy loss from logits in one pass: log-probability, entropy and the gradient of the loss.
#pragma once

#include "dispatch.cuh"
#include "one_pass_cluster.cuh"
#include "one_pass_plain.cuh"

namespace fastrl::cuda {

template <typename T, bool kAligned, bool kSoftcap, int kThreads, typename Gradient = T>
Status launch_one_pass(const LogitsPolicyLossCall& call, const DeviceLimits& limits,
                       Stream stream) {
  const RowGeometry& rows = call.rows;
  if (limits.major >= 9 && rows.splits.count <= kMaxCluster) {
    const auto kernel = one_pass_cluster_kernel<T, kAligned, kSoftcap, kThreads, Gradient>;
    const unsigned ranks = static_cast<unsigned>(rows.splits.count);
    LaunchShape shape{ranks, kThreads, ranks,
                      ClusterShared<kThreads>::template bytes<T, kAligned>(rows)};
    // as many blocks per SM as fit, at most three; 0 if the device cannot hold a cluster of this
    // size, or this much shared memory
    const unsigned clusters = static_cast<unsigned>(resident_clusters(kernel, shape, limits));
    shape.blocks *= clusters < rows.rows ? clusters : rows.rows;
    if (clusters > 0) return launch(kernel, shape, call, stream);
  }
  // As many rows at once as fit in half of L2, where the second sweep finds them, and at least one
  // per SM.
  const unsigned sms = static_cast<unsigned>(limits.sms);
  const int64_t row_bytes = rows.vocabulary * static_cast<int64_t>(sizeof(T));
  const unsigned cached = static_cast<unsigned>(limits.l2_bytes / 2 / row_bytes / sms);
  const unsigned blocks = sms * (cached < 1 ? 1 : (cached > 8 ? 8 : cached));
  const LaunchShape shape{blocks < rows.rows ? blocks : rows.rows, kThreads, 1,
                          PlainShared<kThreads>::bytes(rows)};
  return launch(one_pass_plain_kernel<T, kAligned, kSoftcap, kThreads, Gradient>, shape, call,
                stream);
}

template <int kThreads = kVocabularyThreads>
Status launch_logits_policy_loss(const LogitsPolicyLossParams& p, const DeviceLimits& limits,
                                 Stream stream) {
  if (!fits(p.in) || p.objective.level != Level::kToken) return kInvalid;
  const LogitsPolicyLossCall call{p, geometry(p.in, &p.out), Scaling::of(p.in)};
  if (call.rows.rows == 0) return kSuccess;
  return dispatch(p.in, p.out, call.rows, [&](auto element, auto out, auto aligned, auto softcap) {
    return launch_one_pass<decltype(element), aligned, softcap, kThreads, decltype(out)>(
        call, limits, stream);
  });
}

}  // namespace fastrl::cuda
