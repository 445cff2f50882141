// The operator sequence_weights on CUDA tensors.
#include <tuple>

#include "../../check_aggregation.h"
#include "launches.h"
#include "operator.h"

namespace fastrl::cuda {
namespace {

std::tuple<Tensor, Tensor> sequence_weights(const Tensor& mask,
                                            const std::optional<Tensor>& token_ids,
                                            int64_t ignore_index,
                                            const std::optional<Tensor>& cu_seqlens,
                                            const AggregationArguments& in) {
  const Call call(mask, "mask");
  SequenceWeightsParams params{};
  params.sequences = sequences_of(mask, cu_seqlens);
  params.aggregation = check_aggregation(in, mask, token_ids, params.sequences.count);
  STD_TORCH_CHECK(!in.group_ids, "group_ids must come in order, as group_size, on a CUDA device");
  params.mask = mask_of(mask);
  params.token_ids = data_or_null<int64_t>(token_ids);
  params.ignore_index = ignore_index;
  params.normalizer = static_cast<float>(in.normalizer);
  if (in.normalizer_tensor) {
    params.normalizer_tensor = number_of(*in.normalizer_tensor, "normalizer_tensor");
  }
  const double width = mask.size(1) > 0 ? static_cast<double>(mask.size(1)) : 1.0;
  params.length_norm = static_cast<float>(in.length_norm > 0 ? in.length_norm : width);
  params.count_empty = in.count_empty;
  params.group_size = in.group_size;

  const int64_t chunks = weight_chunks(params.sequences.tokens), words = chunks * kWordsOfChunk;
  const bool apart = counts_sequences(params.aggregation);
  const Tensor counts =
      torch::stable::new_empty(mask, {chunks + 1 + (apart ? 2 * words : 0)}, ScalarType::Int);
  params.before_chunk = words_of(counts);
  if (apart) {
    params.words = params.before_chunk + chunks + 1;
    params.before_word = params.words + words;
  }
  const Tensor arrived = zeroed_words(mask, 1, call);
  params.arrived = words_of(arrived);

  const Tensor weights =
      torch::stable::new_empty(mask, {params.sequences.count}, ScalarType::Float);
  const bool merged = token_ids || mask.scalar_type() != ScalarType::Bool;
  const Tensor active = merged ? empty_like_tokens(mask, ScalarType::Bool)
                               : torch::stable::new_empty(mask, {0}, ScalarType::Bool);
  params.weights = weights.mutable_data_ptr<float>();
  params.active = merged ? active.mutable_data_ptr<bool>() : nullptr;
  check_launch(weigh_sequences(params, call.stream()), "sequence_weights");
  return {weights, active};
}

}  // namespace
}  // namespace fastrl::cuda

STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda, CUDA, m) {
  m.impl("sequence_weights", fastrl::boxed<fastrl::cuda::sequence_weights>);
}
