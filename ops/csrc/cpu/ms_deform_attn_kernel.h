// Multi-scale deformable attention for the instruction set this file is compiled for.
#pragma once

#include "ms_deform_attn_backward.h"
#include "ms_deform_attn_forward.h"
#include "types.h"

namespace detr_bf::cpu {
namespace {

void forward_any(Type type, const Sampling& s, void* output, int64_t begin, int64_t end) {
  with_types(type, [&](auto number, auto sum) {
    using T = decltype(number);
    forward<T, decltype(sum)>(s, static_cast<T*>(output), begin, end);
  });
}

void backward_any(Type type, const Sampling& s, const SamplingGradients& g, bool by_level, int64_t begin, int64_t end) {
  with_types(type, [&](auto number, auto sum) {
    backward<decltype(number), decltype(sum)>(s, g, by_level, begin, end);
  });
}

}  // namespace
}  // namespace detr_bf::cpu
