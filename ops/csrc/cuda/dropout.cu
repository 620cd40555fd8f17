// Binding of dropout on the GPU: unpacks tensors and launches kernels on the current stream.
#include <optional>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../sequences.h"
#include "binding.cuh"
#include "dropout.cuh"

namespace detr_bf::cuda {
namespace {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

Elements elements_of(const Tensor& input, double p, const Tensor* seed) {
  return {input.numel(), Dropping(DropoutRate(p), seed == nullptr ? nullptr : seed->data_ptr())};
}

Tensor add_of_tensors(const Tensor& input_in, std::optional<Tensor> residual_in, double p, const Tensor& seed) {
  const Type type = check_dropout("dropout_add", DeviceType::CUDA, input_in, pointer(residual_in), p, &seed);
  const DeviceGuard guard(input_in.get_device_index());
  const Tensor input = torch::stable::contiguous(input_in);
  const Tensor residual = residual_in ? torch::stable::contiguous(*residual_in) : input;
  Tensor output = torch::stable::empty_like(input);
  dropout_add(type, elements_of(input, p, &seed), input.data_ptr(), residual_in ? residual.data_ptr() : nullptr,
              output.data_ptr(), stream_of(input));
  return output;
}

Tensor relu_of_tensor(const Tensor& input_in, double p, const Tensor& seed) {
  const Type type = check_dropout("relu_dropout", DeviceType::CUDA, input_in, nullptr, p, &seed);
  const DeviceGuard guard(input_in.get_device_index());
  const Tensor input = torch::stable::contiguous(input_in);
  Tensor output = torch::stable::empty_like(input);
  relu_dropout(type, elements_of(input, p, &seed), input.data_ptr(), output.data_ptr(), stream_of(input));
  return output;
}

Tensor relu_backward_of_tensors(const Tensor& gradient_in, const Tensor& output_in, double p) {
  const Type type = check_dropout("relu_dropout_backward", DeviceType::CUDA, gradient_in, &output_in, p, nullptr);
  const DeviceGuard guard(gradient_in.get_device_index());
  const Tensor gradient = torch::stable::contiguous(gradient_in), output = torch::stable::contiguous(output_in);
  Tensor result = torch::stable::empty_like(gradient);
  relu_dropout_backward(type, elements_of(gradient, p, nullptr), gradient.data_ptr(), output.data_ptr(),
                        result.data_ptr(), stream_of(gradient));
  return result;
}

}  // namespace
}  // namespace detr_bf::cuda

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CUDA, m) {
  m.impl("dropout_add", TORCH_BOX(&detr_bf::cuda::add_of_tensors));
  m.impl("relu_dropout", TORCH_BOX(&detr_bf::cuda::relu_of_tensor));
  m.impl("relu_dropout_backward", TORCH_BOX(&detr_bf::cuda::relu_backward_of_tensors));
}
