// The operators of csrc/cuda/torch on tensors of the CPU: their kernels on the host machine.
#define FASTRL_SPLIT_BYTES 2048
#include <cuda_runtime_api.h>  // the one of stand_ins

#include "host_launches.h"

#include "cuda/torch/gae.cpp"
#include "cuda/torch/group_advantages.cpp"
#include "cuda/torch/logits_policy_loss.cpp"
#include "cuda/torch/policy_loss.cpp"
#include "cuda/torch/scale.cpp"
#include "cuda/torch/sequence_weights.cpp"
#include "cuda/torch/token_stats.cpp"

// For the tests in Python.
#pragma GCC visibility push(default)
extern "C" {

void use_clusters(bool wanted) { fastrl::cuda::host::clusters = wanted; }
float number_of(const void* value, int type) {
  return fastrl::cuda::as_float({value, static_cast<fastrl::cuda::NumberType>(type)});
}
// Counts the loads and stores of each byte, from now on; at place 0 or 1.
void watch(int place, const void* begin, int64_t bytes, unsigned char* loads,
           unsigned char* stores) {
  fastrl::cuda::host::watched[place] = {static_cast<const unsigned char*>(begin),
                                        static_cast<size_t>(bytes), loads, stores};
}

}  // extern "C"
#pragma GCC visibility pop
