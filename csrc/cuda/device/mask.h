// A mask of 0 and 1 of any dtype.
#pragma once

#include <cstdint>

#include "../../contract.h"

namespace fastrl::cuda {

struct Mask {
  const void* values;  // null: all 1
  int element_bytes;   // 1, 2, 4 or 8
  bool is_float;       // -0.0 is 0, so the sign does not count

  FASTRL_HD bool at(int64_t i) const {
    if (!values) return true;
    switch (element_bytes) {
      case 1:
        return is_set<uint8_t>(i);
      case 2:
        return is_set<uint16_t>(i);
      case 4:
        return is_set<uint32_t>(i);
      default:
        return is_set<uint64_t>(i);
    }
  }
  // The same where `values` are given and their elements have the size of a Word.
  template <typename Word>
  FASTRL_HD bool is_set(int64_t i) const {
    const Word word = static_cast<const Word*>(values)[i];
    return static_cast<Word>(is_float ? word << 1 : word) != 0;
  }
};

}  // namespace fastrl::cuda
