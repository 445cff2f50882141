// Arguments of the kernel of the weights of sequences. No torch.
#pragma once

#include <cstdint>

#include "../device/mask.h"
#include "../device/number.h"
#include "../device/sequences.h"

namespace fastrl::cuda {

constexpr int64_t kTokensOfChunk = 1024;  // tokens of one warp, in words of 32
constexpr int64_t kWordsOfChunk = kTokensOfChunk / 32;

struct SequenceWeightsParams {
  Mask mask;                 // always given
  const int64_t* token_ids;  // null: the mask alone says which tokens are valid
  int64_t ignore_index;
  Sequences sequences;
  Aggregation aggregation;
  float normalizer;  // 0: the local count
  DeviceNumber normalizer_tensor;
  float length_norm;
  bool count_empty;
  int64_t group_size;
  float* weights;
  bool* active;  // which tokens are valid; may be null
  // The valid tokens before each chunk, and the number of all after the last.
  uint32_t* before_chunk;
  // For each word a bit per valid token, and the number of valid tokens before it in its chunk.
  // Null if no weight depends on the lengths of sequences.
  uint32_t *words, *before_word;
  uint32_t* arrived;  // 0 before
};

inline int64_t weight_chunks(int64_t tokens) {
  return (tokens + kTokensOfChunk - 1) / kTokensOfChunk;
}
// Whether the weights depend on the lengths of sequences.
inline bool counts_sequences(Aggregation aggregation) {
  return aggregation != Aggregation::kTokenMean && aggregation != Aggregation::kTokenSum;
}

}  // namespace fastrl::cuda
