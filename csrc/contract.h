// The C++ and CUDA side of fastrl/contract.py: kinds, scalars, arguments and results of the
// operators, by name. tests/contract/test_contract.py compares the two.
#pragma once

#include <cmath>
#include <type_traits>

#if defined(__CUDACC__)
#define FASTRL_HD __host__ __device__ __forceinline__
#else  // always inline, since the CPU kernels compile these for several instruction sets
#define FASTRL_HD inline __attribute__((always_inline))
#endif

namespace fastrl {

// The last enumerator of a kind.
template <typename Kind>
inline constexpr Kind kLast{};

enum class Surrogate : int { kPpoClip, kCispo, kSapo, kGmpo, kReinforce };
template <>
inline constexpr Surrogate kLast<Surrogate> = Surrogate::kReinforce;

// One ratio per token; one per sequence; one per sequence, with the slope through the token's own
// ratio.
enum class Level : int { kToken, kSequence, kSequenceToken };
template <>
inline constexpr Level kLast<Level> = Level::kSequenceToken;

enum class KlEstimator : int { kK1, kK2, kK3, kAbs };
template <>
inline constexpr KlEstimator kLast<KlEstimator> = KlEstimator::kAbs;

enum class KlGradient : int { kExact, kStraightThrough, kBiasCorrected };
template <>
inline constexpr KlGradient kLast<KlGradient> = KlGradient::kBiasCorrected;

// Which ratio a bias-corrected KL has: the token's own, or the one of the policy term.
enum class KlLevel : int { kToken, kPolicy };
template <>
inline constexpr KlLevel kLast<KlLevel> = KlLevel::kPolicy;

enum class Aggregation : int {
  kTokenMean,
  kSeqMeanTokenMean,
  kSeqMeanTokenSum,
  kSeqMeanTokenSumNorm,
  kTokenSum,
  kPromptMean
};
template <>
inline constexpr Aggregation kLast<Aggregation> = Aggregation::kPromptMean;

enum class Baseline : int { kMean, kLeaveOneOut, kNone };
template <>
inline constexpr Baseline kLast<Baseline> = Baseline::kNone;

enum class Scale : int { kGroup, kBatch, kNone, kMean };
template <>
inline constexpr Scale kLast<Scale> = Scale::kMean;

enum class Singleton : int { kZero, kRaw };
template <>
inline constexpr Singleton kLast<Singleton> = Singleton::kRaw;

// exp(80) still fits a float; log-ratios saturate here with slope 0.
constexpr double kMaxLogRatio = 80.0;

// The scalars of an objective; an unset bound is infinite.
template <typename S>
struct Coefficients {
  S clip_low;
  S clip_high;
  S dual_clip;
  S delta;
  S sapo_temperature_pos;
  S sapo_temperature_neg;
  S kl_coef;
  S kl_clamp;
  S log_ratio_low;  // distance of the lower bound of the log-ratio from 0
  S log_ratio_high;
  S entropy_coef;

  FASTRL_HD S lowest_log_ratio(S limit = S(kMaxLogRatio)) const {
    return -(log_ratio_low < limit ? log_ratio_low : limit);
  }
  FASTRL_HD S highest_log_ratio(S limit = S(kMaxLogRatio)) const {
    return log_ratio_high < limit ? log_ratio_high : limit;
  }
};

// An objective in the form that the kernels take.
template <typename S>
struct Objective {
  Surrogate surrogate;
  Level level;
  KlEstimator kl_estimator;
  KlGradient kl_gradient;
  KlLevel kl_level;
  Coefficients<S> coefficients;

  // Whether the KL of a token depends on no other token.
  FASTRL_HD bool kl_by_token() const {
    return kl_gradient != KlGradient::kBiasCorrected || kl_level == KlLevel::kToken ||
           level == Level::kToken;
  }
};

// Group advantages: the baseline, the divisor, and the rule for a group of one.
struct GroupKinds {
  Baseline baseline;
  Scale scale;
  Singleton singleton;
};

// A constant of the loss: one value per sequence, or one per token.
struct Constant {
  const float* values;
  bool by_sequence;

  FASTRL_HD float at(long long sequence, long long token) const {
    return values[by_sequence ? sequence : token];
  }
};

// The constants of a policy loss in the form that the kernels take. A term without separate weights
// uses `weights`; other absent constants are null.
struct LossConstants {
  Constant advantages;
  Constant weights;
  Constant kl_weights;
  Constant entropy_weights;
  Constant policy_weights;  // factors on the policy term alone
  const float* old_logprobs;
  const float* ref_logprobs;
};

// Statistics: the numbers of one row, or the arrays with those of all rows.
template <typename Real, typename Flag>
struct RowStatsOf {
  Real logprobs;
  Real entropy;
  Real logsumexp;
  Real sum_sq_probs;
  Flag is_top1;
  Real row_max;  // the largest raw logit
  Real log_sum;
};
using RowStatsOut = RowStatsOf<float*, bool*>;

// Calls f with each statistic of all arguments.
template <typename F, typename... Stats>
FASTRL_HD void for_each_stat(const F& f, Stats&&... stats) {
  f(stats.logprobs...);
  f(stats.entropy...);
  f(stats.logsumexp...);
  f(stats.sum_sq_probs...);
  f(stats.is_top1...);
  f(stats.row_max...);
  f(stats.log_sum...);
}

template <typename Real>
FASTRL_HD void store_stats(const RowStatsOf<Real, bool>& stats, const RowStatsOut& out,
                           long long row) {
  for_each_stat(
      [row](auto value, auto* to) {
        to[row] = static_cast<std::remove_pointer_t<decltype(to)>>(value);
      },
      stats, out);
}

// The metrics of a policy loss, in the order of the vector that the operator returns.
struct Metrics {
  float policy_loss;
  float kl;
  float kl_old;
  float entropy;
  float ratio_mean;
  float ratio_max;
  float ratio_min;
  float clip_low;
  float clip_high;
  float clip_fraction;
  float active_tokens;
  float zero_grad_fraction;
};
constexpr int kNumMetrics = sizeof(Metrics) / sizeof(float);

}  // namespace fastrl
