// What every binding asks of a tensor, on any device.
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "type.h"

namespace detr_bf {

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

// (., ., ., D) of any strides, but the D channels of a row one after another.
inline bool has_channels_together(const Tensor& tensor) { return tensor.size(3) == 1 || tensor.stride(3) == 1; }
inline Tensor with_channels_together(const Tensor& tensor) {
  return has_channels_together(tensor) ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace detr_bf
