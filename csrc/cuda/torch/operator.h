// What every operator of the CUDA backend does around its launch: device, stream, scratch, errors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../../check.h"

namespace fastrl::cuda {

// The device of a call's tensors is the current one while this lives.
class Call {
 public:
  Call(const Tensor& like, const char* name) : device_(device_of(like, name)), guard_(device_) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  int device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  static int device_of(const Tensor& like, const char* name) {
    STD_TORCH_CHECK(like.is_cuda(), name, " must be on a CUDA device");
    return like.get_device();
  }

  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline void check_launch(cudaError_t status, const char* kernel) {
  STD_TORCH_CHECK(status == cudaSuccess, kernel,
                  " could not be launched: ", cudaGetErrorString(status));
}

// Scratch; alive as long as the returned tensor, and in the order of the stream beyond that.
inline Tensor scratch(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

// A word that is 0 when the launch begins, for a kernel that leaves it so.
Tensor zero_word(const Tensor& like, const Call& call);

inline uint32_t* words(const Tensor& tensor) {
  return reinterpret_cast<uint32_t*>(tensor.mutable_data_ptr<int32_t>());
}

// The number of sequences of `tokens` [B, T], or of a packed [1, N] with cu_seqlens. What these
// hold is on the device and not looked at here; the kernels stay inside the tensor regardless.
inline int64_t check_sequences(const Tensor& tokens, const std::optional<Tensor>& cu_seqlens) {
  if (!cu_seqlens) return tokens.size(0);
  check_device(*cu_seqlens, tokens, "cu_seqlens", "the tokens");
  check_dtype(*cu_seqlens, ScalarType::Int, "cu_seqlens");
  STD_TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 && cu_seqlens->is_contiguous(),
                  "cu_seqlens must be contiguous of shape [S + 1], got ", shape_text(*cu_seqlens));
  STD_TORCH_CHECK(tokens.size(0) == 1, "cu_seqlens must come with packed tokens [1, N], got ",
                  shape_text(tokens));
  return cu_seqlens->size(0) - 1;
}

}  // namespace fastrl::cuda
