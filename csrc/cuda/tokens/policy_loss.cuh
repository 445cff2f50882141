// The policy loss from token log-probabilities: loss, slope per token and metrics in one launch.
//
// At token level a block takes a range of tokens; at the sequence levels a cluster of blocks takes
// whole sequences and reads each three times: mean log-ratio, sum of slopes, losses. The block that
// finishes last adds up the sums of all blocks.
#pragma once

#include "policy_tokens.cuh"

namespace fastrl::cuda {

// Adds up the sums of all blocks in order, and writes the results of the operator.
template <int kThreads>
__device__ __forceinline__ void finish(const PolicyLossParams& p, TokenSums sums,
                                       TokenSums* shared) {
  TokenSums* partial_sums = static_cast<TokenSums*>(p.partial_sums);
  sums = sum_block<kThreads>(sums, shared);
  if (num_blocks() > 1) {
    if (thread_index() == 0) partial_sums[block_index()] = sums;
    if (!last_block(p.arrived, reinterpret_cast<uint32_t*>(shared))) return;
    sums = TokenSums{};
    for (unsigned i = thread_index(); i < num_blocks(); i += kThreads) sums.add(partial_sums[i]);
    sums = sum_block<kThreads>(sums, shared);
  }
  if (thread_index() != 0) return;
  const Coefficients<float>& c = p.objective.coefficients;
  Sum loss = sums.policy;
  if (c.kl_coef != 0.0f) loss.add(c.kl_coef * sums.weighted_kl.total());
  if (c.entropy_coef != 0.0f) loss.add(-(c.entropy_coef * sums.weighted_entropy.total()));
  *p.loss = loss.total();
  const float n = sums.active ? static_cast<float>(sums.active) : 1.0f;
  Metrics& metrics = *p.metrics;
  metrics.policy_loss = sums.policy.total();
  metrics.kl = sums.kl.total() / n;
  metrics.kl_old = sums.kl_old.total() / n;
  metrics.entropy = sums.entropy.total() / n;
  metrics.ratio_mean = sums.ratio.total() / n;
  metrics.ratio_max = sums.ratio_max;
  metrics.ratio_min = sums.ratio_min;
  metrics.clip_low = static_cast<float>(sums.clip_low) / n;
  metrics.clip_high = static_cast<float>(sums.clip_high) / n;
  metrics.clip_fraction = static_cast<float>(sums.clip_low + sums.clip_high) / n;
  metrics.active_tokens = static_cast<float>(sums.active);
  metrics.zero_grad_fraction = static_cast<float>(sums.zero_grad) / n;
}

// At most 96 registers: with fewer the kernel spills on sm_100.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 640 / kThreads)
    policy_loss_of_tokens(const __grid_constant__ PolicyLossParams p) {
  TokenSums* shared = shared_memory<TokenSums>();
  TokenSums sums{};
  const int64_t begin = block_index() * p.per_block, after = begin + p.per_block;
  const TokenRange range{begin, after < p.sequences.tokens ? after : p.sequences.tokens, -1};
  for_each_quad<kThreads, false>(p, range, 0, 1,
                                 [&](const auto& q) { add_tokens<false>(q, {}, &sums); });
  finish<kThreads>(p, sums, shared);
}

template <int kThreads>
struct SequenceShared {
  TokenSums warps[kThreads / kWarp];
  float ranks[kMostRanks][3];  // sum and count of every block of the cluster
};

// Every thread of the cluster receives the sum over the cluster, added in the order of the blocks.
template <int kThreads>
__device__ __forceinline__ CountedSum sum_cluster(CountedSum x, SequenceShared<kThreads>* shared) {
  x = sum_block<kThreads>(x, reinterpret_cast<CountedSum*>(shared->warps));
  const unsigned ranks = cluster_size(), to = static_cast<unsigned>(thread_index());
  if (ranks == 1) return x;
  if (to < ranks) {
    float* place = shared->ranks[cluster_rank()];
    store_remote(place, to, x.sum.high);
    store_remote(place + 1, to, x.sum.low);
    store_remote(place + 2, to, bits_to_float(x.count));
  }
  sync_cluster();
  x = CountedSum{};
  for (unsigned rank = 0; rank < ranks; ++rank) {
    const float* place = shared->ranks[rank];
    x.add(CountedSum{{place[0], place[1]}, float_to_bits(place[2])});
  }
  sync_cluster();  // before the next sum is stored
  return x;
}

// The mean of the log-ratios of a sequence, or of the clipped ones that gmpo averages.
template <int kThreads>
__device__ __forceinline__ float mean_log_ratio(const PolicyLossParams& p,
                                                const TokenRange& sequence,
                                                SequenceShared<kThreads>* shared, float* count) {
  const Objective<float>& o = p.objective;
  CountedSum own{};
  for_each_quad<kThreads, true>(p, sequence, cluster_rank(), cluster_size(), [&](const auto& q) {
    float x[kQuad];
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      x[k] = q.difference[k];
      if (o.surrogate == Surrogate::kGmpo) {
        x[k] = gmpo_terms<FloatMath>(x[k], q.advantage[k], o.coefficients).log_ratio;
      }
      own.count += q.is_active(k);
    }
    add_quad(&own.sum, x);
  });
  own = sum_cluster(own, shared);
  *count = own.count ? static_cast<float>(own.count) : 1.0f;
  return own.sum.total() / *count;
}

// The part of the slope that every token of a sequence receives through the ratio they share.
template <int kThreads>
__device__ __forceinline__ float shared_slope(const PolicyLossParams& p, const TokenRange& sequence,
                                              SequenceShared<kThreads>* shared, float mean,
                                              float count) {
  const Objective<float>& o = p.objective;
  const float kl_coef = o.coefficients.kl_coef;
  const bool policy = flows_through_ratio(o.surrogate);
  // a single token's slope through the ratio is part of its own slope
  const bool kl = kl_coef != 0.0f && !o.kl_by_token() && count > 1.0f;
  if (o.level != Level::kSequence || !(policy || kl)) return 0.0f;
  CountedSum own{};
  for_each_quad<kThreads, true>(p, sequence, cluster_rank(), cluster_size(), [&](const auto& q) {
    float x[kQuad] = {};
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      if (policy && q.is_active(k)) {
        x[k] = weighted<FloatMath>(q.weight[k], shared_terms(q, k, mean).slope);
      }
    }
    if (kl) {
      float ref_logprob[kQuad], weight[kQuad];
      q.load(p.constants.ref_logprobs, ref_logprob);
      q.load(p.constants.kl_weights, weight);
      FASTRL_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        if (!q.is_active(k)) continue;
        x[k] += weight[k] * (kl_coef * q.kl(k, ref_logprob[k], mean).ratio_slope);
      }
    }
    add_quad(&own.sum, x);
  });
  return sum_cluster(own, shared).sum.total() / count;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    policy_loss_of_sequences(const __grid_constant__ PolicyLossParams p) {
  SequenceShared<kThreads>* shared = shared_memory<SequenceShared<kThreads>>();
  if (cluster_size() > 1) sync_cluster();  // every block runs and can be stored to
  TokenSums sums{};
  const int64_t first = block_index() / cluster_size() * p.per_block, after = first + p.per_block;
  for (int64_t s = first; s < after && s < p.sequences.count; ++s) {
    const TokenRange sequence{p.sequences.begin(s), p.sequences.end(s), s};
    float count;
    SharedRatio ratio;
    ratio.mean = mean_log_ratio<kThreads>(p, sequence, shared, &count);
    ratio.slope = shared_slope<kThreads>(p, sequence, shared, ratio.mean, count);
    ratio.alone = count == 1.0f;
    for_each_quad<kThreads, true>(p, sequence, cluster_rank(), cluster_size(),
                                  [&](const auto& q) { add_tokens<true>(q, ratio, &sums); });
  }
  finish<kThreads>(p, sums, shared->warps);
}

inline bool on_vector_boundaries(const PolicyLossParams& p) {
  const LossConstants& c = p.constants;
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.mask) * (16 / kQuad);
  const auto add = [&](const float* tokens) { bits |= reinterpret_cast<uintptr_t>(tokens); };
  for (const Constant& constant :
       {c.advantages, c.weights, c.kl_weights, c.entropy_weights, c.policy_weights}) {
    if (!constant.by_sequence) add(constant.values);
  }
  for (const float* tokens : {p.logprobs, p.entropy, c.old_logprobs, c.ref_logprobs}) add(tokens);
  add(p.slope);
  add(p.entropy_slope);
  return bits % 16 == 0;
}

inline bool any_by_sequence(const LossConstants& c) {
  return c.advantages.by_sequence || c.weights.by_sequence || c.kl_weights.by_sequence ||
         c.entropy_weights.by_sequence || c.policy_weights.by_sequence;
}

// `params` as policy_loss_blocks left them, with room for the sums of as many blocks. Clusters need
// sm_90, and room for all their blocks at once.
template <int kTokenThreads = 128, int kSequenceThreads = 512>
Status launch_policy_loss(PolicyLossParams params, unsigned blocks, const DeviceLimits& limits,
                          Stream stream) {
  params.aligned = on_vector_boundaries(params);
  params.by_sequence = any_by_sequence(params.constants);
  if (params.objective.level == Level::kToken) {
    const size_t bytes = kTokenThreads / kWarp * sizeof(TokenSums);
    return launch(policy_loss_of_tokens<kTokenThreads>, {blocks, kTokenThreads, 1, bytes}, params,
                  stream);
  }
  const auto kernel = policy_loss_of_sequences<kSequenceThreads>;
  LaunchShape shape{blocks, kSequenceThreads, params.ranks,
                    sizeof(SequenceShared<kSequenceThreads>)};
  if (shape.cluster > 1 && (limits.major < 9 || resident_clusters(kernel, shape, limits) == 0)) {
    shape.blocks /= shape.cluster;
    shape.cluster = 1;
  }
  return launch(kernel, shape, params, stream);
}

}  // namespace fastrl::cuda
