// Kernel selection from run-time types and sizes: channels per load, queries per group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "batch_attention_backward.cuh"
#include "batch_attention_forward.cuh"
#include "batch_attention_one_pass.cuh"
#include "types.cuh"
#include "variants.cuh"

namespace detr_bf::cuda {

#ifdef DETR_BF_MAX_GRID  // small in tests
constexpr int64_t kMaxBlocks = DETR_BF_MAX_GRID;
#else
constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
#endif
constexpr int kFewQueries = 4, kManyQueries = 8;  // per group

// N channels a lane; Q queries a group; Held: they stay in registers.
template <int N, int Q, bool H>
struct Shape {
  static constexpr int kChannels = N, kQueries = Q;
  static constexpr bool kHeld = H;
};

// True if every lane can load `bytes` at once.
template <class T>
bool lie_together(const Attention& a, std::initializer_list<const Rows*> more, int64_t bytes) {
  uint64_t places = a.channels * sizeof(T);
  const auto look_at = [&](const Rows& rows) {
    const auto strides = static_cast<uint64_t>(rows.image_stride | rows.position_stride | rows.head_stride);
    places |= reinterpret_cast<uintptr_t>(rows.data) | strides * sizeof(T);
  };
  for (const Rows* rows : {&a.query, &a.key, &a.value}) look_at(*rows);
  for (const Rows* rows : more) look_at(*rows);
  return places % static_cast<uint64_t>(bytes) == 0;
}

// Calls body with the shape for this call. Few queries leave registers for 16 bytes of channels, many for 4 channels.
template <class T, class Body>
void with_shape(const Attention& a, std::initializer_list<const Rows*> more, Body body) {
  if constexpr (sizeof(T) < sizeof(double)) {
    constexpr int many = 16 / sizeof(T), few = 4;
    const auto fits = [&](int channels) {
      return a.channels <= channels * kWarp && lie_together<T>(a, more, channels * sizeof(T));
    };
    if (a.images <= kFewQueries && fits(many)) return body(Shape<many, kFewQueries, true>{});
    if (a.images > kFewQueries && fits(few)) return body(Shape<few, kManyQueries, true>{});
  }
  body(Shape<1, kFewQueries, false>{});
}

// Lanes of a group: a power of two, enough for all channels if possible, and at least one per query.
inline int lanes_of(const Attention& a, int channels, int queries) {
  int lanes = queries;
  while (lanes < kWarp && lanes * channels < a.channels) lanes *= 2;
  return lanes;
}

template <class Kernel, class Written>
void launch_pairs(Kernel kernel, const Attention& a, int lanes, Stream stream, const Written& written) {
  const int64_t groups = kThreadsOfBlock / lanes, blocks = ceil_div(a.pairs(), groups);
  for (int64_t block = 0; block < blocks; block += kMaxBlocks) {
    const Grid grid(static_cast<unsigned>(std::min(blocks - block, kMaxBlocks)));
    launch(kernel, grid, kThreadsOfBlock, stream, a, lanes, block * groups, written);
  }
}

inline void attend(Type type, const Attention& a, const Rows& output, Variants variants, Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    with_shape<T>(a, {&output}, [&](auto shape) {
      using S = decltype(shape);
      constexpr int N = S::kChannels, Q = S::kQueries;
      const int lanes = lanes_of(a, N, Q);
      if constexpr (S::kHeld) {
        if (variants.one_pass && a.images <= Q) return launch_pairs(one_pass_kernel<T, N, Q>, a, lanes, stream, output);
      }
      launch_pairs(attend_kernel<T, N, Q, S::kHeld>, a, lanes, stream, output);
    });
  });
}

// True if gradients are written in the type of the tensors, else in the type of the sums (which may be the same).
inline bool writes_narrow(Type type, const Attention& a, const AttentionGradients& g) {
  bool narrow = false;
  with_type(type, [&](auto number) {
    with_shape<decltype(number)>(a, {&g.output}, [&](auto shape) {
      narrow = decltype(shape)::kHeld && a.images <= decltype(shape)::kQueries;
    });
  });
  return narrow;
}

inline void attend_backward(Type type, const Attention& a, const AttentionGradients& g, bool narrow, Variants variants,
                            Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    with_shape<T>(a, {&g.output}, [&](auto shape) {
      using S = decltype(shape);
      constexpr int N = S::kChannels, Q = S::kQueries;
      const int lanes = lanes_of(a, N, Q);
      if constexpr (S::kHeld) {
        if (narrow && variants.one_pass) return launch_pairs(one_pass_backward_kernel<T, N, Q>, a, lanes, stream, g);
        if (narrow) return launch_pairs(attend_backward_kernel<T, T, N, Q, true>, a, lanes, stream, g);
      }
      if constexpr (!S::kHeld || Q == kManyQueries) {
        launch_pairs(attend_backward_kernel<T, Sum<T>, N, Q, S::kHeld>, a, lanes, stream, g);
      }
    });
  });
}

}  // namespace detr_bf::cuda
