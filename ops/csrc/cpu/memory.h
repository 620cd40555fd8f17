// Page size of large results.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <torch/csrc/stable/tensor.h>

namespace detr_bf::cpu {

// The system maps and clears new memory page by page on first write. For 50 MB in pages of 4 KiB this takes longer than
// the kernels themselves; with pages of 2 MiB it takes a third of that. Only a hint to the system.
inline torch::stable::Tensor in_large_pages(torch::stable::Tensor tensor) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const auto start = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (start + page - 1) / page * page;
  const uintptr_t last = (start + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size()) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return tensor;
}

}  // namespace detr_bf::cpu
