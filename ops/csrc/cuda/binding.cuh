// Shared by the CUDA bindings: the stream to launch on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "../tensors.h"
#include "types.cuh"

namespace detr_bf::cuda {

inline Stream stream_of(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<Stream>(stream);
}

}  // namespace detr_bf::cuda
