// The kernels of ms_deform_attn on the emulated GPU, for ctypes.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/ms_deform_attn_launch.cuh"

namespace {

using namespace detr_bf::cuda;
using detr_bf::Type;

// Sizes and strides of one call; `buffers` are the tensors by name.
struct Call {
  int32_t type;
  int64_t images, cells, queries, heads, channels, levels, points;
  int64_t image_stride, cell_stride, head_stride;  // in bytes
  const int64_t* spatial_shapes;
  const int64_t* level_start_index;
  const char* variants;
  const Buffer* buffers;
  int32_t number_of_buffers;
};

void* buffer(const Call& call, const std::string& name) {
  for (int32_t i = 0; i < call.number_of_buffers; ++i) {
    if (name == call.buffers[i].name) return call.buffers[i].begin;
  }
  return nullptr;
}

Sampling sampling_of(const Call& c) {
  Sampling s{};
  s.images = c.images;
  s.cells = c.cells;
  s.queries = c.queries;
  s.heads = static_cast<int32_t>(c.heads);
  s.channels = static_cast<int32_t>(c.channels);
  s.levels = static_cast<int32_t>(c.levels);
  s.points = static_cast<int32_t>(c.points);
  s.inverse_points = 1.0f / static_cast<float>(c.points);
  s.value = buffer(c, "value");
  s.image_stride = c.image_stride;
  s.cell_stride = static_cast<uint32_t>(c.cell_stride);
  s.head_stride = c.head_stride;
  s.locations = buffer(c, "locations");
  s.weights = buffer(c, "weights");
  for (int64_t level = 0; level < c.levels; ++level) {
    s.level[level] = {static_cast<int32_t>(c.spatial_shapes[2 * level]),
                      static_cast<int32_t>(c.spatial_shapes[2 * level + 1]),
                      static_cast<int32_t>(c.level_start_index[level])};
  }
  return s;
}

struct Sorted {
  std::vector<int32_t> sorted;
  std::vector<int64_t> places;

  const int32_t* keys() const { return sorted.data(); }
  const int64_t* order() const { return places.data(); }
};

// Memory unknown to the test.
template <class Element>
void announce(const char* name, std::vector<Element>& elements) {
  memory.buffers.push_back({name, elements.data(), static_cast<int64_t>(elements.size() * sizeof(Element)), true});
}

Sorted sort(const std::vector<int32_t>& keys) {
  Sorted result{std::vector<int32_t>(keys.size()), std::vector<int64_t>(keys.size())};
  std::iota(result.places.begin(), result.places.end(), 0);
  std::stable_sort(result.places.begin(), result.places.end(), [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
  std::transform(result.places.begin(), result.places.end(), result.sorted.begin(), [&](int64_t i) { return keys[i]; });
  return result;
}

std::string error;

// Error message, or empty.
template <class Body>
const char* guarded(const Call& call, Body body) {
  memory.buffers.assign(call.buffers, call.buffers + call.number_of_buffers);
  try {
    body();
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}

}  // namespace

extern "C" const char* emulate_forward(const Call* call) {
  return guarded(*call, [&] {
    forward(static_cast<Type>(call->type), sampling_of(*call), buffer(*call, "output"), variants_named(call->variants),
            0);
  });
}

extern "C" int32_t emulate_adds_narrow(const Call* call) {
  return adds_narrow(static_cast<Type>(call->type), sampling_of(*call), buffer(*call, "grad_output"),
                     variants_named(call->variants));
}

extern "C" const char* emulate_backward(const Call* call) {
  return guarded(*call, [&] {
    const GradientTensors gradients{buffer(*call, "grad_output"), buffer(*call, "grad_value"),
                                    buffer(*call, "grad_locations"), buffer(*call, "grad_weights"),
                                    emulate_adds_narrow(call) != 0};
    backward(static_cast<Type>(call->type), sampling_of(*call), gradients, variants_named(call->variants), 0);
  });
}

extern "C" const char* emulate_gather(const Call* call, int64_t most_entries) {
  return guarded(*call, [&] {
    const auto sort_keys = [&](int64_t count, auto write_keys) {
      memory.buffers.resize(call->number_of_buffers);  // drop those of the previous chunk
      std::vector<int32_t> keys(count);
      announce("keys", keys);
      write_keys(keys.data());
      memory.buffers.pop_back();
      Sorted result = sort(keys);
      announce("sorted", result.sorted);
      announce("places", result.places);
      return result;  // a move keeps the address of the elements
    };
    gather(static_cast<Type>(call->type), sampling_of(*call), buffer(*call, "grad_output"), buffer(*call, "grad_value"),
           most_entries, 0, sort_keys);
  });
}
