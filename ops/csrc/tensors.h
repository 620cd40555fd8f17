// Checks of tensor arguments shared by all bindings, on any device.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "type.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // its name in torch 2.11
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace detr_bf {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Type type_of(const Tensor& tensor, const char* operation) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return Type::kFloat64;
    case ScalarType::Float: return Type::kFloat32;
    case ScalarType::Half: return Type::kFloat16;
    case ScalarType::BFloat16: return Type::kBFloat16;
    default: STD_TORCH_CHECK(false, operation, ": expected float64, float32, float16 or bfloat16");
  }
}

// Product of the sizes; more than 2^57 elements are an error, so that the number of bytes fits 64 bits.
inline int64_t product(const char* operation, std::initializer_list<int64_t> sizes) {
  constexpr int64_t most = int64_t{1} << 57;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;  // even if another size is too large
  }
  int64_t result = 1;
  for (const int64_t size : sizes) {
    const bool fits = !__builtin_mul_overflow(result, size, &result) && result <= most;
    STD_TORCH_CHECK(fits, operation, ": the sizes of the tensors are too large");
  }
  return result;
}

// An argument of an operator; null if an optional one is missing.
struct Argument {
  const char* name;
  const Tensor* tensor;
};

// True if the storage of a tensor covers the last element addressed by its sizes and strides.
inline bool holds_its_elements(const Tensor& tensor) {
  int64_t last = tensor.storage_offset(), bytes = 0, stored = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t size = tensor.size(dim);
    int64_t reach = 0;
    if (size == 0) return true;
    if (__builtin_mul_overflow(size - 1, tensor.stride(dim), &reach)) return false;
    if (__builtin_add_overflow(last, reach, &last)) return false;
  }
  if (__builtin_mul_overflow(last, static_cast<int64_t>(tensor.element_size()), &bytes)) return false;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &stored));
  return bytes < stored && tensor.data_ptr() != nullptr;
}

// Kernels read and write raw addresses: every argument needs storage, on the device of the first one, which must be of
// the type of the kernels.
inline void check_memory(const char* operation, DeviceType type, std::initializer_list<Argument> arguments) {
  const Argument& first = *arguments.begin();
  STD_TORCH_CHECK(first.tensor->device().type() == type, operation, ": the kernels are not for the device of ",
                  first.name);
  for (const Argument& argument : arguments) {
    if (argument.tensor == nullptr) continue;
    STD_TORCH_CHECK(argument.tensor->device() == first.tensor->device(), operation, ": ", argument.name,
                    " must be on the device of ", first.name);
    STD_TORCH_CHECK(holds_its_elements(*argument.tensor), operation, ": the memory of ", argument.name,
                    " does not hold its elements");
  }
}

// (., ., ., D) with any strides, except that the D channels of a row are contiguous.
inline bool has_channels_together(const Tensor& tensor) { return tensor.size(3) == 1 || tensor.stride(3) == 1; }
inline Tensor with_channels_together(const Tensor& tensor) {
  return has_channels_together(tensor) ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace detr_bf
