// The tensors of the process: an allocator that keeps their places and fills them with NaN.
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "machine.h"

namespace ptx {
namespace {

// Behind each tensor lies memory of none, as much as the largest block of Triton reads at a time,
// so that one that runs off a tensor does not meet the next.
constexpr size_t kBehind = 65536;

std::mutex guard;
std::map<uint64_t, uint64_t>& allocations() {
  static auto& all = *new std::map<uint64_t, uint64_t>;  // outlives tensors that are freed at exit
  return all;
}
void add(uint64_t begin, uint64_t bytes) {
  const std::lock_guard lock(guard);
  allocations()[begin] = bytes;
}
void remove(uint64_t begin) {
  const std::lock_guard lock(guard);
  allocations().erase(begin);
}
void release(void* memory) {
  remove(reinterpret_cast<uint64_t>(memory));
  std::free(memory);
}

class Tensors final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    void* memory = nullptr;
    const size_t whole = (bytes + 63) / 64 * 64;
    if (posix_memalign(&memory, 64, whole + kBehind)) throw std::bad_alloc();
    for (size_t n = 0; n < whole; n += 8)
      std::memcpy(static_cast<char*>(memory) + n, kUnwritten, 8);
    add(reinterpret_cast<uint64_t>(memory), bytes);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

Allocation allocation_of(uint64_t address) {
  const std::lock_guard lock(guard);
  const auto after = allocations().upper_bound(address);
  if (after == allocations().begin()) return {};
  const auto found = std::prev(after);
  return {found->first, found->second};
}

}  // namespace ptx

extern "C" {

// From now on; tensors of before are named one by one.
void ptx_keep_tensors() {
  static ptx::Tensors tensors;
  c10::SetCPUAllocator(&tensors, 1);
}
void ptx_tensor(uint64_t begin, uint64_t bytes) { ptx::add(begin, bytes); }
void ptx_forget(uint64_t begin) { ptx::remove(begin); }

}  // extern "C"
