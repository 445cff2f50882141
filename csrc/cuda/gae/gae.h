// What the operator of generalised advantage estimation hands to its kernel. No torch.
#pragma once

#include <cstdint>

namespace fastrl::cuda {

constexpr int64_t kGaeChunk = 4096;   // tokens of one block
constexpr int64_t kGaeMapBytes = 24;  // what a block tells those before it

enum class Bootstrap : int { kNone, kSequence, kToken };

struct GaeParams {
  const float *rewards, *values, *bootstrap;
  const bool *mask, *terminated, *truncated;  // null: all true, none, none
  const int32_t* cu_seqlens;                  // null where a sequence is a row of `row_length`
  float *advantages, *returns;
  int64_t tokens, sequences, row_length;
  Bootstrap kind;
  float gamma, decay;  // decay: gamma lambda
  // only where there is more than one chunk: a map and a flag for each, and one ticket before them
  void* maps;
  uint32_t* ticket_and_flags;  // 0 before
  bool aligned;                // set by the launch: tokens may be read four at a time
};

inline int64_t gae_chunks(int64_t tokens) { return (tokens + kGaeChunk - 1) / kGaeChunk; }

}  // namespace fastrl::cuda
