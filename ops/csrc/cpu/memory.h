// How the memory of a large result comes into being.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <torch/csrc/stable/tensor.h>

namespace detr_bf::cpu {

// The system hands out new memory a page at a time, as it is first written, and clears it: for results of 50 MB in
// pages of 4 KiB that takes longer than the kernels do. Where it may, it takes pages of 2 MiB then, at a third of the
// time. A hint: nothing depends on it.
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
