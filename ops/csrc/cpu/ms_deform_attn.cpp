// Binding of ms_deform_attn on the CPU: unpacks tensors and splits the work among threads.
#include "ms_deform_attn.h"

#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../problem.h"
#include "binding.h"
#include "memory.h"
#include "rows.h"

namespace detr_bf::cpu {
namespace {

constexpr int64_t kRowsAThread = 512;  // output rows; fewer are not worth another thread

const DeformableKernels& kernels() {
#ifdef DETR_BF_X86
  return best_of(kDeformableBaseline, &kDeformableV3, &kDeformableV4);
#else
  return kDeformableBaseline;
#endif
}

std::string instruction_set() {
  switch (processor()) {
    case Processor::kV4: return "x86-64-v4";
    case Processor::kV3: return "x86-64-v3";
    case Processor::kBaseline: break;
  }
  return "baseline";
}

Sampling plain(const Problem& p, const Tensor& value, const std::vector<int64_t>& spatial_shapes,
               const std::vector<int64_t>& level_start_index, const Tensor& locations, const Tensor& weights) {
  return {p.images,          p.cells,           p.queries,         p.heads,
          p.channels,        p.levels,          p.points,          spatial_shapes.data(),
          level_start_index.data(), value.data_ptr(), value.stride(0), value.stride(1),
          value.stride(2),   locations.data_ptr(), weights.data_ptr()};
}

// True if every cell belongs to a level.
bool fills_value(const Sampling& s) {
  int64_t cells = 0;
  for (int64_t level = 0; level < s.levels; ++level) {
    cells += s.spatial_shapes[2 * level] * s.spatial_shapes[2 * level + 1];
  }
  return cells == s.cells;
}

Tensor forward(const Tensor& value_in, std::vector<int64_t> spatial_shapes, std::vector<int64_t> level_start_index,
               const Tensor& locations_in, const Tensor& weights_in) {
  const Problem p =
      check_problem(DeviceType::CPU, value_in, spatial_shapes, level_start_index, locations_in, weights_in);
  const Tensor value = with_channels_together(value_in);
  const Tensor locations = torch::stable::contiguous(locations_in), weights = torch::stable::contiguous(weights_in);
  if (p.nothing_to_do()) {
    return torch::stable::new_zeros(value, {p.images, p.queries, p.heads * p.channels});
  }
  Tensor output = in_large_pages(torch::stable::new_empty(value, {p.images, p.queries, p.heads * p.channels}));
  const Sampling sampling = plain(p, value, spatial_shapes, level_start_index, locations, weights);
  torch::stable::parallel_for(0, p.images * p.heads * p.queries, kRowsAThread, [&](int64_t begin, int64_t end) {
    kernels().forward(p.type, sampling, output.data_ptr(), begin, end);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& value_in,
                                            std::vector<int64_t> spatial_shapes,
                                            std::vector<int64_t> level_start_index, const Tensor& locations_in,
                                            const Tensor& weights_in, bool /*deterministic: always is*/) {
  const Problem p = check_problem(DeviceType::CPU, value_in, spatial_shapes, level_start_index, locations_in,
                                  weights_in, &grad_output_in);
  const Tensor value = with_channels_together(value_in), grad_output = torch::stable::contiguous(grad_output_in);
  const Tensor locations = torch::stable::contiguous(locations_in), weights = torch::stable::contiguous(weights_in);
  const ScalarType sums = accumulation_type(value);
  Tensor grad_value = in_large_pages(torch::stable::new_empty(value, value.sizes(), sums));
  Tensor grad_locations = in_large_pages(torch::stable::new_empty(locations, locations.sizes()));
  Tensor grad_weights = in_large_pages(torch::stable::new_empty(weights, weights.sizes(), sums));
  if (p.nothing_to_do()) {
    torch::stable::zero_(grad_value);
    torch::stable::zero_(grad_locations);  // the kernels write every element if there are samples
    torch::stable::zero_(grad_weights);
  } else {
    const Sampling sampling = plain(p, value, spatial_shapes, level_start_index, locations, weights);
    const SamplingGradients gradients{grad_output.data_ptr(),  grad_value.data_ptr(),
                                      grad_locations.data_ptr(), grad_weights.data_ptr(),
                                      pays_to_pack(sampling, p.queries)};
    if (!gradients.packed || !fills_value(sampling)) torch::stable::zero_(grad_value);
    const int64_t tasks = p.images * p.heads;
    const bool by_level = tasks < static_cast<int64_t>(torch::stable::get_num_threads());
    torch::stable::parallel_for(0, by_level ? tasks * p.levels : tasks, 1, [&](int64_t begin, int64_t end) {
      kernels().backward(p.type, sampling, gradients, by_level, begin, end);
    });
  }
  const ScalarType dtype = value.scalar_type();
  return {torch::stable::to(grad_value, dtype), grad_locations, torch::stable::to(grad_weights, dtype)};
}

}  // namespace
}  // namespace detr_bf::cpu

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&detr_bf::cpu::instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&detr_bf::cpu::forward));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&detr_bf::cpu::backward));
}
