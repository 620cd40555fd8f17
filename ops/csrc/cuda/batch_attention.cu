// Binding of batch_attention on the GPU: unpacks tensors and launches kernels on the current stream.
#include <cmath>
#include <optional>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../sequences.h"
#include "batch_attention_launch.cuh"
#include "binding.cuh"

namespace detr_bf::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

Rows rows_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// One call; owns the tensors that the kernels read.
struct Call {
  Sequences sequences;
  std::optional<Tensor> key_mask;  // int16: readable by the kernels

  Call(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout_p,
       const std::optional<Tensor>& seed, const Tensor* grad_output = nullptr)
      : sequences(DeviceType::CUDA, query, key, value, mask, dropout_p, seed, grad_output) {
    constexpr int64_t most = int64_t{1} << 30;  // 32-bit loop counters may step past the last element
    STD_TORCH_CHECK(sequences.images() <= most && sequences.heads() <= most && sequences.channels() <= most,
                    "batch_attention: too many images, heads or channels");
    if (sequences.key_mask) key_mask = torch::stable::to(*sequences.key_mask, ScalarType::Short);
  }

  Attention plain() const {
    const Sequences& s = sequences;
    return {s.positions(),
            static_cast<int32_t>(s.images()),
            static_cast<int32_t>(s.heads()),
            static_cast<int32_t>(s.channels()),
            rows_of(s.query),
            rows_of(s.key),
            rows_of(s.value),
            key_mask ? static_cast<const int16_t*>(key_mask->data_ptr()) : nullptr,
            Dropping(s.rate, s.seed ? s.seed->data_ptr() : nullptr),
            1 / std::sqrt(static_cast<double>(s.channels()))};
  }
};

Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> key_mask,
               double dropout_p, std::optional<Tensor> seed) {
  const Call call(query, key, value, key_mask, dropout_p, seed);
  const Sequences& s = call.sequences;
  const DeviceGuard guard(query.get_device_index());
  Tensor output = torch::stable::new_empty(query, {s.images(), s.positions(), s.heads(), s.channels()});
  if (!s.empty()) attend(s.type, call.plain(), rows_of(output), requested_variants(), stream_of(query));
  return output;
}

Tensor backward(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                std::optional<Tensor> key_mask, double dropout_p, std::optional<Tensor> seed) {
  const Call call(query, key, value, key_mask, dropout_p, seed, &grad_output);
  const Sequences& s = call.sequences;
  const DeviceGuard guard(query.get_device_index());
  const Tensor read = with_channels_together(grad_output);
  const auto new_packed = [&](ScalarType type) {
    return torch::stable::new_empty(query, {s.images(), s.positions(), 3, s.heads(), s.channels()}, type);
  };
  if (s.empty()) return new_packed(query.scalar_type());
  const Attention attention = call.plain();
  AttentionGradients gradients{rows_of(read), {}, {}, {}};
  const bool narrow = writes_narrow(s.type, attention, gradients);
  const ScalarType sums = query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor packed = new_packed(narrow ? query.scalar_type() : sums);
  const auto [of_query, of_key, of_value] = unpacked(packed);
  gradients.query = rows_of(of_query);
  gradients.key = rows_of(of_key);
  gradients.value = rows_of(of_value);
  attend_backward(s.type, attention, gradients, narrow, requested_variants(), stream_of(query));
  return torch::stable::to(packed, query.scalar_type());
}

Tensor packed_forward(const Tensor& packed, std::optional<Tensor> key_mask, double dropout_p,
                      std::optional<Tensor> seed) {
  const auto [query, key, value] = unpacked(packed);
  return forward(query, key, value, key_mask, dropout_p, seed);
}

}  // namespace
}  // namespace detr_bf::cuda

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CUDA, m) {
  m.impl("batch_attention", TORCH_BOX(&detr_bf::cuda::forward));
  m.impl("batch_attention_packed", TORCH_BOX(&detr_bf::cuda::packed_forward));
  m.impl("batch_attention_backward", TORCH_BOX(&detr_bf::cuda::backward));
}
