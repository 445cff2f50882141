// The policy loss from token log-probabilities: loss, slope per token and metrics in one launch.
//
// At token level a block takes a range of tokens; at the sequence levels a cluster of blocks takes
// whole sequences and reads each three times: mean log-ratio, sum of slopes, losses. The block that
// finishes last adds up what the others left.
#pragma once

#include "policy_tokens.cuh"

namespace fastrl::cuda {

// Adds the parts of all blocks in their order and writes what the operator returns.
template <int kThreads>
__device__ __forceinline__ void finish(const PolicyLossParams& p, TokenSums sums,
                                       TokenSums* shared) {
  TokenSums* parts = static_cast<TokenSums*>(p.parts);
  sums = sum_block<kThreads>(sums, shared);
  if (num_blocks() > 1) {
    if (thread_index() == 0) parts[block_index()] = sums;
    if (!last_block(p.arrived, reinterpret_cast<uint32_t*>(shared))) return;
    sums = TokenSums{};
    for (unsigned i = thread_index(); i < num_blocks(); i += kThreads) sums.add(parts[i]);
    sums = sum_block<kThreads>(sums, shared);
  }
  if (thread_index() != 0) return;
  const Coefficients<float>& c = p.coefficients;
  Sum loss = sums.policy;
  if (c.kl_coef != 0.0f) loss.add(c.kl_coef * sums.weighted_kl.total());
  if (c.entropy_coef != 0.0f) loss.add(-(c.entropy_coef * sums.weighted_entropy.total()));
  *p.loss = loss.total();
  const float n = sums.active ? static_cast<float>(sums.active) : 1.0f;
  p.metrics[0] = sums.policy.total();
  p.metrics[1] = sums.kl.total() / n;
  p.metrics[2] = sums.kl_old.total() / n;
  p.metrics[3] = sums.entropy.total() / n;
  p.metrics[4] = sums.ratio.total() / n;
  p.metrics[5] = sums.ratio_max;
  p.metrics[6] = sums.ratio_min;
  p.metrics[7] = static_cast<float>(sums.clip_low) / n;
  p.metrics[8] = static_cast<float>(sums.clip_high) / n;
  p.metrics[9] = static_cast<float>(sums.clip_low + sums.clip_high) / n;
  p.metrics[10] = static_cast<float>(sums.active);
  p.metrics[11] = static_cast<float>(sums.zero_grad) / n;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    policy_loss_of_tokens(const __grid_constant__ PolicyLossParams p) {
  TokenSums* shared = shared_memory<TokenSums>();
  TokenSums sums{};
  const int64_t begin = block_index() * p.per_block, after = begin + p.per_block;
  const int64_t end = after < p.tokens ? after : p.tokens;
  for_each_quad<kThreads>(p, begin, end, 0, 1,
                          [&](const auto& q) { add_tokens<false>(q, begin, end, {}, &sums); });
  finish<kThreads>(p, sums, shared);
}

// Tokens [begin, end) of sequence `s`; never outside the tensor, whatever cu_seqlens holds.
__device__ __forceinline__ void sequence_bounds(const PolicyLossParams& p, int64_t s,
                                                int64_t* begin, int64_t* end) {
  *begin = s * p.row_length;
  *end = *begin + p.row_length;
  if (!p.cu_seqlens) return;
  *begin = p.cu_seqlens[s] > 0 ? p.cu_seqlens[s] : 0;
  *end = p.cu_seqlens[s + 1] < p.tokens ? p.cu_seqlens[s + 1] : p.tokens;
}

template <int kThreads>
struct SequenceShared {
  TokenSums warps[kThreads / kWarp];
  float ranks[kMostRanks][3];  // sum and count of every block of the cluster
};

// Every thread of the cluster receives the sum over it, added up in the order of the blocks.
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

// The mean of the log-ratios of a sequence, or of what gmpo averages.
template <int kThreads>
__device__ __forceinline__ float mean_log_ratio(const PolicyLossParams& p, int64_t begin,
                                                int64_t end, SequenceShared<kThreads>* shared,
                                                float* count) {
  CountedSum own{};
  for_each_quad<kThreads>(p, begin, end, cluster_rank(), cluster_size(), [&](const auto& q) {
    float x[kQuad];
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      x[k] = q.difference[k];
      if (p.ratio == Ratio::kGmpo) {
        x[k] = gmpo_terms<FloatMath>(x[k], q.advantage[k], p.coefficients).log_ratio;
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
__device__ __forceinline__ float shared_slope(const PolicyLossParams& p, int64_t begin, int64_t end,
                                              SequenceShared<kThreads>* shared, float mean,
                                              float count) {
  const float kl_coef = p.coefficients.kl_coef;
  const bool policy = moves_the_ratio(p);
  // a token that is alone has the slope through its ratio in its own
  const bool corrected = p.kl_gradient == KlGradient::kBiasCorrected && count > 1.0f;
  const bool kl = kl_coef != 0.0f && corrected;
  if (p.level != Level::kSequence || !(policy || kl)) return 0.0f;
  CountedSum own{};
  for_each_quad<kThreads>(p, begin, end, cluster_rank(), cluster_size(), [&](const auto& q) {
    float x[kQuad] = {};
    FASTRL_UNROLL
    for (int k = 0; k < kQuad; ++k) {
      if (policy && q.is_active(k)) {
        x[k] = weighted<FloatMath>(q.weight[k], shared_terms(q, k, mean).slope);
      }
    }
    if (kl) {
      float ref_logprob[kQuad], weight[kQuad];
      q.load(p.ref_logprobs, ref_logprob);
      q.load(p.kl_weights, weight);
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
  if (cluster_size() > 1) sync_cluster();  // nobody stores to a block that does not run yet
  TokenSums sums{};
  const int64_t first = block_index() / cluster_size() * p.per_block, after = first + p.per_block;
  for (int64_t s = first; s < after && s < p.sequences; ++s) {
    int64_t begin, end;
    sequence_bounds(p, s, &begin, &end);
    float count;
    SharedRatio ratio;
    ratio.mean = mean_log_ratio<kThreads>(p, begin, end, shared, &count);
    ratio.slope = shared_slope<kThreads>(p, begin, end, shared, ratio.mean, count);
    ratio.alone = count == 1.0f;
    for_each_quad<kThreads>(p, begin, end, cluster_rank(), cluster_size(),
                            [&](const auto& q) { add_tokens<true>(q, begin, end, ratio, &sums); });
  }
  finish<kThreads>(p, sums, shared->warps);
}

inline bool on_vector_boundaries(const PolicyLossParams& p) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(p.mask) * (16 / kQuad);
  for (const float* tokens :
       {p.logprobs, p.advantages, p.weights, p.kl_weights, p.entropy_weights, p.old_logprobs,
        p.ref_logprobs, p.entropy, const_cast<const float*>(p.slope)}) {
    bits |= reinterpret_cast<uintptr_t>(tokens);
  }
  return bits % 16 == 0;
}

// `params` as policy_loss_blocks left them, with room for as many parts. Clusters need sm_90, and
// room for all their blocks at once.
template <int kTokenThreads = 256, int kSequenceThreads = 512>
Status launch_policy_loss(PolicyLossParams params, unsigned blocks, const DeviceLimits& limits,
                          Stream stream) {
  params.aligned = on_vector_boundaries(params);
  if (params.level == Level::kToken) {
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
