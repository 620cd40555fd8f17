// Binding of batch_attention on the CPU: unpacks tensors and splits the positions among threads.
#include "batch_attention.h"

#include <algorithm>
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

constexpr int64_t kNumbersAThread = 1 << 16;  // fewer are not worth another thread

const BatchAttentionKernels& kernels() {
#ifdef DETR_BF_X86
  return best_of(kBatchAttentionBaseline, &kBatchAttentionV3, &kBatchAttentionV4);
#else
  return kBatchAttentionBaseline;
#endif
}

Rows rows_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

BatchAttention plain(const Sequences& s) {
  const uint64_t seed = s.rate.dropped > 0 ? *static_cast<const uint64_t*>(s.seed->data_ptr()) : 0;
  return {s.images(),       s.positions(), s.heads(), s.channels(), rows_of(s.query), rows_of(s.key), rows_of(s.value),
          s.key_mask ? static_cast<const bool*>(s.key_mask->data_ptr()) : nullptr, s.rate, seed};
}

template <class Body>
void over_positions(const Sequences& s, const Body& body) {
  const int64_t numbers = s.images() * s.heads() * s.channels();
  torch::stable::parallel_for(0, s.positions(), std::max<int64_t>(kNumbersAThread / numbers, 1), body);
}

Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> key_mask,
               double dropout_p, std::optional<Tensor> seed) {
  const Sequences s(DeviceType::CPU, query, key, value, key_mask, dropout_p, seed);
  Tensor output = in_large_pages(torch::stable::new_empty(query, {s.images(), s.positions(), s.heads(), s.channels()}));
  if (s.empty()) return output;
  const BatchAttention attention = plain(s);
  const Rows results = rows_of(output);
  over_positions(s, [&](int64_t begin, int64_t end) { kernels().forward(s.type, attention, results, begin, end); });
  return output;
}

Tensor backward(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                std::optional<Tensor> key_mask, double dropout_p, std::optional<Tensor> seed) {
  const Sequences s(DeviceType::CPU, query, key, value, key_mask, dropout_p, seed, &grad_output);
  const Tensor read = with_channels_together(grad_output);
  Tensor packed =
      in_large_pages(torch::stable::new_empty(query, {s.images(), s.positions(), 3, s.heads(), s.channels()}));
  if (s.empty()) return packed;
  const BatchAttention attention = plain(s);
  const auto [of_query, of_key, of_value] = unpacked(packed);
  const BatchAttentionGradients gradients{rows_of(read), rows_of(of_query), rows_of(of_key), rows_of(of_value)};
  over_positions(s, [&](int64_t begin, int64_t end) { kernels().backward(s.type, attention, gradients, begin, end); });
  return packed;
}

Tensor packed_forward(const Tensor& packed, std::optional<Tensor> key_mask, double dropout_p,
                      std::optional<Tensor> seed) {
  const auto [query, key, value] = unpacked(packed);
  return forward(query, key, value, key_mask, dropout_p, seed);
}

}  // namespace
}  // namespace detr_bf::cpu

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CPU, m) {
  m.impl("batch_attention", TORCH_BOX(&detr_bf::cpu::forward));
  m.impl("batch_attention_packed", TORCH_BOX(&detr_bf::cpu::packed_forward));
  m.impl("batch_attention_backward", TORCH_BOX(&detr_bf::cpu::backward));
}
