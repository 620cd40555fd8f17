// Alternative kernels to be timed against the present ones. The environment variable DETR_BF_CUDA_VARIANTS lists those
// to use; temporary: the slower kernels, and this file, are deleted after the comparison.
#pragma once

#include <cstdlib>
#include <sstream>
#include <string>

#include <torch/headeronly/util/Exception.h>

namespace detr_bf::cuda {

struct Variants {
  bool tiles = false, half_atomics = false, one_pass = false;
};

// From a comma-separated list of names; null: none.
inline Variants variants_named(const char* names) {
  Variants variants;
  if (names == nullptr) return variants;
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    const bool tiles = name == "tiles", half_atomics = name == "half_atomics", one_pass = name == "one_pass";
    STD_TORCH_CHECK(tiles || half_atomics || one_pass, "DETR_BF_CUDA_VARIANTS: '", name,
                    "' is unknown; the variants are tiles, half_atomics and one_pass");
    variants.tiles |= tiles;
    variants.half_atomics |= half_atomics;
    variants.one_pass |= one_pass;
  }
  return variants;
}

// Read at every call, so that a process can time one variant after another.
inline Variants requested_variants() { return variants_named(std::getenv("DETR_BF_CUDA_VARIANTS")); }

}  // namespace detr_bf::cuda
