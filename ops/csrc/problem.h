// Checked sizes of one ms_deform_attn call: a direct call of torch.ops.detr_bf must not crash either.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "tensors.h"

namespace detr_bf {

// B images, S cells, Q queries, H heads, D channels, L levels, P points.
struct Problem {
  Type type;
  int64_t images, cells, queries, heads, channels, levels, points;

  int64_t samples() const { return levels * points; }
  bool nothing_to_do() const {
    return images == 0 || queries == 0 || heads == 0 || channels == 0 || levels == 0 || points == 0;
  }
};

// Locations, their gradients and all sums are float32, or float64 if value is float64.
inline ScalarType accumulation_type(const Tensor& value) {
  return value.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// spatial_shapes: height and width of each level, flattened.
inline void check_levels(const Problem& p, const std::vector<int64_t>& spatial_shapes,
                         const std::vector<int64_t>& level_start_index) {
  STD_TORCH_CHECK(spatial_shapes.size() % 2 == 0 && static_cast<int64_t>(spatial_shapes.size() / 2) == p.levels &&
                      static_cast<int64_t>(level_start_index.size()) == p.levels,
                  "ms_deform_attn: spatial_shapes and level_start_index must have one entry for each of ", p.levels,
                  " levels");
  STD_TORCH_CHECK(p.cells < std::numeric_limits<int32_t>::max(), "ms_deform_attn: value must have fewer than 2^31 cells");
  int64_t end = 0;
  for (int64_t level = 0; level < p.levels; ++level) {
    const int64_t height = spatial_shapes[2 * level], width = spatial_shapes[2 * level + 1];
    const int64_t start = level_start_index[level];
    STD_TORCH_CHECK(height > 0 && width > 0, "ms_deform_attn: level ", level, " is ", height, " x ", width);
    STD_TORCH_CHECK(start >= end, "ms_deform_attn: level ", level, " starts at ", start,
                    ", before the end of the level before it, ", end);
    // Division instead of multiplication: the product of two sizes may not fit into 64 bits.
    STD_TORCH_CHECK(start <= p.cells && height <= (p.cells - start) / width, "ms_deform_attn: level ", level, " of ",
                    height, " x ", width, " cells, from cell ", start, ", does not fit into the ", p.cells,
                    " cells of value");
    end = start + height * width;
  }
}

// Check all arguments of a call before anything is read. grad_output is null in the forward pass.
inline Problem check_problem(DeviceType device, const Tensor& value, const std::vector<int64_t>& spatial_shapes,
                             const std::vector<int64_t>& level_start_index, const Tensor& locations,
                             const Tensor& weights, const Tensor* grad_output = nullptr) {
  constexpr const char* name = "ms_deform_attn";
  check_memory(name, device,
               {{"value", &value},
                {"sampling_locations", &locations},
                {"attention_weights", &weights},
                {"grad_output", grad_output}});
  STD_TORCH_CHECK(value.dim() == 4, "ms_deform_attn: value must be (B, S, H, D)");
  STD_TORCH_CHECK(locations.dim() == 6 && locations.size(5) == 2,
                  "ms_deform_attn: sampling_locations must be (B, Q, H, L, P, 2)");
  STD_TORCH_CHECK(weights.dim() == 5, "ms_deform_attn: attention_weights must be (B, Q, H, L, P)");
  const Problem p{type_of(value, name), value.size(0), value.size(1),     locations.size(1),
                  value.size(2),        value.size(3), locations.size(3), locations.size(4)};
  for (int64_t dim = 0; dim < 5; ++dim) {
    STD_TORCH_CHECK(locations.size(dim) == weights.size(dim),
                    "ms_deform_attn: sampling_locations and attention_weights disagree in dimension ", dim);
  }
  STD_TORCH_CHECK(locations.size(0) == p.images && locations.size(2) == p.heads,
                  "ms_deform_attn: value and sampling_locations disagree in images or heads");
  STD_TORCH_CHECK(weights.scalar_type() == value.scalar_type(),
                  "ms_deform_attn: attention_weights must have the dtype of value");
  STD_TORCH_CHECK(locations.scalar_type() == accumulation_type(value),
                  "ms_deform_attn: sampling_locations must be float32, or float64 where value is float64");
  // All products of sizes in kernels and launchers are bounded by these.
  const int64_t row = product(name, {p.heads, p.channels});
  product(name, {p.levels, p.points});
  product(name, {p.images, p.cells, p.heads, p.channels});
  product(name, {p.images, p.queries, p.heads, p.channels});
  product(name, {p.images, p.queries, p.heads, p.levels, p.points, 2});
  check_levels(p, spatial_shapes, level_start_index);
  if (grad_output != nullptr) {
    STD_TORCH_CHECK(grad_output->dim() == 3 && grad_output->size(0) == p.images && grad_output->size(1) == p.queries &&
                        grad_output->size(2) == row && grad_output->scalar_type() == value.scalar_type(),
                    "ms_deform_attn_backward: grad_output must be (B, Q, H x D), of the dtype of value");
  }
  return p;
}

}  // namespace detr_bf
