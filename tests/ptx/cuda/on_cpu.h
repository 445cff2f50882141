// Before the sources of csrc/cuda/torch: their operators then take tensors of the CPU.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

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
