// From a type known at run time to one known at compile time.
#pragma once

#include "simd.h"
#include "../type.h"

namespace detr_bf::cpu {
namespace {

// Calls body with a number of the type and one of the type that its sums have.
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
