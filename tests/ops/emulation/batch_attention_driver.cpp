// The kernels of batch_attention on the emulated GPU, for ctypes.
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/batch_attention_launch.cuh"

namespace {

using namespace detr_bf;
using namespace detr_bf::cuda;

// Sizes of one call; `buffers` are the tensors by name, with the strides of their first three dimensions.
struct Call {
  int32_t type;
  int64_t images, positions, heads, channels;
  double dropout_p;
  const Buffer* buffers;
  const int64_t (*strides)[3];
  const char* variants;
  int32_t number_of_buffers;
};

int32_t find(const Call& call, const std::string& name) {
  int32_t at = 0;
  while (at < call.number_of_buffers && name != call.buffers[at].name) ++at;
  return at;
}

void* buffer(const Call& call, const std::string& name) {
  const int32_t at = find(call, name);
  return at < call.number_of_buffers ? call.buffers[at].begin : nullptr;
}

Rows rows(const Call& call, const std::string& name) {
  const int64_t* strides = call.strides[find(call, name)];
  return {buffer(call, name), strides[0], strides[1], strides[2]};
}

Attention attention_of(const Call& c) {
  return {c.positions,
          static_cast<int32_t>(c.images),
          static_cast<int32_t>(c.heads),
          static_cast<int32_t>(c.channels),
          rows(c, "query"),
          rows(c, "key"),
          rows(c, "value"),
          static_cast<const int16_t*>(buffer(c, "key_mask")),
          Dropping(DropoutRate(c.dropout_p), buffer(c, "seed")),
          1 / std::sqrt(static_cast<double>(c.channels))};
}

AttentionGradients gradients_of(const Call& c) {
  return {rows(c, "grad_output"), rows(c, "grad_query"), rows(c, "grad_key"), rows(c, "grad_value")};
}

std::string error;

// Error message, or empty.
template <class Body>
const char* guarded(const Call& call, Body body) {
  memory.buffers.assign(call.buffers, call.buffers + call.number_of_buffers);
  try {
    body(static_cast<Type>(call.type));
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}

}  // namespace

extern "C" const char* emulate_attend(const Call* call) {
  return guarded(*call, [&](Type type) {
    attend(type, attention_of(*call), rows(*call, "output"), variants_named(call->variants), 0);
  });
}

extern "C" int32_t emulate_writes_narrow(const Call* call) {
  return writes_narrow(static_cast<Type>(call->type), attention_of(*call), gradients_of(*call));
}

extern "C" const char* emulate_attend_backward(const Call* call) {
  return guarded(*call, [&](Type type) {
    const Attention attention = attention_of(*call);
    const AttentionGradients gradients = gradients_of(*call);
    attend_backward(type, attention, gradients, writes_narrow(type, attention, gradients),
                    variants_named(call->variants), 0);
  });
}
