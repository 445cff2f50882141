// Sequence boundaries: rows of a padded [B, T] tensor, or cu_seqlens of a packed [1, N].
#pragma once

#include <algorithm>

#include "../../check_sequences.h"

namespace fastrl::cpu {

class Sequences {
 public:
  Sequences(const Tensor& tokens, const std::optional<Tensor>& cu_seqlens)
      : count_(check_sequences(tokens, cu_seqlens)), length_(tokens.size(1)) {
    if (!cu_seqlens) return;
    cu_seqlens_ = cu_seqlens->const_data_ptr<int32_t>();
    STD_TORCH_CHECK(cu_seqlens_[0] == 0, "cu_seqlens must begin with 0, got ", cu_seqlens_[0]);
    for (int64_t s = 0; s < count_; ++s) {
      STD_TORCH_CHECK(cu_seqlens_[s + 1] >= cu_seqlens_[s], "cu_seqlens must not decrease, got ",
                      cu_seqlens_[s], " before ", cu_seqlens_[s + 1]);
    }
    STD_TORCH_CHECK(cu_seqlens_[count_] == length_, "cu_seqlens must end with the ", length_,
                    " tokens, got ", cu_seqlens_[count_]);
  }

  int64_t count() const { return count_; }
  int64_t begin(int64_t s) const { return cu_seqlens_ ? cu_seqlens_[s] : s * length_; }
  // The sequence that token i belongs to.
  int64_t of(int64_t i) const {
    if (!cu_seqlens_) return i / length_;
    return std::upper_bound(cu_seqlens_, cu_seqlens_ + count_ + 1, i) - cu_seqlens_ - 1;
  }
  int64_t end(int64_t s) const { return cu_seqlens_ ? cu_seqlens_[s + 1] : (s + 1) * length_; }

 private:
  int64_t count_, length_;
  const int32_t* cu_seqlens_ = nullptr;
};

}  // namespace fastrl::cpu
