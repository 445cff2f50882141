// The weight of a valid token of each sequence, in one launch.
//
// Each warp counts the valid tokens of a chunk and marks them as bits of words. The block that
// finishes last adds up the chunks, which gives the number of valid tokens before any place; the
// difference of two such numbers is the count of a sequence. All counts are integers and exact.
#pragma once

#include "../device/block_sum.cuh"
#include "../device/number.cuh"
#include "sequence_weights.h"

namespace fastrl::cuda {

// A word has as many bits as a warp has lanes, and a chunk as many words.
constexpr int kChunk = kWarp * kWarp;

// Each lane receives the sum over itself and the lanes before it.
__device__ __forceinline__ uint32_t running_sum(uint32_t x) {
  const int lane = thread_index() % kWarp;
  FASTRL_UNROLL
  for (int by = 1; by < kWarp; by *= 2) {
    const uint32_t before = shuffle_up(x, by);
    if (lane >= by) x += before;
  }
  return x;
}

// Called by one warp; the elements of the mask have the size of a Word.
template <typename Word>
__device__ __forceinline__ void count_chunk(const SequenceWeightsParams& p, int64_t chunk) {
  constexpr int kAtOnce = 8;  // loads in flight
  const int lane = thread_index() % kWarp;
  const auto token_of = [&](int word) { return chunk * kChunk + word * kWarp + lane; };
  const auto exists = [&](int64_t token) { return token < p.sequences.tokens; };
  uint32_t own = 0;  // the lane's word
  for (int word = 0; word < kWarp; word += kAtOnce) {
    bool counts[kAtOnce];
    FASTRL_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t token = token_of(word + i);
      counts[i] = exists(token) ? p.mask.is_set<Word>(token) : false;
    }
    if (p.token_ids) {
      FASTRL_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t token = token_of(word + i);
        const int64_t id = exists(token) ? p.token_ids[token] : p.ignore_index;
        counts[i] = counts[i] & (id != p.ignore_index);
      }
    }
    FASTRL_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t token = token_of(word + i);
      if (p.active && exists(token)) p.active[token] = counts[i];
      const uint32_t lanes = lanes_where(counts[i]);
      if (lane == word + i) own = lanes;
    }
  }
  const uint32_t count = count_bits(own), through = running_sum(count);
  if (p.words) {
    p.words[chunk * kWarp + lane] = own;
    p.before_word[chunk * kWarp + lane] = through - count;
  }
  if (lane == kWarp - 1)
    p.before_chunk[chunk] = through;  // add_up_chunks makes it the sum of those before
}

struct Count {
  uint32_t value;
  __device__ void add(const Count& other) { value += other.value; }
};

// Called by one block: turns the valid tokens in each chunk into those before it.
template <int kThreads>
__device__ __forceinline__ void add_up_chunks(const SequenceWeightsParams& p, uint32_t* shared) {
  constexpr int kWarps = kThreads / kWarp;
  const int thread = thread_index(), warp = thread / kWarp, lane = thread % kWarp;
  const int64_t chunks = (p.sequences.tokens + kChunk - 1) / kChunk;
  const int64_t each = (chunks + kThreads - 1) / kThreads;
  const int64_t first = thread * each, after = first + each < chunks ? first + each : chunks;
  uint32_t own = 0;
  for (int64_t chunk = first; chunk < after; ++chunk) own += p.before_chunk[chunk];
  const uint32_t through = running_sum(own);
  if (lane == kWarp - 1) shared[warp] = through;
  sync_block();
  uint32_t before = through - own, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? shared[w] : 0;
    total += shared[w];
  }
  for (int64_t chunk = first; chunk < after; ++chunk) {
    const uint32_t count = p.before_chunk[chunk];
    p.before_chunk[chunk] = before;
    before += count;
  }
  if (thread == 0) p.before_chunk[chunks] = total;
  sync_block();
}

// The number of valid tokens before this one.
__device__ __forceinline__ uint32_t valid_before(const SequenceWeightsParams& p, int64_t token) {
  uint32_t count = p.before_chunk[token / kChunk];
  if (token % kChunk != 0) {  // then the chunk exists
    const uint32_t bits = p.words[token / kWarp] & ((1u << token % kWarp) - 1u);
    count += p.before_word[token / kWarp] + count_bits(bits);
  }
  return count;
}
// The valid tokens of the sequences [first, after).
__device__ __forceinline__ uint32_t valid_tokens(const SequenceWeightsParams& p, int64_t first,
                                                 int64_t after) {
  const int64_t begin = p.sequences.begin(first), end = p.sequences.begin(after);
  return begin < end ? valid_before(p, end) - valid_before(p, begin) : 0;
}

// The global denominator if given, else the local one, or 1 if nothing counts.
__device__ __forceinline__ float denominator(const SequenceWeightsParams& p, uint32_t count) {
  if (p.normalizer_tensor.value) return count > 0 ? as_float(p.normalizer_tensor) : 1.0f;
  if (p.normalizer != 0.0f) return p.normalizer;
  return static_cast<float>(count > 0 ? count : 1);
}

// Called by one block.
template <int kThreads>
__device__ __forceinline__ void write_weights(const SequenceWeightsParams& p, Count* shared) {
  const int64_t sequences = p.sequences.count, first = thread_index();
  const bool by_group = p.aggregation == Aggregation::kPromptMean;
  const int64_t size = by_group ? p.group_size : 1, groups = sequences / size;
  const auto tokens_of = [&](int64_t group) {
    return valid_tokens(p, group * size, (group + 1) * size);
  };
  Count counted{};  // what the denominator counts
  if (p.aggregation == Aggregation::kTokenMean) {
    counted.value = p.before_chunk[(p.sequences.tokens + kChunk - 1) / kChunk];
  } else if (p.aggregation != Aggregation::kTokenSum) {
    for (int64_t g = first; g < groups; g += kThreads) {
      counted.value += (p.count_empty && !by_group) || tokens_of(g) > 0;
    }
    counted = sum_block<kThreads>(counted, shared);
  }
  const float over = denominator(p, counted.value);
  for (int64_t s = first; s < sequences; s += kThreads) {
    float weight = 1.0f;
    if (p.aggregation == Aggregation::kPromptMean) {
      const uint32_t tokens = tokens_of(s / size);
      weight = 1.0f / static_cast<float>(tokens > 0 ? tokens : 1) / over;
    } else if (p.aggregation != Aggregation::kTokenSum) {
      weight = 1.0f / over;
    }
    if (p.aggregation == Aggregation::kSeqMeanTokenMean) {
      const uint32_t tokens = tokens_of(s);
      weight /= static_cast<float>(tokens > 0 ? tokens : 1);
    } else if (p.aggregation == Aggregation::kSeqMeanTokenSumNorm) {
      weight /= p.length_norm;
    }
    p.weights[s] = weight;
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    weights_of_sequences(const __grid_constant__ SequenceWeightsParams p) {
  constexpr int kWarps = kThreads / kWarp;
  uint32_t* shared = shared_memory<uint32_t>();
  const int64_t chunk = int64_t{block_index()} * kWarps + thread_index() / kWarp;
  if (chunk * kChunk < p.sequences.tokens) {
    switch (p.mask.element_bytes) {
      case 1:
        count_chunk<uint8_t>(p, chunk);
        break;
      case 2:
        count_chunk<uint16_t>(p, chunk);
        break;
      case 4:
        count_chunk<uint32_t>(p, chunk);
        break;
      default:
        count_chunk<uint64_t>(p, chunk);
    }
  }
  if (num_blocks() > 1 && !last_block(p.arrived, shared)) return;
  sync_block();
  add_up_chunks<kThreads>(p, shared);
  write_weights<kThreads>(p, reinterpret_cast<Count*>(shared));
}

// Scratch is for weight_chunks(...) chunks.
template <int kThreads = 256>
Status launch_sequence_weights(const SequenceWeightsParams& p, Stream stream) {
  constexpr int64_t kTokens = int64_t{kThreads / kWarp} * kChunk;
  const int64_t blocks = (p.sequences.tokens + kTokens - 1) / kTokens;
  const LaunchShape shape{static_cast<unsigned>(blocks > 1 ? blocks : 1), kThreads, 1,
                          kThreads / kWarp * sizeof(uint32_t)};
  return launch(weights_of_sequences<kThreads>, shape, p, stream);
}

}  // namespace fastrl::cuda
