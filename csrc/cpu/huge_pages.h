// Allocation of tensors as large as the logits, so that writing them is cheap.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../check.h"

namespace fastrl::cpu {

// Memory this large is mapped again each time, and faulting it in by 4 KiB pages costs several
// times as much as writing it, so request huge pages before the first access.
inline void use_huge_pages(const Tensor& tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  constexpr uintptr_t kLarge = uintptr_t{32} << 20;  // malloc maps these one by one
  const uintptr_t bytes = static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  if (bytes >= kLarge && tensor.is_contiguous()) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint: may fail
  }
#endif
}

// A new contiguous tensor like `logits`, for their gradient.
inline Tensor new_gradient(const Tensor& logits) {
  const Tensor grad = torch::stable::new_empty(logits, logits.sizes());
  use_huge_pages(grad);
  return grad;
}

}  // namespace fastrl::cpu
