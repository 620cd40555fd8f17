// Names and arguments of the operators. Their fake-tensor implementations and derivatives are in Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

STABLE_TORCH_LIBRARY(detr_bf, m) {
  m.def("cpu_instruction_set() -> str");
  m.def(
      "ms_deform_attn(Tensor value, SymInt[] spatial_shapes, SymInt[] level_start_index, Tensor sampling_locations, "
      "Tensor attention_weights) -> Tensor");
  m.def(
      "ms_deform_attn_backward(Tensor grad_output, Tensor value, SymInt[] spatial_shapes, SymInt[] level_start_index, "
      "Tensor sampling_locations, Tensor attention_weights, bool deterministic) -> (Tensor, Tensor, Tensor)");
  m.def(
      "batch_attention(Tensor query, Tensor key, Tensor value, Tensor? key_mask, float dropout_p, Tensor? seed) -> "
      "Tensor");
  m.def("batch_attention_packed(Tensor packed, Tensor? key_mask, float dropout_p, Tensor? seed) -> Tensor");
  m.def(
      "batch_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor? key_mask, "
      "float dropout_p, Tensor? seed) -> Tensor");
  m.def("dropout_add(Tensor input, Tensor? residual, float p, Tensor seed) -> Tensor");
  m.def("relu_dropout(Tensor input, float p, Tensor seed) -> Tensor");
  m.def("relu_dropout_backward(Tensor grad_output, Tensor output, float p) -> Tensor");
}
