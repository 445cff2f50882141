// Where sequences begin and end: rows of a padded [B, T] tensor, or cu_seqlens of a packed [1, N].
// Nobody has looked at cu_seqlens before the launch: whatever they hold, nothing here reads beyond
// them, and no sequence reaches beyond the tokens.
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
    int64_t low = 0, high = count;
    while (low < high) {  // the first that ends behind the token
      const int64_t middle = (low + high) / 2;
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
