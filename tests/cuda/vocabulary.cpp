// The vocabulary kernels on the host machine, for the tests in Python.
#define FASTRL_PART_BYTES 2048
#include "cuda/vocabulary/logits_policy_loss.cuh"
#include "cuda/vocabulary/token_stats.cuh"
#include "cuda/vocabulary/token_stats_backward.cuh"

namespace {

using namespace fastrl::cuda;
constexpr int kThreads = 16;

// Of a device with clusters and of one without.
DeviceLimits limits(bool clusters) { return {clusters ? 9 : 8, 40, 227 << 10, 228 << 10, 1 << 20}; }

}  // namespace

extern "C" {

struct Rows {
  int64_t type;
  void* logits;
  int64_t batch, tokens, vocabulary, stride_b, stride_t;
  const int64_t* token_ids;
  const bool* active;
  const float* temperatures;
  double temperature, logit_scale, logit_softcap;

  LogitsParams params() const {
    return {static_cast<LogitsType>(type),
            logits,
            batch,
            tokens,
            vocabulary,
            stride_b,
            stride_t,
            token_ids,
            active,
            temperatures,
            temperature,
            logit_scale,
            logit_softcap};
  }
  // To a contiguous buffer, or in place.
  GradientParams gradient(void* grad) const {
    if (!grad) return {logits, stride_b, stride_t};
    return {grad, tokens * vocabulary, vocabulary};
  }
};

int token_stats(const Rows* rows, bool with_entropy, bool with_sum_sq_probs, bool clusters,
                float* const* out, bool* is_top1) {
  return launch_token_stats<kThreads>({rows->params(), with_entropy, with_sum_sq_probs, out[0],
                                       out[1], out[2], out[3], is_top1, out[4], out[5]},
                                      limits(clusters), 0);
}

// in: row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp
int token_stats_backward(const Rows* rows, const float* const* in, void* grad) {
  return launch_token_stats_backward<kThreads>(
      {rows->params(), rows->gradient(grad), in[0], in[1], in[2], in[3], in[4], in[5]},
      limits(true), 0);
}

// in: advantages, weights, kl_weights, entropy_weights, old_logprobs, ref_logprobs
int logits_policy_loss(const Rows* rows, const float* const* in, const int64_t* kinds,
                       const double* coefficients, bool clusters, float* logprobs, float* entropy,
                       void* grad) {
  fastrl::Coefficients<float> c;
  static_assert(sizeof(c) == fastrl::kNumCoefficients * sizeof(float));
  for (int i = 0; i < fastrl::kNumCoefficients; ++i) {
    reinterpret_cast<float*>(&c)[i] = static_cast<float>(coefficients[i]);
  }
  return launch_logits_policy_loss<kThreads>(
      {rows->params(), rows->gradient(grad), in[0], in[1], in[2], in[3], in[4], in[5],
       static_cast<fastrl::Ratio>(kinds[0]), static_cast<fastrl::KlEstimator>(kinds[1]),
       static_cast<fastrl::KlGradient>(kinds[2]), c, logprobs, entropy},
      limits(clusters), 0);
}

int parts_of(int64_t vocabulary, int64_t element_size) {
  return cut_row(vocabulary, element_size).count;
}

// Counts what is loaded from and stored to each byte of a range, from now on; place 0 or 1.
void watch(int place, const void* begin, int64_t bytes, unsigned char* loads,
           unsigned char* stores) {
  host::watched[place] = {static_cast<const unsigned char*>(begin), static_cast<size_t>(bytes),
                          loads, stores};
}

}  // extern "C"
