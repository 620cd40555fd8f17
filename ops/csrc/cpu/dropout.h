// Plain-data arguments of the dropout kernels.
#pragma once

#include <cstdint>

#include "../random.h"
#include "../type.h"

namespace detr_bf::cpu {

struct Dropout {
  int64_t elements;
  DropoutRate rate;
  uint64_t seed;
};

// The kernels of one instruction set, for blocks [begin, end) of kElementsOfBlock elements.
struct DropoutKernels {
  // output = residual + dropout(input); residual may be null.
  void (*add)(Type, const Dropout&, const void* input, const void* residual, void* output, int64_t begin, int64_t end);
  // output = dropout(max(input, 0)).
  void (*relu)(Type, const Dropout&, const void* input, void* output, int64_t begin, int64_t end);
  // Gradient of the input of relu_dropout; the kept elements follow from its output.
  void (*relu_backward)(Type, const Dropout&, const void* gradient, const void* output, void* result, int64_t begin,
                        int64_t end);
};

extern const DropoutKernels kDropoutBaseline;
#ifdef DETR_BF_X86
extern const DropoutKernels kDropoutV3;
extern const DropoutKernels kDropoutV4;
#endif

}  // namespace detr_bf::cpu
