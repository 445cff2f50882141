// The inputs of generalized advantage estimation, free of torch.
#pragma once

namespace fastrl {

// The value after the last token: none, one per sequence, or one per token.
enum class Bootstrap : int { kNone, kSequence, kToken };

struct GaeInputs {
  const float *rewards, *values;
  const float* bootstrap_values;
  const bool *mask, *terminated, *truncated;  // null: all true, none, none
  Bootstrap bootstrap;
};

}  // namespace fastrl
