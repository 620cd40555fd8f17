// What bindings share: the type of a tensor, the stream to launch on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "types.cuh"

namespace detr_bf::cuda {

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

inline Stream stream_of(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<Stream>(stream);
}

}  // namespace detr_bf::cuda
