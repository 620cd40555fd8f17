// Dispatch from a run-time type to a template parameter.
#pragma once

#include "../type.h"
#include "device.cuh"

namespace detr_bf::cuda {

template <class Body>
void with_type(Type type, Body body) {
  switch (type) {
    case Type::kFloat64: return body(double{});
    case Type::kFloat32: return body(float{});
    case Type::kFloat16: return body(Half{});
    case Type::kBFloat16: return body(BFloat16{});
  }
}

}  // namespace detr_bf::cuda
