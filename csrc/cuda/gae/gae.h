// Arguments of the kernel of generalized advantage estimation. No torch.
#pragma once

#include <cstdint>

#include "../../gae_inputs.h"
#include "../device/sequences.h"

namespace fastrl::cuda {

constexpr int64_t kGaeChunk = 4096;   // tokens of one block
constexpr int64_t kGaeMapBytes = 24;  // size of the map that a block leaves for earlier ones

struct GaeParams {
  GaeInputs in;
  Sequences sequences;
  float *advantages, *returns;
  float gamma, decay;  // decay: gamma lambda
  // only with more than one chunk: a map and a flag for each, and one ticket before the flags
  void* maps;
  uint32_t* ticket_and_flags;  // 0 before
  bool aligned;                // set by the launch: tokens may be read four at a time
};

inline int64_t gae_chunks(int64_t tokens) { return (tokens + kGaeChunk - 1) / kGaeChunk; }

}  // namespace fastrl::cuda
