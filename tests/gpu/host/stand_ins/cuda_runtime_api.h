// What csrc/cuda/torch uses of CUDA's runtime, for tensors of the CPU.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "it was refused"; }
inline cudaError_t cudaMemsetAsync(void* memory, int byte, size_t bytes, cudaStream_t) {
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}

inline AOTITorchError fastrl_no_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
namespace torch::stable::accelerator {
struct NoGuard {
  explicit NoGuard(int) {}
};
}  // namespace torch::stable::accelerator

#define is_cuda is_cpu
#define CUDA CPU  // the key that the operators are registered for
#define DeviceGuard NoGuard
#define aoti_torch_get_current_cuda_stream fastrl_no_stream
