// Shared by the launches of all CUDA operators: device, stream, scratch memory, errors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../../check_sequences.h"
#include "../device/mask.h"
#include "../device/number.h"
#include "../device/sequences.h"

namespace fastrl::cuda {

// Makes the device of a call's tensors the current one during its lifetime.
class Call {
 public:
  Call(const Tensor& like, const char* name) : device_(device_of(like, name)), guard_(device_) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
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

// Scratch memory; after the tensor is freed, only later launches on the stream reuse it.
inline Tensor scratch(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

// Scratch words that are 0 when the launch begins. Nothing is kept between calls: memory of a CUDA
// graph's pool may belong to another tensor in the next call.
inline Tensor zeroed_words(const Tensor& like, int64_t count, const Call& call) {
  const Tensor words = new_tensor(like, {count}, ScalarType::Int);
  check_launch(cudaMemsetAsync(words.mutable_data_ptr(), 0, 4 * count, call.stream()), "memset");
  return words;
}

inline uint32_t* words_of(const Tensor& tensor) {
  return reinterpret_cast<uint32_t*>(tensor.mutable_data_ptr<int32_t>());
}

inline Sequences sequences_of(const Tensor& tokens, const std::optional<Tensor>& cu_seqlens) {
  const int64_t count = check_sequences(tokens, cu_seqlens);
  STD_TORCH_CHECK(tokens.numel() < int64_t{1} << 32, "there must be fewer than 2^32 tokens, got ",
                  tokens.numel());
  return {data_or_null<int32_t>(cu_seqlens), tokens.numel(), count, tokens.size(1)};
}

// The values of a mask are not checked: everything but 0 counts as 1.
inline Mask mask_of(const Tensor& mask) {
  const int bytes = static_cast<int>(mask.element_size());
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64:
      return {mask.const_data_ptr(), bytes, false};
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Float:
    case ScalarType::Double:
      return {mask.const_data_ptr(), bytes, true};
    default:
      STD_TORCH_CHECK(false, "mask must be bool, integer or float 0/1, got ",
                      torch::headeronly::toString(mask.scalar_type()));
  }
}

inline NumberType number_type(const Tensor& number, const char* name) {
  switch (number.scalar_type()) {
    case ScalarType::Float:
      return NumberType::kFloat32;
    case ScalarType::Double:
      return NumberType::kFloat64;
    case ScalarType::Half:
      return NumberType::kFloat16;
    case ScalarType::BFloat16:
      return NumberType::kBFloat16;
    case ScalarType::Char:
      return NumberType::kInt8;
    case ScalarType::Short:
      return NumberType::kInt16;
    case ScalarType::Int:
      return NumberType::kInt32;
    case ScalarType::Long:
      return NumberType::kInt64;
    case ScalarType::Byte:
      return NumberType::kUInt8;
    case ScalarType::UInt16:
      return NumberType::kUInt16;
    case ScalarType::UInt32:
      return NumberType::kUInt32;
    case ScalarType::UInt64:
      return NumberType::kUInt64;
    default:
      STD_TORCH_CHECK(false, name, " must be of a real dtype, got ",
                      torch::headeronly::toString(number.scalar_type()));
  }
}

inline DeviceNumber number_of(const Tensor& number, const char* name) {
  return {number.const_data_ptr(), number_type(number, name)};
}

}  // namespace fastrl::cuda
