// Counters for kernels whose blocks count each other, without a launch to clear them: every kernel
// leaves its counter at 0, and launches on one stream come one after another.
#include <map>
#include <mutex>
#include <utility>

#include "operator.h"

namespace fastrl::cuda {

Tensor zero_word(const Tensor& like, const Call& call) {
  const auto fresh = [&] { return torch::stable::new_zeros(like, {1}, ScalarType::Int); };
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_launch(cudaStreamIsCapturing(call.stream(), &capture), "cudaStreamIsCapturing");
  // a graph may run beside the stream it was captured on, and the per-thread stream is many streams
  if (capture != cudaStreamCaptureStatusNone || call.stream() == cudaStreamPerThread) {
    return fresh();
  }
  static std::mutex mutex;
  static auto& words = *new std::map<std::pair<int, cudaStream_t>, Tensor>;  // outlives CUDA
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<int, cudaStream_t> place(call.device(), call.stream());
  auto found = words.find(place);
  if (found == words.end()) found = words.emplace(place, fresh()).first;
  return found->second;
}

}  // namespace fastrl::cuda
