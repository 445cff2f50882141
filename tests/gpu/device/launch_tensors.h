// The machine and the tensors of launches.cpp: each input and output in an allocation of exactly
// its size, and what csrc/cuda/torch/launches.h declares.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "cuda/torch/launches.h"
#include "cuda/vocabulary/logits_policy_loss.cuh"

namespace fastrl::cuda {
namespace {

// --- the machine: memory, and what csrc/cuda/torch/launches.h declares

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
constexpr int kManyTokens = 9000;
constexpr int kLargeGroup = 1100;
constexpr int kManyGroups = 2100;

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

}  // namespace
}  // namespace fastrl::cuda
