// The weight of a valid token of each sequence, for every aggregation.
#include <atomic>
#include <map>
#include <tuple>

#include "../../check_aggregation.h"
#include "../flags.h"
#include "../parallel.h"
#include "sequences.h"

namespace fastrl::cpu {
namespace {

constexpr int64_t kTokensPerTask = 65536;

// Which tokens count: by mask, and by id if ids are given.
struct Validity {
  const Tensor& mask;
  const int64_t* token_ids;
  int64_t ignore_index;
  bool* active;  // to be written; null if the mask alone decides

  // How many of the tokens [begin, end) count.
  int64_t count(int64_t begin, int64_t end) const {
    return Flags(mask).visit([&](auto words, auto, auto minus_zero) {
      int64_t valid = 0;
      for (int64_t i = begin; i < end; ++i) {
        bool counts = (words[i] != 0) & (words[i] != minus_zero);
        if (token_ids) counts &= token_ids[i] != ignore_index;
        if (active) active[i] = counts;
        valid += counts;
      }
      return valid;
    });
  }
};

std::vector<int64_t> lengths_of(const Sequences& sequences, int64_t tokens, const Validity& valid) {
  std::vector<std::atomic<int64_t>> lengths(sequences.count());
  for_each_range(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t s = sequences.of(begin); begin < end; ++s) {
      const int64_t last = std::min(end, sequences.end(s));
      lengths[s].fetch_add(valid.count(begin, last), std::memory_order_relaxed);
      begin = last;
    }
  });
  return {lengths.begin(), lengths.end()};
}

struct Groups {
  std::vector<int64_t> of_sequence, tokens;

  Groups(const std::vector<int64_t>& lengths, int64_t group_size, const int64_t* group_ids)
      : of_sequence(lengths.size()) {
    std::map<int64_t, int64_t> numbers;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const int64_t id = group_ids ? group_ids[s] : static_cast<int64_t>(s) / group_size;
      of_sequence[s] = numbers.try_emplace(id, numbers.size()).first->second;
      if (of_sequence[s] == static_cast<int64_t>(tokens.size())) tokens.push_back(0);
      tokens[of_sequence[s]] += lengths[s];
    }
  }
};

int64_t positive_ones(const std::vector<int64_t>& counts) {
  return std::count_if(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
}

// The global denominator if given, else the local count; 1 if nothing counts.
double denominator(int64_t count, double normalizer, const std::optional<Tensor>& element,
                   int64_t tokens) {
  if (!element && normalizer == 0) return static_cast<double>(std::max<int64_t>(count, 1));
  if (element) normalizer = element_value(*element, 0);
  if (element && normalizer == 0 && tokens == 0) return 1;  // nothing to weight
  if (!(normalizer > 0 && std::isfinite(normalizer))) {
    raise_value_error("normalizer must be ", std::isfinite(normalizer) ? "above 0" : "finite",
                      ", got ", normalizer);
  }
  return count == 0 && element ? 1 : normalizer;
}

std::tuple<Tensor, Tensor> sequence_weights(const Tensor& mask,
                                            const std::optional<Tensor>& token_ids,
                                            int64_t ignore_index,
                                            const std::optional<Tensor>& cu_seqlens,
                                            const AggregationArguments& in) {
  check_cpu(mask, "mask");
  const Sequences sequences(mask, cu_seqlens);
  const Aggregation kind = check_aggregation(in, mask, token_ids, sequences.count());
  check_flags(mask);

  const bool merged = token_ids || mask.scalar_type() != ScalarType::Bool;
  const Tensor active =
      merged ? empty_like_tokens(mask, ScalarType::Bool) : new_tensor(mask, {0}, ScalarType::Bool);
  const Validity valid{mask, data_or_null<int64_t>(token_ids), ignore_index,
                       merged ? active.mutable_data_ptr<bool>() : nullptr};
  const std::vector<int64_t> lengths = lengths_of(sequences, mask.numel(), valid);

  const Tensor weights = new_tensor(mask, {sequences.count()}, ScalarType::Float);
  float* out = weights.mutable_data_ptr<float>();
  int64_t tokens = 0;
  for (const int64_t length : lengths) tokens += length;
  const auto write = [&](int64_t count, const auto& share) {
    const double over = denominator(count, in.normalizer, in.normalizer_tensor, tokens);
    for (int64_t s = 0; s < sequences.count(); ++s) {
      out[s] = static_cast<float>(share(s) / over);
    }
  };
  const auto whole = [](int64_t) { return 1.0; };
  if (kind == Aggregation::kTokenSum) {
    std::fill_n(out, sequences.count(), 1.0f);
  } else if (kind == Aggregation::kTokenMean) {
    write(tokens, whole);
  } else if (kind == Aggregation::kPromptMean) {
    const Groups groups(lengths, in.group_size, data_or_null<int64_t>(in.group_ids));
    write(positive_ones(groups.tokens), [&](int64_t s) {
      return 1.0 / std::max<int64_t>(groups.tokens[groups.of_sequence[s]], 1);
    });
  } else {
    const int64_t count = in.count_empty ? sequences.count() : positive_ones(lengths);
    const double width = in.length_norm > 0 ? in.length_norm : std::max<int64_t>(mask.size(1), 1);
    if (kind == Aggregation::kSeqMeanTokenMean) {
      write(count, [&](int64_t s) { return 1.0 / std::max<int64_t>(lengths[s], 1); });
    } else if (kind == Aggregation::kSeqMeanTokenSumNorm) {
      write(count, [&](int64_t) { return 1.0 / width; });
    } else {
      write(count, whole);
    }
  }
  return {weights, active};
}

}  // namespace
}  // namespace fastrl::cpu

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("sequence_weights", fastrl::boxed<fastrl::cpu::sequence_weights>);
}
