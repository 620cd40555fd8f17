// ms_deform_attn on the GPU: tensors to plain data, kernels to the current stream.
#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../problem.h"
#include "binding.cuh"
#include "ms_deform_attn_launch.cuh"

namespace detr_bf::cuda {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kMaxChannels = int64_t{1} << 24;                   // H x D
constexpr int64_t kMaxStride = std::numeric_limits<int32_t>::max();  // bytes between cells
constexpr int64_t kSortedTogether = int64_t{1} << 24;                // about 32 bytes each during the sort
constexpr int64_t kMaxSorted = kMaxStride - kThreads;                // loop counters may step past the last one

// Limits required by the 32-bit arithmetic of the kernels.
void check_limits(const Problem& p, const std::vector<int64_t>& spatial_shapes) {
  STD_TORCH_CHECK(p.levels <= kMaxLevels, "ms_deform_attn: on a GPU, at most ", kMaxLevels, " levels, got ", p.levels);
  STD_TORCH_CHECK(p.points <= kMaxPoints, "ms_deform_attn: on a GPU, at most ", kMaxPoints, " points, got ", p.points);
  STD_TORCH_CHECK(p.heads * p.channels <= kMaxChannels, "ms_deform_attn: on a GPU, heads x channels is at most ",
                  kMaxChannels, ", got ", p.heads, " x ", p.channels);
  for (size_t level = 0; level < spatial_shapes.size() / 2; ++level) {
    STD_TORCH_CHECK(spatial_shapes[2 * level + 1] < kMaxWidth, "ms_deform_attn: level ", level,
                    " is too wide for a GPU: ", spatial_shapes[2 * level + 1], " cells");
  }
}

int64_t bytes_of(const Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }

// Stride in bytes. A dimension of one element may have any stride, even one too large to be multiplied.
int64_t stride_of(const Tensor& value, int64_t dim) {
  return value.size(dim) > 1 ? value.stride(dim) * bytes_of(value) : 0;
}

// Any strides between cells; the channels of a cell are contiguous.
Tensor readable(const Tensor& value) {
  const bool near = stride_of(value, 1) <= kMaxStride;
  return has_channels_together(value) && near ? value : torch::stable::contiguous(value);
}

// Owns the tensors of a call in the form that the kernels read.
struct Inputs {
  Problem problem;
  Tensor value, locations, weights;
  std::vector<int64_t> spatial_shapes, level_start_index;

  Inputs(const Tensor& value_in, std::vector<int64_t> shapes, std::vector<int64_t> starts, const Tensor& locations_in,
         const Tensor& weights_in, const Tensor* grad_output = nullptr)
      : problem(check_problem(DeviceType::CUDA, value_in, shapes, starts, locations_in, weights_in, grad_output)),
        value(readable(value_in)),
        locations(torch::stable::contiguous(locations_in)),
        weights(torch::stable::contiguous(weights_in)),
        spatial_shapes(std::move(shapes)),
        level_start_index(std::move(starts)) {
    check_limits(problem, spatial_shapes);
  }

  Sampling plain() const {
    const Problem& p = problem;
    Sampling s{};
    s.images = p.images;
    s.cells = p.cells;
    s.queries = p.queries;
    s.heads = static_cast<int32_t>(p.heads);
    s.channels = static_cast<int32_t>(p.channels);
    s.levels = static_cast<int32_t>(p.levels);
    s.points = static_cast<int32_t>(p.points);
    s.inverse_points = 1.0f / static_cast<float>(p.points);
    s.value = value.data_ptr();
    s.image_stride = stride_of(value, 0);
    s.cell_stride = static_cast<uint32_t>(stride_of(value, 1));
    s.head_stride = stride_of(value, 2);
    s.locations = locations.data_ptr();
    s.weights = weights.data_ptr();
    for (size_t level = 0; level < level_start_index.size(); ++level) {
      s.level[level] = {static_cast<int32_t>(spatial_shapes[2 * level]),
                        static_cast<int32_t>(spatial_shapes[2 * level + 1]),
                        static_cast<int32_t>(level_start_index[level])};
    }
    return s;
  }
};

Tensor forward_of_tensors(const Tensor& value, std::vector<int64_t> spatial_shapes,
                          std::vector<int64_t> level_start_index, const Tensor& locations, const Tensor& weights) {
  const Inputs inputs(value, std::move(spatial_shapes), std::move(level_start_index), locations, weights);
  const Problem& p = inputs.problem;
  const Variants variants = requested_variants();
  const std::array<int64_t, 3> sizes{p.images, p.queries, p.heads * p.channels};
  if (p.nothing_to_do()) return torch::stable::new_zeros(inputs.value, sizes);
  const DeviceGuard guard(inputs.value.get_device_index());
  Tensor output = torch::stable::new_empty(inputs.value, sizes);
  forward(p.type, inputs.plain(), output.data_ptr(), variants, stream_of(output));
  return output;
}

// Keys sorted by torch, whose sort only needs GPU memory and is stable on request.
struct Sorted {
  Tensor sorted, places;

  explicit Sorted(const Tensor& unsorted) : sorted(unsorted), places(unsorted) {
    std::array<StableIValue, 4> stack{torch::stable::detail::from(unsorted),
                                      torch::stable::detail::from(std::optional<bool>(true)),
                                      torch::stable::detail::from(int64_t{0}), torch::stable::detail::from(false)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
    sorted = torch::stable::detail::to<Tensor>(stack[0]);
    places = torch::stable::detail::to<Tensor>(stack[1]);
  }
  const int32_t* keys() const { return static_cast<const int32_t*>(sorted.data_ptr()); }
  const int64_t* order() const { return static_cast<const int64_t*>(places.data_ptr()); }
};

Tensor gradient_in_order(const Inputs& inputs, const Tensor& grad_output, Stream stream) {
  const Problem& p = inputs.problem;
  STD_TORCH_CHECK(p.queries * p.samples() <= kMaxSorted,
                  "ms_deform_attn_backward: too many samples to be sorted; deterministic algorithms must be off");
  Tensor gradient = torch::stable::new_empty(inputs.value, {p.images, p.cells, p.heads, p.channels});
  const auto sort = [&](int64_t count, auto write_keys) {
    Tensor keys = torch::stable::new_empty(inputs.value, {count}, ScalarType::Int);
    write_keys(static_cast<int32_t*>(keys.data_ptr()));
    return Sorted(keys);
  };
  gather(p.type, inputs.plain(), grad_output.data_ptr(), gradient.data_ptr(), kSortedTogether, stream,
         sort);
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor> backward_of_tensors(const Tensor& grad_output_in, const Tensor& value,
                                                       std::vector<int64_t> spatial_shapes,
                                                       std::vector<int64_t> level_start_index, const Tensor& locations,
                                                       const Tensor& weights, bool deterministic) {
  const Inputs inputs(value, std::move(spatial_shapes), std::move(level_start_index), locations, weights,
                      &grad_output_in);
  const Problem& p = inputs.problem;
  const Tensor grad_output = torch::stable::contiguous(grad_output_in);
  const Variants variants = requested_variants();
  const std::array<int64_t, 4> sizes{p.images, p.cells, p.heads, p.channels};
  if (p.nothing_to_do()) {
    return {torch::stable::new_zeros(inputs.value, sizes),
            torch::stable::new_zeros(inputs.locations, inputs.locations.sizes()),
            torch::stable::new_zeros(inputs.weights, inputs.weights.sizes())};
  }
  const DeviceGuard guard(value.get_device_index());
  const Stream stream = stream_of(value);
  Tensor grad_locations = torch::stable::empty_like(inputs.locations);
  Tensor grad_weights = torch::stable::empty_like(inputs.weights);
  GradientTensors gradients{grad_output.data_ptr(), nullptr, grad_locations.data_ptr(), grad_weights.data_ptr()};
  if (deterministic) {
    backward(p.type, inputs.plain(), gradients, variants, stream);
    return {gradient_in_order(inputs, grad_output, stream), grad_locations, grad_weights};
  }
  gradients.narrow = adds_narrow(p.type, inputs.plain(), grad_output.data_ptr(), variants);
  Tensor sums = torch::stable::new_zeros(inputs.value, sizes,
                                         gradients.narrow ? value.scalar_type() : accumulation_type(value));
  gradients.value = sums.data_ptr();
  backward(p.type, inputs.plain(), gradients, variants, stream);
  return {torch::stable::to(sums, value.scalar_type()), grad_locations, grad_weights};
}

}  // namespace
}  // namespace detr_bf::cuda

STABLE_TORCH_LIBRARY_IMPL(detr_bf, CUDA, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&detr_bf::cuda::forward_of_tensors));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&detr_bf::cuda::backward_of_tensors));
}
