// Plain-data arguments of the multi-scale deformable attention kernels.
#pragma once

#include <cstdint>

#include "../type.h"

namespace detr_bf::cpu {

// B images, S cells, Q queries, H heads, D channels, L levels, P points; a query and head has L x P samples.
struct Sampling {
  int64_t images, cells, queries, heads, channels, levels, points;
  const int64_t* spatial_shapes;     // (L, 2) height and width
  const int64_t* level_start_index;  // (L)
  const void* value;                 // (B, S, H, D), contiguous channels
  int64_t image_stride, cell_stride, head_stride;  // of value, in elements
  const void* locations;                           // (B, Q, H, L, P, 2)
  const void* weights;                             // (B, Q, H, L, P)
};

// Gradients of one backward pass, in the precision of accumulation; every output is written once.
struct SamplingGradients {
  const void* output;  // (B, Q, H, D), in the precision of value
  void* value;         // (B, S, H, D), zeros on entry unless packed
  void* locations;     // (B, Q, H, L, P, 2)
  void* weights;       // (B, Q, H, L, P)
  bool packed;         // rows are packed: see rows.h
};

// The kernels of one instruction set.
struct DeformableKernels {
  // Tasks [begin, end) of all images, heads and queries, numbered in this order; output (B, Q, H, D).
  void (*forward)(Type, const Sampling&, void* output, int64_t begin, int64_t end);
  // Tasks [begin, end); a task is a (image, head), or an (image, head, level) if by_level.
  void (*backward)(Type, const Sampling&, const SamplingGradients&, bool by_level, int64_t begin, int64_t end);
};

extern const DeformableKernels kDeformableBaseline;
#ifdef DETR_BF_X86
extern const DeformableKernels kDeformableV3;
extern const DeformableKernels kDeformableV4;
#endif

}  // namespace detr_bf::cpu
