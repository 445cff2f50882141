// Every launch of csrc/cuda without torch, on inputs made here: for compute-sanitizer, which takes
// minutes to start torch, and for ncu. Outputs begin as NaN and must be finite at the end.
//
//   launches               all of them, on small inputs; the same source runs on the host machine
//   launches large TIMES   three that the benchmarks lead with, 8,192 rows; their mean time
//   launches clusters      the largest clusters that the device grants the one-pass kernel
//
// tests/gpu/build.py links it with the kernels as they were compiled for the extension.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <vector>

#if defined(FASTRL_HOST_PRIMITIVES)
#define FASTRL_SPLIT_BYTES 512
#include "cuda/gae/gae.cuh"
#include "cuda/groups/group_advantages.cuh"
#include "cuda/tokens/policy_loss.cuh"
#include "cuda/tokens/sequence_weights.cuh"
#include "cuda/vocabulary/scale.cuh"
#include "cuda/vocabulary/token_stats.cuh"
#include "cuda/vocabulary/token_stats_backward.cuh"
#endif
#include "cuda/vocabulary/logits_policy_loss.cuh"
#if !defined(FASTRL_HOST_PRIMITIVES)
#include "cuda/torch/launches.h"
#endif

namespace fastrl::cuda {
namespace {

// --- the machine: memory, and what csrc/cuda/torch/launches.h declares

#if defined(FASTRL_HOST_PRIMITIVES)

constexpr auto kAlignment = std::align_val_t(128);
void* allocate(size_t bytes) { return ::operator new(bytes, kAlignment); }
void release(void* memory) { ::operator delete(memory, kAlignment); }
void copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void fill(void* memory, int byte, size_t bytes) { std::memset(memory, byte, bytes); }
void require(Status status) { host::require(status == kSuccess, "a launch was refused"); }
void finish() {}

constexpr int kThreads = 2 * kWarp;
const DeviceLimits kHopper{9, 16, 227 << 10, 228 << 10, 1 << 20};
Status gae(const GaeParams& p, Stream s) { return launch_gae(p, s); }
Status group_advantages(const GroupAdvantagesParams& p, Stream s) {
  return launch_group_advantages<kThreads, kThreads>(p, s);
}
Status logits_policy_loss(const LogitsPolicyLossParams& p, Stream s) {
  return launch_logits_policy_loss<kThreads>(p, kHopper, s);
}
Status policy_loss(const PolicyLossParams& p, unsigned blocks, Stream s) {
  return launch_policy_loss<kThreads, kThreads>(p, blocks, kHopper, s);
}
Status scale(const ScaleParams& p, Stream s) { return launch_scale<kThreads>(p, kHopper, s); }
Status weigh_sequences(const SequenceWeightsParams& p, Stream s) {
  return launch_sequence_weights<kThreads>(p, s);
}
Status token_stats(const TokenStatsParams& p, Stream s) {
  return launch_token_stats<kThreads>(p, kHopper, s);
}
Status token_stats_backward(const TokenStatsBackwardParams& p, Stream s) {
  return launch_token_stats_backward<kThreads>(p, kHopper, s);
}
// of one split of FASTRL_SPLIT_BYTES, of several, aligned or not, and of too many for a cluster
const std::vector<int> kVocabularies{3, 301, 2100};
const std::vector<LogitsType> kTypes{kFloat, kBFloat16};
int64_t chunks_of_weights(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }
constexpr int kManyGroups = 150;  // of two: too many rewards for a single block

#else

void require(Status status) {
  if (status == kSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}
void* allocate(size_t bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes));
  return memory;
}
void release(void* memory) { require(cudaFree(memory)); }
void copy(void* to, const void* from, size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}
void fill(void* memory, int byte, size_t bytes) { require(cudaMemset(memory, byte, bytes)); }
void finish() { require(cudaDeviceSynchronize()); }

const std::vector<int> kVocabularies{3, 1000, 1001, 50257, 151936, 262144};
const std::vector<LogitsType> kTypes{kFloat, kBFloat16, kHalf};
int64_t chunks_of_weights(int64_t tokens) { return weight_chunks(tokens); }
constexpr int kManyGroups = 2100;

#endif

// --- inputs and outputs of a call, each in an allocation of exactly its size

constexpr size_t kPattern = 1 << 20;

class Tensors {
 public:
  explicit Tensors(unsigned seed) : random_(seed) {}
  Tensors(const Tensors&) = delete;
  ~Tensors() {
    for (void* memory : owned_) release(memory);
  }
  template <typename T, typename Make>
  T* filled(size_t count, Make make) {
    std::vector<T> pattern(count < kPattern ? count : kPattern);
    for (T& x : pattern) x = static_cast<T>(make());
    T* memory = static_cast<T*>(owned(count * sizeof(T)));
    copy(memory, pattern.data(), pattern.size() * sizeof(T));
    for (size_t done = pattern.size(); done < count; done *= 2) {
      copy(memory + done, memory, std::min(done, count - done) * sizeof(T));
    }
    return memory;
  }
  template <typename T>
  T* zeros(size_t count) {
    void* memory = owned(count * sizeof(T));
    fill(memory, 0, count * sizeof(T));
    return static_cast<T*>(memory);
  }
  float* normal(size_t count) {
    return filled<float>(count, [&] { return normal_(random_); });
  }
  float* logprobs(size_t count) {
    return filled<float>(count, [&] { return -std::fabs(normal_(random_)); });
  }
  template <typename T>
  T* below(int limit, size_t count) {
    return filled<T>(count, [&] { return random_() % limit; });
  }
  void* elements(LogitsType type, size_t count) {
    if (type == kFloat) return normal(count);
    // any sign and fraction, and one of three exponents around that of 1
    const unsigned fraction = type == kHalf ? 10 : 7, first = type == kHalf ? 14 : 126;
    return filled<uint16_t>(count, [&] {
      return random_() % 2 << 15 | (first + random_() % 3) << fraction |
             random_() % (1u << fraction);
    });
  }
  void* output(LogitsType type, size_t count) {
    void* memory = owned(count * bytes_of(type));
    fill(memory, 0xff, count * bytes_of(type));
    expect(type, memory, count);
    return memory;
  }
  float* output(size_t count) { return static_cast<float*>(output(kFloat, count)); }
  void expect(LogitsType type, const void* memory, size_t count) {
    outputs_.push_back({type, memory, count});
  }
  // Whether all is written; of large outputs, at their ends.
  bool written() const {
    finish();
    for (const Output& output : outputs_) {
      const size_t size = bytes_of(output.type), bytes = std::min(output.count, kPattern) * size;
      std::vector<unsigned char> found(bytes);
      copy(found.data(), output.memory, bytes);
      const unsigned char* end = static_cast<const unsigned char*>(output.memory);
      if (!finite(output.type, found)) return false;
      copy(found.data(), end + output.count * size - bytes, bytes);
      if (!finite(output.type, found)) return false;
    }
    return true;
  }

 private:
  struct Output {
    LogitsType type;
    const void* memory;
    size_t count;
  };
  static bool finite(LogitsType type, const std::vector<unsigned char>& bytes) {
    const uint32_t exponents[] = {0x7f800000, 0x7f80, 0x7c00};
    for (size_t i = 0; i < bytes.size(); i += bytes_of(type)) {
      uint32_t x = 0;
      std::memcpy(&x, &bytes[i], bytes_of(type));
      if ((x & exponents[type]) == exponents[type]) return false;
    }
    return true;
  }
  void* owned(size_t bytes) {
    owned_.push_back(allocate(bytes));
    return owned_.back();
  }

  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<void*> owned_;
  std::vector<Output> outputs_;
};

int failures = 0;
void report(const Tensors& tensors, const std::string& what) {
  const bool ok = tensors.written();
  std::printf("%s: %s\n", what.c_str(), ok ? "written" : "NOT WRITTEN");
  std::fflush(stdout);
  failures += !ok;
}

Coefficients<float> coefficients() {
  Coefficients<float> c{};
  c.clip_low = c.clip_high = 0.2f;
  c.dual_clip = c.delta = c.kl_clamp = c.log_ratio_low = c.log_ratio_high = HUGE_VALF;
  c.kl_coef = 0.1f, c.entropy_coef = 0.01f;
  return c;
}

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
    return {in,           true,
            true,         t_.output(n),
            t_.output(n), t_.output(n),
            t_.output(n), reinterpret_cast<bool*>(t_.zeros<unsigned char>(n)),
            t_.output(n), t_.output(n)};
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
    const TokenStatsBackwardParams back{rows.in,   rows.apart(), p.row_max, p.log_sum,
                                        p.entropy, flow,         flow,      flow};
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

void of_tokens(int count, int length, bool packed) {
  const std::string what =
      ", " + std::to_string(count) + " x " + std::to_string(length) + (packed ? ", packed" : "");
  const size_t n = static_cast<size_t>(count) * length;
  const auto sequences = [&](Tensors* t) {
    int next = -length;
    const int* cuts = packed ? t->filled<int>(count + 1, [&] { return next += length; }) : nullptr;
    return Sequences{cuts, static_cast<int64_t>(n), count, packed ? 0 : length};
  };
  for (int kind = 0; kind <= static_cast<int>(kLast<Aggregation>); ++kind) {
    Tensors t(5);
    SequenceWeightsParams p{};
    p.mask = {t.filled<float>(n, [] { return 1.0f; }), 4, true};
    p.token_ids = t.below<int64_t>(9, n);
    p.sequences = sequences(&t);
    p.aggregation = static_cast<Aggregation>(kind);
    p.length_norm = 1.0f, p.group_size = 1;
    p.weights = t.output(count);
    p.active = reinterpret_cast<bool*>(t.zeros<unsigned char>(n));
    const int64_t chunks = chunks_of_weights(n);
    p.before_chunk = t.zeros<uint32_t>(chunks + 1), p.arrived = t.zeros<uint32_t>(1);
    if (counts_sequences(p.aggregation)) {
      p.words = t.zeros<uint32_t>(chunks * kWarp);
      p.before_word = t.zeros<uint32_t>(chunks * kWarp);
    }
    require(weigh_sequences(p, 0));
    report(t, "weigh_sequences, aggregation " + std::to_string(kind) + what);
  }
  for (const Level level : {Level::kToken, Level::kSequence, Level::kSequenceToken}) {
    Tensors t(6);
    PolicyLossParams p{};
    p.logprobs = t.logprobs(n), p.entropy = t.logprobs(n);
    p.mask = reinterpret_cast<bool*>(t.below<unsigned char>(2, n));
    const Constant by_sequence{t.logprobs(count), true};
    p.constants = {by_sequence, by_sequence,   by_sequence,  by_sequence,
                   {},          t.logprobs(n), t.logprobs(n)};
    p.objective = {Surrogate::kPpoClip, level, KlEstimator::kK3, KlGradient::kExact,
                   coefficients()};
    p.sequences = sequences(&t);
    p.loss = t.output(1), p.slope = t.output(n), p.entropy_slope = t.output(n);
    p.metrics = reinterpret_cast<Metrics*>(t.output(kNumMetrics));
    const unsigned blocks = policy_loss_blocks(&p);
    p.partial_sums = t.zeros<unsigned char>(blocks * kTokenSumsBytes);
    p.arrived = t.zeros<uint32_t>(1);
    require(policy_loss(p, blocks, 0));
    report(t, "policy_loss, level " + std::to_string(static_cast<int>(level)) + what);
  }
  for (const Bootstrap bootstrap : {Bootstrap::kNone, Bootstrap::kSequence, Bootstrap::kToken}) {
    Tensors t(7);
    const auto flags = [&](int one_of) {
      return reinterpret_cast<bool*>(
          t.filled<unsigned char>(n, [&, i = 0]() mutable { return ++i % one_of == 0; }));
    };
    GaeParams p{};
    p.in = {t.normal(n), t.normal(n), t.normal(n), flags(1), flags(97), flags(89), bootstrap};
    p.sequences = sequences(&t);
    p.advantages = t.output(n), p.returns = t.output(n);
    p.gamma = 0.99f, p.decay = 0.9f;
    const int64_t chunks = gae_chunks(n);
    p.maps = t.zeros<unsigned char>(chunks * kGaeMapBytes);
    p.ticket_and_flags = t.zeros<uint32_t>(chunks + 1);
    require(gae(p, 0));
    report(t, "gae, bootstrap " + std::to_string(static_cast<int>(bootstrap)) + what);
  }
}

void of_groups(int groups, int size, bool by_id) {
  const int64_t n = static_cast<int64_t>(groups) * size;
  for (const Scale scale : {Scale::kGroup, Scale::kBatch, Scale::kNone}) {
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
      for (const double softcap : {0.0, 10.0}) of_logits({type, 3, vocabulary, 0, softcap});
      of_logits({type, 3, vocabulary, 3, 0.0});
    }
  }
  for (const bool packed : {false, true}) {
    of_tokens(5, 37, packed);
    of_tokens(1, 9000, packed);  // clusters of the policy loss, and several chunks
  }
  for (const bool by_id : {false, true}) {
    of_groups(9, 4, by_id);
    of_groups(2, 1100, by_id);  // a block for each group
    of_groups(kManyGroups, 2, by_id);
  }
}

#if !defined(FASTRL_HOST_PRIMITIVES)

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

#endif

}  // namespace
}  // namespace fastrl::cuda

int main(int argc, char** argv) {
  using namespace fastrl::cuda;
  const std::string what = argc > 1 ? argv[1] : "small";
#if !defined(FASTRL_HOST_PRIMITIVES)
  if (what == "large") large(argc > 2 ? std::atoi(argv[2]) : 1);
  if (what == "clusters") clusters();
#endif
  if (what == "small") small();
  return failures != 0;
}
