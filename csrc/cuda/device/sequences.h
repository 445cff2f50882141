// Where sequences begin and end: rows of a padded [B, T] tensor, or cu_seqlens of a packed [1, N].
// The values of cu_seqlens are not checked before the launch. Whatever they are, nothing here reads
// beyond them, and no sequence reaches beyond the tokens.
#pragma once

#include <cstdint>

#include "../../contract.h"

namespace fastrl::cuda {

struct Sequences {
  const int32_t* cu_seqlens;          // null: a sequence is a row of `row_length` tokens
  int64_t tokens, count, row_length;  // fewer than 2^32

  // `s` may be `count`, one past the last.
  FASTRL_HD int64_t begin(int64_t s) const {
    if (!cu_seqlens) return s * row_length;
    const int64_t token = cu_seqlens[s] > 0 ? cu_seqlens[s] : 0;
    return token < tokens ? token : tokens;
  }
  FASTRL_HD int64_t end(int64_t s) const { return begin(s + 1); }

  // The sequence of a token that exists; `count` where cu_seqlens end before it.
  FASTRL_HD int64_t of(int64_t token) const {
    if (!cu_seqlens) return static_cast<uint32_t>(token) / static_cast<uint32_t>(row_length);
    return first_behind(token, 0, static_cast<uint32_t>(count));
  }
  // The same, for a token that is not before sequence `from`; the nearer, the fewer loads.
  FASTRL_HD uint32_t of(int64_t token, uint32_t from) const {
    if (!cu_seqlens) return static_cast<uint32_t>(of(token));
    const uint32_t most = static_cast<uint32_t>(count);
    uint32_t low = from, high = from;
    for (uint32_t step = 1; high < most && cu_seqlens[high + 1] <= token; step *= 2) {
      low = high + 1;
      high = most - high > step ? high + step : most;
    }
    return first_behind(token, low, high);
  }

 private:
  // The first sequence from `low` on that ends behind a token, or `high` if there is none before
  // it.
  FASTRL_HD uint32_t first_behind(int64_t token, uint32_t low, uint32_t high) const {
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (cu_seqlens[middle + 1] > token) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

}  // namespace fastrl::cuda
