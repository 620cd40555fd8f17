// Kernel selection from run-time types and sizes: channels per load, lanes per group.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "ms_deform_attn_backward.cuh"
#include "ms_deform_attn_forward.cuh"
#include "ms_deform_attn_gather.cuh"
#include "types.cuh"
#include "variants.cuh"

namespace detr_bf::cuda {

#ifndef DETR_BF_MAX_GRID  // small in tests
#define DETR_BF_MAX_GRID 65535
#endif
constexpr int64_t kMaxGrid = DETR_BF_MAX_GRID;  // in its second and third dimension
constexpr int kLineBytes = 128;      // of the cache
constexpr int kAccessBytes = 16;     // largest load of one lane

// Calls body with the number of channels per load: 16 bytes of them if alignment permits, else one.
template <class T, class Body>
void with_width(const Sampling& s, std::initializer_list<const void*> rows, Body body) {
  constexpr int wide = kAccessBytes / sizeof(T);
  auto places = static_cast<uint64_t>(s.image_stride) | static_cast<uint64_t>(s.head_stride) | s.cell_stride;
  places |= reinterpret_cast<uintptr_t>(s.value);
  for (const void* row : rows) places |= reinterpret_cast<uintptr_t>(row);
  if (s.channels % wide == 0 && places % kAccessBytes == 0) {
    body(std::integral_constant<int, wide>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

// Exponent of the smallest power of two that is not below the number.
inline int bits_of(int64_t number) {
  int bits = 0;
  while (int64_t{1} << bits < number) ++bits;
  return bits;
}

// Lanes of a group that reads `width` channels a lane: enough for all of them, up to a warp.
inline int lane_bits_of(const Sampling& s, int width) {
  return std::clamp(bits_of(ceil_div(s.channels, width)), bits_of(kMinLanes), bits_of(kWarp));
}

template <class T>
Layout layout_of(const Sampling& s, int width) {
  const int lane_bits = lane_bits_of(s, width);
  const int64_t in_a_line = kLineBytes / (s.channels * static_cast<int64_t>(sizeof(T)));
  const int64_t heads = std::max<int64_t>(std::min<int64_t>({in_a_line, s.heads, kThreads >> lane_bits}), 1);
  return {lane_bits, bits_of(heads + 1) - 1, 0, 0};
}

constexpr int kFewestPatchQueries = 16;

// True if the queries are the cells of the levels, which follow one another, and blocks are large enough for patches.
inline bool in_patches(const Sampling& s, const Layout& layout) {
  int64_t cells = 0, widest = 0;
  for (int l = 0; l < s.levels; ++l) {
    if (s.level[l].start != cells) return false;
    cells += static_cast<int64_t>(s.level[l].height) * s.level[l].width;
    widest = std::max<int64_t>(widest, s.level[l].width);
  }
  const int64_t lines = layout.queries() >> kPatchColumnBits;
  const int64_t rows = (s.images * s.queries + lines * widest) * s.heads;  // Row::offset is smaller
  return s.queries == cells && layout.queries() >= kFewestPatchQueries && rows <= std::numeric_limits<int32_t>::max();
}

// Calls body with the assignment of queries to blocks. Patches only for rows that are read 16 bytes at once.
template <class T, int N, class Body>
void with_layout(const Sampling& s, bool tiles, Body body) {
  const Layout layout = layout_of<T>(s, N);
  if constexpr (N > 1 && sizeof(T) < sizeof(double)) {
    if (tiles && in_patches(s, layout)) {
      return body(Patches{layout, bits_of(layout.queries()) - kPatchColumnBits, 0});
    }
  }
  body(layout);
}

// A grid covers kMaxGrid images and kMaxGrid tiles of queries; more of them take several launches.
template <class Kernel, class L, class... Arguments>
void launch_rows(Kernel kernel, const Sampling& s, L layout, Stream stream, Arguments... arguments) {
  const int64_t tiles = layout.tiles(s);
  for (int64_t image = 0; image < s.images; image += kMaxGrid) {
    for (int64_t tile = 0; tile < tiles; tile += kMaxGrid) {
      layout.start_at(tile, image);
      const Grid grid(ceil_div(s.heads, layout.heads()), std::min(tiles - tile, kMaxGrid),
                      std::min(s.images - image, kMaxGrid));
      launch(kernel, grid, kThreads, stream, s, layout, arguments...);
    }
  }
}

inline void forward(Type type, const Sampling& s, void* output, Variants variants, Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    with_width<T>(s, {output}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      with_layout<T, N>(s, variants.tiles, [&](auto layout) {
        launch_rows(forward_kernel<T, N, decltype(layout)>, s, layout, stream, static_cast<T*>(output));
      });
    });
  });
}

// Gradients of one backward pass; value and locations in the precision of sums, the others in that of value.
struct GradientTensors {
  const void* output;
  void *value, *locations, *weights;  // value: zeros on entry; null to skip it
  bool narrow = false;                // the gradient of value has the type of value
};

// True if the variant half_atomics applies: the gradient of value can have the type of value.
inline bool adds_narrow(Type type, const Sampling& s, const void* grad_output, Variants variants) {
  bool narrow = false;
  with_type(type, [&](auto number) {
    using T = decltype(number);
    with_width<T>(s, {grad_output}, [&](auto width) { narrow = sizeof(T) == 2 && decltype(width)::value > 1; });
  });
  return variants.half_atomics && narrow;
}

inline void backward(Type type, const Sampling& s, const GradientTensors& tensors, Variants variants, Stream stream) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    const Gradients<T> gradients{static_cast<const T*>(tensors.output), tensors.value,
                                 static_cast<Sum<T>*>(tensors.locations), static_cast<T*>(tensors.weights)};
    with_width<T>(s, {tensors.output, tensors.value}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      if (!tensors.value) {
        return launch_rows(backward_kernel<T, N, false, Sum<T>, Layout>, s, layout_of<T>(s, N), stream, gradients);
      }
      with_layout<T, N>(s, variants.tiles, [&](auto layout) {
        using L = decltype(layout);
        if constexpr (sizeof(T) == 2 && N > 1) {
          if (tensors.narrow) return launch_rows(backward_kernel<T, N, true, T, L>, s, layout, stream, gradients);
        }
        launch_rows(backward_kernel<T, N, true, Sum<T>, L>, s, layout, stream, gradients);
      });
    });
  });
}

// ---- deterministic gradient of value ----

// Number of (image, head) pairs with at most `most_entries` entries together; at least one.
inline int64_t pairs_together(const Sampling& s, int64_t most_entries) {
  const int64_t entries = s.queries * s.samples();
  const int64_t by_keys = std::numeric_limits<int32_t>::max() / s.cells;
  const int64_t pairs = std::min({most_entries / std::max<int64_t>(entries, 1), by_keys, kMaxGrid});
  return std::max<int64_t>(pairs, 1);
}

// sort(n, write_keys) allocates n int32, fills them with write_keys(memory) and sorts them stably; it returns an object
// with keys() and order(), the old index of each key.
template <class Sort>
void gather(Type type, const Sampling& s, const void* grad_output, void* grad_value, int64_t most_entries,
            Stream stream, Sort sort) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    const int64_t pairs = s.images * s.heads, together = pairs_together(s, most_entries);
    for (int64_t pair = 0; pair < pairs; pair += together) {
      const Chunk chunk{pair, static_cast<int32_t>(std::min(together, pairs - pair)),
                        static_cast<int32_t>(s.queries * s.samples())};
      const auto sorted = sort(chunk.entries(), [&](int32_t* keys) {
        launch(key_kernel<T>, Grid(ceil_div(chunk.entries(), kThreads)), kThreads, stream, s, chunk, keys);
      });
      with_width<T>(s, {grad_output, grad_value}, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const Grid grid(ceil_div(s.cells, kGatherWarps), chunk.pairs);
        launch(gather_kernel<T, N>, grid, kThreads, stream, s, chunk, 1 << lane_bits_of(s, N), sorted.keys(),
               sorted.order(), static_cast<const T*>(grad_output), static_cast<T*>(grad_value));
      });
    }
  });
}

}  // namespace detr_bf::cuda
