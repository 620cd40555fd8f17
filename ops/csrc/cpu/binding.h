// What bindings share: the type of a tensor, the kernels of this processor.
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "processor.h"
#include "type.h"

namespace detr_bf::cpu {

inline Type type_of(const torch::stable::Tensor& tensor, const char* operation) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return Type::kFloat64;
    case ScalarType::Float: return Type::kFloat32;
    case ScalarType::Half: return Type::kFloat16;
    case ScalarType::BFloat16: return Type::kBFloat16;
    default: STD_TORCH_CHECK(false, operation, ": expected float64, float32, float16 or bfloat16");
  }
}

// Of three tables of kernels, that for this processor.
template <class Kernels>
const Kernels& best_of(const Kernels& baseline, const Kernels* v3, const Kernels* v4) {
  switch (processor()) {
    case Processor::kV4: return *v4;
    case Processor::kV3: return *v3;
    case Processor::kBaseline: break;
  }
  return baseline;
}

}  // namespace detr_bf::cpu
