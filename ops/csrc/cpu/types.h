// Dispatch from a run-time type to a template parameter.
#pragma once

#include "simd.h"
#include "../type.h"

namespace detr_bf::cpu {
namespace {

// Calls body with a value of the type and one of the type of its sums.
template <class Body>
inline void with_types(Type type, Body&& body) {
  switch (type) {
    case Type::kFloat64: return body(double{}, double{});
    case Type::kFloat32: return body(float{}, float{});
    case Type::kFloat16: return body(Half{}, float{});
    case Type::kBFloat16: return body(BFloat16{}, float{});
  }
}

}  // namespace
}  // namespace detr_bf::cpu
