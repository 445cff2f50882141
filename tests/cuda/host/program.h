// What the test programs share: random inputs, aligned buffers, and the sizes of structs that
// Python passes (tests/support/cuda_structs.py).
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "machine.h"

#define FASTRL_SIZE_OF(Struct) \
  extern "C" int64_t size_of_##Struct() { return static_cast<int64_t>(sizeof(Struct)); }

// Lets Python see the struct of every launch, scratch included.
extern "C" void hear_launches(void (*on_launch)(const void* params)) {
  fastrl::cuda::host::on_launch = on_launch;
}

namespace fastrl::cuda::host {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005 + 1442695040888963407;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(bits() >> 8) / (1 << 24); }
  float normal() {  // nearly
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }

 private:
  uint64_t state_;
};

// Exactly `bytes`, beginning `offset` bytes behind a multiple of 128.
class AlignedCopy {
 public:
  explicit AlignedCopy(size_t bytes, size_t offset = 0, const void* from = nullptr)
      : memory_(new (std::align_val_t(128)) unsigned char[bytes + offset]), offset_(offset) {
    if (from) std::memcpy(data(), from, bytes);
  }
  unsigned char* data() { return memory_.get() + offset_; }

 private:
  struct Release {
    void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t(128)); }
  };
  std::unique_ptr<unsigned char, Release> memory_;
  size_t offset_;
};

}  // namespace fastrl::cuda::host
