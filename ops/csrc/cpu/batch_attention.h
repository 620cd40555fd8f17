// Plain-data arguments of the batch attention kernels.
#pragma once

#include <cstdint>

#include "../random.h"
#include "../type.h"

namespace detr_bf::cpu {

// A tensor (B, N, H, D) with contiguous channels. Strides in elements.
struct Rows {
  void* data;
  int64_t image_stride, position_stride, head_stride;
};

// B images, N positions, H heads, D channels. Each position and head has a table of B x B probabilities.
struct BatchAttention {
  int64_t images, positions, heads, channels;
  Rows query, key, value;
  const bool* key_mask;  // (B, N), true: ignored; null: none is
  DropoutRate rate;
  uint64_t seed;
};

struct BatchAttentionGradients {
  Rows output;             // read
  Rows query, key, value;  // written
};

// The kernels of one instruction set, for positions [begin, end).
struct BatchAttentionKernels {
  void (*forward)(Type, const BatchAttention&, const Rows& output, int64_t begin, int64_t end);
  void (*backward)(Type, const BatchAttention&, const BatchAttentionGradients&, int64_t begin, int64_t end);
};

extern const BatchAttentionKernels kBatchAttentionBaseline;
#ifdef DETR_BF_X86
extern const BatchAttentionKernels kBatchAttentionV3;
extern const BatchAttentionKernels kBatchAttentionV4;
#endif

}  // namespace detr_bf::cpu
