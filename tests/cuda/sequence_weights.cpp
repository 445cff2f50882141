// The weights of sequences: exact counts, and the same bits in every run.
#include "cuda/tokens/sequence_weights.cuh"

#include <cstdio>

#include "host/program.h"

using namespace fastrl;
using namespace fastrl::cuda;
using fastrl::cuda::host::Random;

constexpr int kThreads = 2 * kWarp;

FASTRL_SIZE_OF(SequenceWeightsParams)

// Scratch is made here, exactly as much as the chunks need.
extern "C" int sequence_weights(const SequenceWeightsParams* given) {
  SequenceWeightsParams p = *given;
  const int64_t chunks = (p.sequences.tokens + kChunk - 1) / kChunk;
  std::vector<uint32_t> before_chunk(chunks + 1), words(chunks * kWarp), before_word(words.size());
  uint32_t arrived = 0;
  p.before_chunk = before_chunk.data(), p.arrived = &arrived;
  if (counts_sequences(p.aggregation)) p.words = words.data(), p.before_word = before_word.data();
  return launch_sequence_weights<kThreads>(p, 0);
}

extern "C" float number_of(const DeviceNumber* number) { return as_float(*number); }

SequenceWeightsParams params_of(const std::vector<float>& mask, const std::vector<int32_t>& cuts,
                                std::vector<float>* weights) {
  SequenceWeightsParams p{};
  const int64_t n = static_cast<int64_t>(mask.size());
  p.mask = {mask.data(), 4, true};
  p.sequences = {cuts.data(), n, static_cast<int64_t>(cuts.size()) - 1, n};
  p.length_norm = 1.0f;
  p.weights = weights->data();
  return p;
}

bool agrees(int64_t tokens, int sequences, Random random) {
  std::vector<float> mask(tokens), weights(sequences), again(sequences);
  std::vector<int32_t> cuts(sequences + 1);
  for (float& x : mask) x = random.below(3) ? 1.0f : -0.0f;
  for (int s = 1; s < sequences; ++s) cuts[s] = random.below(static_cast<int>(tokens) + 1);
  cuts[sequences] = static_cast<int32_t>(tokens);
  std::sort(cuts.begin(), cuts.end());
  SequenceWeightsParams p = params_of(mask, cuts, &weights);
  p.aggregation = Aggregation::kSeqMeanTokenMean;
  sequence_weights(&p);
  p.weights = again.data();
  sequence_weights(&p);
  std::vector<int> lengths(sequences);
  int counted = 0;
  for (int s = 0; s < sequences; ++s) {
    for (int32_t i = cuts[s]; i < cuts[s + 1]; ++i) lengths[s] += mask[i] == 1.0f;
    counted += lengths[s] > 0;
  }
  bool ok = weights == again;
  for (int s = 0; s < sequences; ++s) {
    ok = ok && weights[s] == 1.0f / std::max(counted, 1) / std::max(lengths[s], 1);
  }
  if (!ok) std::printf("%d tokens, %d sequences\n", static_cast<int>(tokens), sequences);
  return ok;
}

// Nobody looks at cu_seqlens before the launch: whatever they hold, no memory is touched that is
// not the operator's, which the sanitizers see.
void survives_broken_sequences(Random random) {
  std::vector<float> mask(3 * kChunk - 1, 1.0f), weights(4);
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<int32_t> cuts(weights.size() + 1);
    for (int32_t& x : cuts) x = random.below(8 * kChunk) - 2 * kChunk;
    SequenceWeightsParams p = params_of(mask, cuts, &weights);
    p.aggregation = trial % 2 ? Aggregation::kPromptMean : Aggregation::kSeqMeanTokenMean;
    p.group_size = 2;
    sequence_weights(&p);
  }
}

int main() {
  survives_broken_sequences(Random(1));
  bool ok = true;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{kChunk}, int64_t{5 * kChunk + 3}}) {
    for (const int sequences : {1, 3, 2 * kThreads + 1}) {
      ok = agrees(tokens, sequences, Random(tokens + sequences)) && ok;
    }
  }
  return ok ? 0 : 1;
}
