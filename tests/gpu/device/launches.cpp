// Every launch of csrc/cuda without torch, on inputs made here: for compute-sanitizer, which takes
// minutes to start torch, and for ncu. Outputs begin as NaN and must be finite at the end.
//
//   launches               all of them, on small inputs
//   launches large TIMES   three that the benchmarks lead with, 8,192 rows; their mean time
//   launches clusters      the largest clusters that the device grants the one-pass kernel
//
// tests/gpu/device/build.py links it with the kernels as they were compiled for the extension.
#include "launch_tensors.h"

namespace fastrl::cuda {
namespace {

// --- the operators on logits

struct Shape {
  LogitsType type;
  int rows, vocabulary, beside;  // elements between rows
  double softcap;
};

class Rows {
 public:
  Rows(Tensors* tensors, const Shape& shape, bool narrow = false) : t_(*tensors), shape_(shape) {
    const int64_t stride = shape.vocabulary + shape.beside;
    size_t count = (shape.rows - 1) * stride + shape.vocabulary;
    if (narrow) count += (stride - shape.vocabulary + 1) / 2;  // its gradient ends behind the row
    in = {shape.type,
          t_.elements(shape.type, count),
          1,
          shape.rows,
          shape.vocabulary,
          0,
          stride,
          t_.below<int64_t>(shape.vocabulary, shape.rows),
          {t_.below<unsigned char>(8, shape.rows), 1, false},
          -100,
          nullptr,
          0.7,
          1.0,
          shape.softcap};
  }
  GradientParams apart() {
    const size_t count = static_cast<size_t>(shape_.rows) * shape_.vocabulary;
    return {shape_.type, t_.output(shape_.type, count), 0, shape_.vocabulary};
  }
  GradientParams in_place() const {
    return {shape_.type, const_cast<void*>(in.logits), 0, in.stride_t};
  }
  TokenStatsParams stats() {
    const size_t n = shape_.rows;
    bool* is_top1 = reinterpret_cast<bool*>(t_.zeros<unsigned char>(n));
    return {in,
            true,
            true,
            {t_.output(n), t_.output(n), t_.output(n), t_.output(n), is_top1, t_.output(n),
             t_.output(n)}};
  }
  LogitsPolicyLossParams loss(const GradientParams& out) {
    const size_t n = shape_.rows;
    LogitsPolicyLossParams p{};
    p.in = in, p.out = out;
    const Constant weights{t_.logprobs(n), false};
    p.constants = {{t_.normal(n), false}, weights, {}, {}, {}, t_.logprobs(n), t_.logprobs(n)};
    p.constants.kl_weights = p.constants.entropy_weights = weights;
    p.objective.coefficients = coefficients();
    p.sequences = {nullptr, shape_.rows, 1, shape_.rows};
    p.logprobs = t_.output(n), p.entropy = t_.output(n);
    p.ticket = t_.zeros<uint32_t>(1);
    return p;
  }

  LogitsParams in;

 private:
  Tensors& t_;
  Shape shape_;
};

void of_logits(const Shape& shape) {
  const char* types[] = {"float", "bfloat16", "half"};
  const std::string what = std::string(", ") + types[shape.type] + ", V " +
                           std::to_string(shape.vocabulary) + (shape.beside ? ", strided" : "") +
                           (shape.softcap > 0 ? ", softcap" : "");
  {
    Tensors t(1);
    Rows rows(&t, shape);
    const TokenStatsParams p = rows.stats();
    require(token_stats(p, 0));
    const float* flow = t.normal(shape.rows);
    const TokenStatsBackwardParams back{rows.in,       rows.apart(), p.out.row_max, p.out.log_sum,
                                        p.out.entropy, flow,         flow,          flow};
    require(token_stats_backward(back, 0));
    report(t, "token_stats and backward" + what);
  }
  for (const bool in_place : {false, true}) {
    Tensors t(2);
    Rows rows(&t, shape);
    require(logits_policy_loss(rows.loss(in_place ? rows.in_place() : rows.apart()), 0));
    report(t, std::string("logits_policy_loss") + (in_place ? " in place" : "") + what);
  }
  if (shape.type == kFloat) {
    Tensors t(3);
    Shape apart = shape;  // rows begin at vectors
    apart.beside += (4 - (shape.vocabulary + shape.beside) % 4) % 4;
    Rows rows(&t, apart, true);
    require(logits_policy_loss(rows.loss(narrow_gradient(rows.in)), 0));
    report(t, "logits_policy_loss, narrow" + what);
  }
  Tensors t(4);
  const size_t stride = shape.vocabulary + shape.beside;
  const size_t count = (shape.rows - 1) * stride + shape.vocabulary;
  void* gradient = t.elements(shape.type, count);
  t.expect(shape.type, gradient, count);
  const float half = 0.5f;
  const float* factor = t.filled<float>(1, [&] { return half; });
  require(scale({shape.type,
                 gradient,
                 shape.rows,
                 shape.vocabulary,
                 static_cast<int64_t>(stride),
                 {factor, NumberType::kFloat32}},
                0));
  report(t, "scale" + what);
}

// --- the operators on tokens

// Nobody looks at cu_seqlens before a launch: whatever broken ones hold, no memory is touched that
// is not the operator's, but some of the outputs is not written.
enum class Cuts { kNone, kInOrder, kBroken };

struct Batch {
  int count, length;
  Cuts cuts;
  unsigned seed = 0;

  size_t tokens() const { return static_cast<size_t>(count) * length; }
  Sequences sequences(Tensors* t) const {
    const auto n = static_cast<int64_t>(tokens());
    if (cuts == Cuts::kNone) return {nullptr, n, count, length};
    std::mt19937 random(seed);
    int next = -length;
    const int* bounds = t->filled<int>(count + 1, [&] {
      if (cuts == Cuts::kBroken) return static_cast<int>(random() % (4 * n) - n);
      return next += length;
    });
    return {bounds, n, count, 0};
  }
  void finished(const Tensors& t, const std::string& launch) const {
    if (cuts == Cuts::kBroken) return finish();
    report(t, launch + ", " + std::to_string(count) + " x " + std::to_string(length) +
                  (cuts == Cuts::kInOrder ? ", packed" : ""));
  }
};

void of_weights(const Batch& batch) {
  const size_t n = batch.tokens();
  for (int aggregation = 0; aggregation <= static_cast<int>(kLast<Aggregation>); ++aggregation) {
    Tensors t(5);
    SequenceWeightsParams p{};
    p.mask = {t.filled<float>(n, [] { return 1.0f; }), 4, true};
    p.token_ids = t.below<int64_t>(9, n);
    p.sequences = batch.sequences(&t);
    p.aggregation = static_cast<Aggregation>(aggregation);
    p.length_norm = 1.0f, p.group_size = 1;
    p.weights = t.output(batch.count);
    p.active = reinterpret_cast<bool*>(t.zeros<unsigned char>(n));
    const int64_t chunks = chunks_of_weights(n);
    p.before_chunk = t.zeros<uint32_t>(chunks + 1), p.arrived = t.zeros<uint32_t>(1);
    if (counts_sequences(p.aggregation)) {
      p.words = t.zeros<uint32_t>(chunks * kWarp);
      p.before_word = t.zeros<uint32_t>(chunks * kWarp);
    }
    require(weigh_sequences(p, 0));
    batch.finished(t, "weigh_sequences, aggregation " + std::to_string(aggregation));
  }
}

void of_policy_loss(const Batch& batch) {
  const size_t n = batch.tokens();
  for (const Level level : {Level::kToken, Level::kSequence, Level::kSequenceToken}) {
    Tensors t(6);
    PolicyLossParams p{};
    p.logprobs = t.logprobs(n), p.entropy = t.logprobs(n);
    p.mask = reinterpret_cast<bool*>(t.below<unsigned char>(2, n));
    const Constant by_sequence{t.logprobs(batch.count), true};
    p.constants = {by_sequence, by_sequence,   by_sequence,  by_sequence,
                   {},          t.logprobs(n), t.logprobs(n)};
    p.objective = {Surrogate::kPpoClip, level,           KlEstimator::kK3,
                   KlGradient::kExact,  KlLevel::kToken, coefficients()};
    p.sequences = batch.sequences(&t);
    p.loss = t.output(1), p.slope = t.output(n), p.entropy_slope = t.output(n);
    p.metrics = reinterpret_cast<Metrics*>(t.output(kNumMetrics));
    unsigned blocks = policy_loss_blocks(&p);
    // broken sequences may overlap, and which block wrote last does not matter
    if (batch.cuts == Cuts::kBroken) blocks = p.ranks = 1, p.per_block = static_cast<int64_t>(n);
    p.partial_sums = t.zeros<unsigned char>(blocks * kTokenSumsBytes);
    p.arrived = t.zeros<uint32_t>(1);
    require(policy_loss(p, blocks, 0));
    batch.finished(t, "policy_loss, level " + std::to_string(static_cast<int>(level)));
  }
}

void of_gae(const Batch& batch) {
  const size_t n = batch.tokens();
  for (const Bootstrap bootstrap : {Bootstrap::kNone, Bootstrap::kSequence, Bootstrap::kToken}) {
    Tensors t(7);
    const auto flags = [&](int one_of) {
      return reinterpret_cast<bool*>(
          t.filled<unsigned char>(n, [&, i = 0]() mutable { return ++i % one_of == 0; }));
    };
    GaeParams p{};
    p.in = {t.normal(n), t.normal(n), t.normal(n), flags(1), flags(97), flags(89), bootstrap};
    p.sequences = batch.sequences(&t);
    p.advantages = t.output(n), p.returns = t.output(n);
    p.gamma = 0.99f, p.decay = 0.9f;
    const int64_t chunks = gae_chunks(n);
    p.maps = t.zeros<unsigned char>(chunks * kGaeMapBytes);
    p.ticket_and_flags = t.zeros<uint32_t>(chunks + 1);
    require(gae(p, 0));
    batch.finished(t, "gae, bootstrap " + std::to_string(static_cast<int>(bootstrap)));
  }
}

void of_tokens(const Batch& batch) {
  of_weights(batch);
  of_policy_loss(batch);
  of_gae(batch);
}

void of_groups(int groups, int size, bool by_id) {
  const int64_t n = static_cast<int64_t>(groups) * size;
  for (const Scale scale : {Scale::kGroup, Scale::kBatch, Scale::kNone, Scale::kMean}) {
    Tensors t(8);
    GroupAdvantagesParams p{};
    p.rewards = t.normal(n);
    p.count = n, p.group_size = by_id ? 0 : size;
    p.kinds.scale = scale, p.correction = 1.0f, p.eps = 1e-4f;
    p.advantages = t.output(n), p.mean = t.output(n), p.std = t.output(n);
    p.informative = reinterpret_cast<bool*>(t.zeros<unsigned char>(n));
    if (by_id) {
      p.group_ids = t.below<int64_t>(groups, n);
      p.num_entries = group_entries(n);
    }
    p.entries = t.zeros<GroupEntry>(p.num_entries + 1);
    p.entry_of = t.zeros<uint32_t>(n);
    require(group_advantages(p, 0));
    report(t, "group_advantages, scale " + std::to_string(static_cast<int>(scale)) + ", " +
                  std::to_string(groups) + " x " + std::to_string(size) + (by_id ? " by id" : ""));
  }
}

void small() {
  for (const LogitsType type : kTypes) {
    for (const int vocabulary : kVocabularies) {
      of_logits({type, 3, vocabulary, 0, 0.0});
      if (vocabulary == kVocabularies.back()) continue;
      of_logits({type, 3, vocabulary, 0, 10.0});
      of_logits({type, 3, vocabulary, 3, 0.0});
    }
  }
  for (const Cuts cuts : {Cuts::kNone, Cuts::kInOrder}) {
    of_tokens({5, 37, cuts});
    of_tokens({1, kManyTokens, cuts});  // several chunks
    of_policy_loss({1, 9000, cuts});    // of clusters
  }
  for (unsigned seed = 0; seed < 9; ++seed) of_tokens({4, 99, Cuts::kBroken, seed});
  for (const bool by_id : {false, true}) {
    of_groups(9, 4, by_id);
    of_groups(2, kLargeGroup, by_id);  // a block for each
    of_groups(kManyGroups, 2, by_id);
  }
}

void timed(const char* what, double bytes, int times, const std::function<Status()>& launch) {
  cudaEvent_t start, end;
  require(cudaEventCreate(&start));
  require(cudaEventCreate(&end));
  if (times > 1) require(launch());
  require(cudaEventRecord(start));
  for (int i = 0; i < times; ++i) require(launch());
  require(cudaEventRecord(end));
  require(cudaEventSynchronize(end));
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, start, end));
  std::printf("%s: %.3f ms, %.2f TB/s\n", what, milliseconds / times,
              bytes * times / milliseconds / 1e9);
}

void large(int times) {
  constexpr int kRows = 8192, kVocabulary = 151936;
  const double logits = double{kRows} * kVocabulary;
  {
    Tensors t(1);
    Rows rows(&t, {kBFloat16, kRows, kVocabulary, 0, 0.0});
    const LogitsPolicyLossParams p = rows.loss(rows.apart());
    timed("logits_policy_loss, bfloat16", 4 * logits, times, [&] {
      fill(p.ticket, 0, sizeof(*p.ticket));
      return logits_policy_loss(p, 0);
    });
    const TokenStatsParams stats = rows.stats();
    timed("token_stats, bfloat16", 2 * logits, times, [&] { return token_stats(stats, 0); });
  }
  Tensors t(2);
  Rows rows(&t, {kFloat, kRows, kVocabulary, 0, 0.0}, true);
  const LogitsPolicyLossParams p = rows.loss(narrow_gradient(rows.in));
  timed("logits_policy_loss, narrow", 6 * logits, times, [&] {
    fill(p.ticket, 0, sizeof(*p.ticket));
    return logits_policy_loss(p, 0);
  });
}

void clusters() {
  constexpr int kVocabulary = 151936;  // float32: twice the bytes of what trainers hold
  DeviceLimits limits{};
  require(device_limits(&limits));
  std::printf("%d SMs, %d bytes of shared memory for a block\n", limits.sms,
              limits.shared_per_block);
  const auto kernel = one_pass_cluster_kernel<float, true, false, kVocabularyThreads>;
  for (const unsigned size : {8u, 16u}) {
    const size_t stage = (kVocabulary * sizeof(float) / size + 127) / 128 * 128;
    const LaunchShape shape{size, kVocabularyThreads, size, kClusterHeader + 2 * stage};
    int granted = 0, most = 0;
    require(ask_resident_clusters(kernel, shape, limits, &granted));
    Configured<LogitsPolicyLossCall> one(kernel, shape, nullptr);
    require(one.status);
    one.config.numAttrs = 0;
    const Status asked = cudaOccupancyMaxPotentialClusterSize(&most, kernel, &one.config);
    std::printf("clusters of %u with %zu bytes a block: %d at once; largest cluster: %d (%s)\n",
                size, shape.shared_bytes, granted, most, cudaGetErrorString(asked));
  }
}

}  // namespace
}  // namespace fastrl::cuda

int main(int argc, char** argv) {
  using namespace fastrl::cuda;
  const std::string what = argc > 1 ? argv[1] : "small";
  if (what == "large") large(argc > 2 ? std::atoi(argv[2]) : 1);
  if (what == "clusters") clusters();
  if (what == "small") small();
  return failures != 0;
}
