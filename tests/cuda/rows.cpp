// The vocabulary kernels under the sanitizers, against a naive double loop, aligned and not, in two
// types: bfloat16, which the others access memory like, and float32 with the gradient in bfloat16.
#define FASTRL_SPLIT_BYTES 2048
#include <cstdio>

#include "cuda/vocabulary/logits_policy_loss.cuh"
#include "cuda/vocabulary/token_stats.cuh"
#include "cuda/vocabulary/token_stats_backward.cuh"
#include "host/program.h"

namespace fastrl::cuda {
namespace {

using host::AlignedCopy;
using host::Random;
constexpr int kThreads = kWarp > 16 ? kWarp : 16;
constexpr double kClip = 0.2, kEntropyCoef = 0.05;

enum class Path { kClusters, kPlain, kTwoCalls };

template <typename T>
float value(T x) {
  return Element<T>::value(x);
}

// Rows of a vocabulary, `beside` elements apart, the first of them `offset` elements into a vector.
template <typename T>
class Problem {
 public:
  Problem(int rows, int vocabulary, int beside, int offset)
      : rows_(rows),
        vocabulary_(vocabulary),
        stride_(vocabulary + beside),
        // ends with the last row's last element, so that AddressSanitizer sees a step beyond it
        bytes_(static_cast<size_t>(rows - 1) * stride_ * sizeof(T) +
               (kNarrowed ? 2 * (stride_ + vocabulary) : vocabulary * sizeof(T))),
        logits_(bytes_, offset * sizeof(T)),
        token_ids_(rows),
        active_(new bool[rows]),
        advantages_(rows),
        weights_(rows),
        old_(rows),
        logprobs_(rows),
        entropy_(rows) {
    Random random(vocabulary + beside + offset);
    for (size_t i = 0; i < bytes_ / sizeof(T); ++i) {
      at<T>(logits_)[i] = Element<T>::from(3 * random.normal());
    }
    for (int row = 0; row < rows; ++row) {
      token_ids_[row] = random.below(vocabulary);
      active_[row] = row % 5 != 3;
      advantages_[row] = random.normal();
      weights_[row] = random.uniform();
      old_[row] = -random.uniform() * 9;
    }
  }

  bool run(Path path, bool in_place) {
    AlignedCopy logits(bytes_, offset_of(logits_), logits_.data());
    AlignedCopy grad(static_cast<size_t>(rows_) * vocabulary_ * 2);
    const DeviceLimits limits{path == Path::kClusters ? 9 : 8, 16, 227 << 10, 228 << 10, 1 << 20};
    LogitsPolicyLossParams p{};
    p.in = {kNarrowed ? kFloat : kBFloat16,
            logits.data(),
            1,
            rows_,
            vocabulary_,
            0,
            stride_,
            token_ids_.data(),
            {active_.get(), 1, false},
            -100,
            nullptr,
            1.0,
            1.0,
            0.0};
    p.out = kNarrowed  ? narrow_gradient(p.in)
            : in_place ? GradientParams{kBFloat16, logits.data(), 0, stride_}
                       : GradientParams{kBFloat16, grad.data(), 0, vocabulary_};
    const Constant weights{weights_.data(), false};
    p.constants = {
        {advantages_.data(), false}, weights, weights, weights, {}, old_.data(), nullptr};
    p.objective.surrogate = Surrogate::kPpoClip;
    Coefficients<float>& c = p.objective.coefficients;
    c = {};
    c.clip_low = c.clip_high = kClip;
    c.dual_clip = c.delta = c.kl_clamp = c.log_ratio_low = c.log_ratio_high = HUGE_VALF;
    c.entropy_coef = kEntropyCoef;
    p.sequences = {nullptr, rows_, 1, rows_};
    p.logprobs = logprobs_.data();
    p.entropy = entropy_.data();
    uint32_t ticket = 0;
    p.ticket = &ticket;
    const LogitsPolicyLossCall call{p, geometry(p.in, &p.out), Scaling::of(p.in)};
    if (call.rows.aligned) {
      run_kernels<true>(call, limits, path);
    } else {
      run_kernels<false>(call, limits, path);
    }
    for (int row = 0; row < rows_; ++row) {
      ok_ &= check(row, reinterpret_cast<const BFloat16*>(call.rows.grad_row(row)));
    }
    return ok_;
  }

 private:
  static constexpr bool kNarrowed = kNarrow<T, BFloat16>;

  template <bool kAligned>
  void run_kernels(const LogitsPolicyLossCall& call, const DeviceLimits& limits, Path path) {
    if (path != Path::kTwoCalls) {
      ok_ &= launch_one_pass<T, kAligned, false, kThreads, BFloat16>(call, limits, 0) == kSuccess;
      // a cluster draws one in each row
      ok_ &= *call.p.ticket == static_cast<unsigned>(path == Path::kClusters ? rows_ : 0);
      return;
    }
    std::vector<float> unused(rows_), row_max(rows_), log_sum(rows_), flow(rows_),
        flow_entropy(rows_);
    const std::unique_ptr<bool[]> is_top1(new bool[rows_]);
    const TokenStatsParams stats{call.p.in,       true,          true,          logprobs_.data(),
                                 entropy_.data(), unused.data(), unused.data(), is_top1.get(),
                                 row_max.data(),  log_sum.data()};
    const TokenStatsCall stats_call{stats, call.rows, call.scaling};
    const auto kernel = token_stats_kernel<T, kAligned, false, Wanted::kSquares, kThreads>;
    const size_t shared_bytes = SplitSums<kThreads>::bytes(call.rows.splits.count);
    launch(kernel, {4, kThreads, 1, shared_bytes}, stats_call, 0);
    const std::vector<float> alone = logprobs_;
    launch(kernel, {2u * rows_, kThreads, 2, shared_bytes}, stats_call, 0);
    ok_ &= logprobs_ == alone;
    for (int row = 0; row < rows_; ++row) {
      flow[row] = static_cast<float>(slope(row, logprobs_[row]));
      flow_entropy[row] = static_cast<float>(-kEntropyCoef * weights_[row]);
    }
    const TokenStatsBackwardParams backward{call.p.in,           call.p.out,      row_max.data(),
                                            log_sum.data(),      entropy_.data(), flow.data(),
                                            flow_entropy.data(), nullptr};
    launch(token_stats_backward_kernel<T, kAligned, false, kThreads, BFloat16>,
           {7, kThreads, 1, sizeof(BackwardShared)},
           TokenStatsBackwardCall{backward, call.rows, call.scaling}, 0);
  }
  double slope(int row, double logprob) const {
    const double ratio = std::exp(logprob - old_[row]), a = advantages_[row];
    const bool clipped = a > 0 ? ratio > 1 + kClip : ratio < 1 - kClip;
    return clipped ? 0 : -ratio * a * weights_[row];
  }

  template <typename Value>
  static Value* at(AlignedCopy& x) {
    return reinterpret_cast<Value*>(x.data());
  }
  static size_t offset_of(AlignedCopy& x) { return reinterpret_cast<uintptr_t>(x.data()) % 128; }

  bool check(int row, const BFloat16* grad) {
    const T* x = at<T>(logits_) + row * stride_;
    double sum = 0, sum_t = 0;
    for (int j = 0; j < vocabulary_; ++j) {
      sum += std::exp(value(x[j]));
      sum_t += std::exp(value(x[j])) * value(x[j]);
    }
    const double log_sum = std::log(sum), entropy = log_sum - sum_t / sum;
    const double logprob = value(x[token_ids_[row]]) - log_sum;
    const double flow = slope(row, logprob);
    bool ok = active_[row] ? std::fabs(logprobs_[row] - logprob) < 1e-5 &&
                                 std::fabs(entropy_[row] - entropy) < 1e-5
                           : logprobs_[row] == 0 && entropy_[row] == 0;
    for (int j = 0; j < vocabulary_; ++j) {
      const double log_p = value(x[j]) - log_sum, p = std::exp(log_p);
      double want = flow * ((j == token_ids_[row]) - p);
      want += kEntropyCoef * weights_[row] * p * (log_p + entropy);
      if (!active_[row]) want = 0;
      ok &= std::fabs(value(grad[j]) - want) <= 0.005 * std::fabs(want) + 1e-6;
    }
    if (!ok) std::fprintf(stderr, "row %d of %d x %d is wrong\n", row, rows_, vocabulary_);
    return ok;
  }

  bool ok_ = true;
  int rows_, vocabulary_;
  int64_t stride_;
  size_t bytes_;
  AlignedCopy logits_;
  std::vector<int64_t> token_ids_;
  std::unique_ptr<bool[]> active_;
  std::vector<float> advantages_, weights_, old_, logprobs_, entropy_;
};

}  // namespace
}  // namespace fastrl::cuda

// A shape: vocabulary, elements between rows, elements before the first.
template <typename T, size_t kShapes>
bool all_pass(const int (&shapes)[kShapes][3]) {
  using fastrl::cuda::Path;
  bool ok = true;
  for (const auto& shape : shapes) {
    fastrl::cuda::Problem<T> problem(shape[0] == 4096 ? 16 : 7, shape[0], shape[1], shape[2]);
    for (const Path path : {Path::kClusters, Path::kPlain, Path::kTwoCalls}) {
      for (const bool in_place : {true, false}) {
        if (problem.run(path, in_place)) continue;
        std::fprintf(stderr, "path %d, in place %d\n", static_cast<int>(path), in_place);
        ok = false;
      }
    }
  }
  return ok;
}

int main() {
  const bool same_type = all_pass<fastrl::cuda::BFloat16>(
      {{4096, 0, 0}, {2048, 8, 8}, {3993, 0, 0}, {777, 3, 5}, {5, 0, 1}});
  const bool narrow = all_pass<float>(
      {{1024, 0, 0}, {1024, 8, 8}, {1001, 7, 4}, {777, 7, 4}, {5, 3, 0}, {4, 0, 0}});
  return same_type && narrow ? 0 : 1;
}
