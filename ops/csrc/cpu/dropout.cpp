// Binding of dropout on the CPU: unpacks tensors and splits the blocks of elements among threads.
#include "dropout.h"

#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../sequences.h"
#include "binding.h"
#include "memory.h"

namespace detr_bf::cpu {
namespace {

using torch::stable::Tensor;

constexpr int64_t kBlocksAThread = 256;  // fewer are not worth another thread

const DropoutKernels& kernels() {
#ifdef DETR_BF_X86
  return best_of(kDropoutBaseline, &kDropoutV3, &kDropoutV4);
#else
  return kDropoutBaseline;
#endif
}

// A call with a seed, or without one if the kept elements follow from the result.
Dropout plain(const Tensor& input, double p, const Tensor* seed) {
  return {input.numel(), DropoutRate(p), seed ? *static_cast<const uint64_t*>(seed->data_ptr()) : 0};
}

template <class Body>
void over_blocks(const Dropout& d, const Body& body) {
  torch::stable::parallel_for(0, (d.elements + kElementsOfBlock - 1) / kElementsOfBlock, kBlocksAThread, body);
}

Tensor dropout_add(const Tensor& input_in, std::optional<Tensor> residual_in, double p, const Tensor& seed) {
  const Type type = check_dropout("dropout_add", DeviceType::CPU, input_in, pointer(residual_in), p, &seed);
  const Tensor input = torch::stable::contiguous(input_in);
  const Tensor residual = residual_in ? torch::stable::contiguous(*residual_in) : input;
  Tensor output = in_large_pages(torch::stable::empty_like(input));
  const Dropout dropout = plain(input, p, &seed);
  const void* added = residual_in ? residual.data_ptr() : nullptr;
  over_blocks(dropout, [&](int64_t begin, int64_t end) {
    kernels().add(type, dropout, input.data_ptr(), added, output.data_ptr(), begin, end);
  });
  return output;
}

Tensor relu_dropout(const Tensor& input_in, double p, const Tensor& seed) {
  const Type type = check_dropout("relu_dropout", DeviceType::CPU, input_in, nullptr, p, &seed);
  const Tensor input = torch::stable::contiguous(input_in);
  Tensor output = in_large_pages(torch::stable::empty_like(input));
  const Dropout dropout = plain(input, p, &seed);
  over_blocks(dropout, [&](int64_t begin, int64_t end) {
    kernels().relu(type, dropout, input.data_ptr(), output.data_ptr(), begin, end);
  });
  return output;
}

Tensor relu_dropout_backward(const Tensor& gradient_in, const Tensor& output_in, double p) {
  const Type type = check_dropout("relu_dropout_backward", DeviceType::CPU, gradient_in, &output_in, p, nullptr);
  const Tensor gradient = torch::stable::contiguous(gradient_in), output = torch::stable::contiguous(output_in);
  Tensor result = in_large_pages(torch::stable::empty_like(gradient));
  const Dropout dropout = plain(gradient, p, nullptr);
  over_blocks(dropout, [&](int64_t begin, int64_t end) {
    kernels().relu_backward(type, dropout, gradient.data_ptr(), output.data_ptr(), result.data_ptr(), begin, end);
  });
  return result;
}

}  // namespace
}  // namespace detr_bf::cpu

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CPU, m) {
  m.impl("dropout_add", TORCH_BOX(&detr_bf::cpu::dropout_add));
  m.impl("relu_dropout", TORCH_BOX(&detr_bf::cpu::relu_dropout));
  m.impl("relu_dropout_backward", TORCH_BOX(&detr_bf::cpu::relu_dropout_backward));
}
