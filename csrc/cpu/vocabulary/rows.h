// Shared by the operators on logits: the statistics of a row from its blocks, its gradient, and the
// loop over rows. A row is always split into the same blocks, and their sums are combined in order,
// so a result depends neither on other rows nor on how many threads work on one row.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../../check_rows.h"
#include "../flags.h"
#include "../parallel.h"
#include "logits.h"

namespace fastrl::cpu {

// The sums over the blocks seen so far, relative to the largest exponent among them.
class RowSum {
 public:
  // `exponent` belongs to the block's largest logit.
  void add(const BlockPartial& block, double exponent) {
    Sums next{1 + block.rest, block.sum_t, block.sum_sq};
    const double rise = exponent == exponent_ ? 0.0 : exponent - exponent_;
    if (rise > 0) {
      sums_.lower(rise);
      exponent_ = exponent;
      rest_ = block.rest + sums_.sum;
    } else {
      if (rise < 0) next.lower(-rise);
      rest_ += next.sum;
    }
    sums_.sum += next.sum;
    sums_.sum_t += next.sum_t;
    sums_.sum_sq += next.sum_sq;
    max_ = block.max > max_ ? block.max : max_;
  }

  float max() const { return max_; }
  bool empty() const { return sums_.sum == 0; }  // all logits are -inf: there is no softmax
  double log_sum() const {
    return empty() ? std::numeric_limits<double>::quiet_NaN() : std::log1p(rest_);
  }
  double entropy() const {
    const double entropy = log_sum() - kLn2 * sums_.sum_t / sums_.sum;
    return entropy < 0 ? 0.0 : entropy;
  }
  double sum_sq_probs() const { return sums_.sum_sq / (sums_.sum * sums_.sum); }

 private:
  struct Sums {
    double sum, sum_t, sum_sq;
    void lower(double by) {
      const double t = -std::fmin(by, 1e4);  // infinite for a block of -inf, whose sums are 0
      const double factor = std::exp2(t);
      sum_t = (sum_t + t * sum) * factor;
      sum *= factor;
      sum_sq *= factor * factor;
    }
  };
  Sums sums_{0, 0, 0};
  double rest_ = -1;  // the sum without the 1 of the largest
  double exponent_ = -std::numeric_limits<double>::infinity();
  float max_ = -std::numeric_limits<float>::infinity();
};

using RowStats = RowStatsOf<double, bool>;

// The gradient of the loss with respect to the statistics of a row, and to its divergence from a
// teacher's row, whose own gradient needs `slope_mean`.
struct RowGradient {
  double logprob = 0, logsumexp = 0, entropy = 0, divergence = 0, slope_mean = 0;
};

class TeacherRows;

constexpr int64_t kTaskBytes = int64_t{8} << 20;

class Rows {
 public:
  Rows(const Tensor& logits, const RowArguments& arguments);

  // The sums that the first sweep computes.
  struct Reduction {
    bool entropy, sum_sq_probs;
  };

  // Visits every row once. For an active row, the statistics are computed if `reduction` is given,
  // else `visit` sets some with `restore`. visit(row, stats) returns the upstream
  // gradients, and the gradient of the row is written to `grad` if given; `grad` may be the logits.
  // For inactive rows idle(row) is called and the gradient is 0. Neither function may throw.
  template <typename Visit, typename Idle>
  void walk(const Reduction* reduction, const Logits* grad, const Visit& visit,
            const Idle& idle) const {
    const int64_t blocks = logits_.blocks();
    const auto one_row = [&](int64_t row) {
      if (!active_[row]) {
        idle(row);
        if (grad) std::memset(grad->writable(row, 0), 0, grad->row_bytes());
        return;
      }
      RowStats stats{};
      if (reduction) {
        RowSum sum;
        for (int64_t block = 0; block < blocks; ++block) {
          add(&sum, row, block_partial(row, block, *reduction));
        }
        stats = finish(row, sum);
      }
      const RowGradient flow = visit(row, stats);
      if (!grad) return;
      const PlannedGradient planned = plan_gradient(row, stats, flow);
      for (int64_t block = 0; block < blocks; ++block) write_gradient(planned, block, *grad);
    };
    const int64_t threads = torch::stable::get_num_threads();
    if (threads == 1 || blocks == 1 || num_active_ == 0 || num_active_ >= 4 * threads) {
      // Enough rows per task. Threads that start adjacent rows in new memory would each clear the
      // same huge page, so a task there spans several pages, as far as load balance allows.
      const int64_t fresh = grad ? kTaskBytes / (grad->row_bytes() + 1) : 0;
      const int64_t rows_at_once =
          std::max<int64_t>({1, 8 * kBlock / (logits_.vocabulary() + 1),
                             std::min<int64_t>(fresh, logits_.rows() / (8 * threads))});
      for_each_range(logits_.rows(), rows_at_once, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) one_row(row);
      });
      return;
    }

    // few rows: distribute their blocks over the threads
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < logits_.rows(); ++row) {
      active_[row] ? rows.push_back(row) : one_row(row);
    }
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<BlockPartial> partials(reduction ? count * blocks : 0);
    if (reduction) {
      for_each_task(count * blocks, [&](int64_t task) {
        partials[task] = block_partial(rows[task / blocks], task % blocks, *reduction);
      });
    }
    std::vector<PlannedGradient> planned(count);
    for (int64_t i = 0; i < count; ++i) {
      RowStats stats{};
      if (reduction) {
        RowSum sum;
        for (int64_t block = 0; block < blocks; ++block) {
          add(&sum, rows[i], partials[i * blocks + block]);
        }
        stats = finish(rows[i], sum);
      }
      const RowGradient flow = visit(rows[i], stats);
      if (grad) planned[i] = plan_gradient(rows[i], stats, flow);
    }
    if (grad) {
      for_each_task(count * blocks, [&](int64_t task) {
        write_gradient(planned[task / blocks], task % blocks, *grad);
      });
    }
  }

  // Statistics from the values saved by the forward, for a gradient without the first sweep.
  RowStats restore(int64_t row, float row_max, double log_sum, double entropy) const;

  // The object that `RowGradient::divergence` refers to.
  void compare_with(const TeacherRows* teacher) { teacher_ = teacher; }

  const Logits& logits() const { return logits_; }
  const Scaling& scaling() const { return scaling_; }
  bool active(int64_t row) const { return active_[row]; }

 private:
  // A row's gradient, ready to be written block by block.
  struct PlannedGradient {
    int64_t row;
    LogitMap map;
    GradientTerms terms;
    float token_gradient;
    bool zero, linear;
    DivergenceSlopes by;  // with a divergence, instead of `terms`
    float raw_gain;
  };

  BlockPartial block_partial(int64_t row, int64_t block, const Reduction& reduction) const;
  void add(RowSum* sum, int64_t row, const BlockPartial& partial) const;
  RowStats finish(int64_t row, const RowSum& sum) const;
  PlannedGradient plan_gradient(int64_t row, const RowStats& stats, const RowGradient& flow) const;
  void write_gradient(const PlannedGradient& planned, int64_t block, const Logits& grad) const;
  float squashed(float x) const {
    return scaling_.softcap() ? kernels_.tanh(x, scaling_.squash()) : x;
  }

  Logits logits_;
  Scaling scaling_;
  const Kernels& kernels_;
  const int64_t* token_ids_;
  std::vector<char> active_;
  int64_t num_active_ = 0;
  const TeacherRows* teacher_ = nullptr;
};

}  // namespace fastrl::cpu
