// Multi-scale deformable attention on the GPU: code shared by its kernels.
//
// A row is one query and head: L x P samples of four corners, D channels. A group of 4 to 32 neighbouring lanes
// processes a row, each lane up to 16 bytes of channels of every corner, so that a corner of 32 float32 channels is one
// cache line. One lane computes the corners of a sample once and shares them with the group.
//
// A sample reads two neighbouring columns and rows of its level. Those outside the level are clamped into it.
// The bilinear weight of a column is the hat function of its distance (1 at the column, 0 a cell away), so a clamped
// column still gets the right weight, and a sample is one cell and two steps even at the border.
#pragma once

#include "device.cuh"

namespace detr_bf::cuda {

constexpr int kMaxLevels = 64;       // levels are passed as a kernel argument
constexpr int kMaxPoints = 1 << 15;  // level_of() is exact up to this number
constexpr int kMaxWidth = 1 << 23;   // of a level, see Corners::steps
constexpr int kThreads = 256;        // of a block
constexpr int kCorners = 4;          // top left, top right, bottom left, bottom right
constexpr int kMinLanes = 4;         // of a group

struct Level {
  int32_t height, width, start;
};

struct Sampling {
  int64_t images, cells, queries;
  int32_t heads, channels, levels, points;
  float inverse_points;
  const void* value;                  // (B, S, H, D), contiguous channels
  int64_t image_stride, head_stride;  // of value, in bytes
  uint32_t cell_stride;
  const void* locations;  // (B, Q, H, L, P, 2)
  const void* weights;    // (B, Q, H, L, P)
  Level level[kMaxLevels];

  __host__ __device__ int samples() const { return levels * points; }
};

// Assignment of rows to the threads of a grid of (heads, queries, images).
//
// A block takes neighbouring queries, which read the same cells, and as many heads as share a cache line.
struct Layout {
  int lane_bits, head_bits;  // log2 of the lanes in a group and of the heads in a block
  int64_t first_query, first_image;

  __host__ __device__ int lanes() const { return 1 << lane_bits; }
  __host__ __device__ int heads() const { return 1 << head_bits; }
  __host__ __device__ int queries() const { return kThreads >> lane_bits >> head_bits; }

  // For a launch: the number of blocks needed for all queries, and the first block and image.
  int64_t tiles(const Sampling& s) const { return (s.queries + queries() - 1) / queries(); }
  void start_at(int64_t tile, int64_t image) {
    first_query = tile * queries();
    first_image = image;
  }
};

constexpr int kPatchColumnBits = 3, kPatchColumns = 1 << kPatchColumnBits;

// Variant for queries that are the cells of the levels: a block takes a patch of neighbouring columns and lines of one
// level, whose samples share more cells than those of one line.
struct Patches : Layout {
  int line_bits;  // log2 of the lines of a patch
  int first_patch;

  __host__ __device__ int lines() const { return 1 << line_bits; }
  __host__ __device__ int columns_of(const Level& level) const {
    return (level.width + kPatchColumns - 1) >> kPatchColumnBits;
  }
  __host__ __device__ int patches_of(const Level& level) const {
    return columns_of(level) * ((level.height + lines() - 1) >> line_bits);
  }
  int64_t tiles(const Sampling& s) const {
    int64_t patches = 0;
    for (int l = 0; l < s.levels; ++l) patches += patches_of(s.level[l]);
    return patches;
  }
  void start_at(int64_t tile, int64_t image) {
    first_patch = static_cast<int>(tile);
    first_image = image;
  }
};

// The row of this thread. exists is false beyond the last row; these lanes still take part in every exchange.
//
// Its index is `first`, the same for the whole block, plus `offset`: most 64-bit arithmetic is done once per block.
struct Row {
  int lane, head, offset;
  int64_t image, first;
  bool exists;

  __device__ Row(const Sampling& s, const Layout& layout) {
    const int group = threadIdx.x >> layout.lane_bits, query = group >> layout.head_bits;
    const int64_t first_query = layout.first_query + static_cast<int64_t>(blockIdx.y) * layout.queries();
    lane = threadIdx.x & (layout.lanes() - 1);
    head = blockIdx.x * layout.heads() + (group & (layout.heads() - 1));
    image = layout.first_image + blockIdx.z;
    first = (image * s.queries + first_query) * s.heads;
    offset = query * s.heads + head;
    exists = head < s.heads && query < s.queries - first_query;
  }

  __device__ Row(const Sampling& s, const Patches& patches) {
    const int group = threadIdx.x >> patches.lane_bits, query = group >> patches.head_bits;
    int patch = patches.first_patch + blockIdx.y, l = 0;
    for (; patch >= patches.patches_of(s.level[l]); ++l) patch -= patches.patches_of(s.level[l]);
    const Level& level = s.level[l];
    const int columns = patches.columns_of(level);
    const int first_line = patch / columns << patches.line_bits, first_column = patch % columns * kPatchColumns;
    const int line = query >> kPatchColumnBits, column = query & (kPatchColumns - 1);
    lane = threadIdx.x & (patches.lanes() - 1);
    head = blockIdx.x * patches.heads() + (group & (patches.heads() - 1));
    image = patches.first_image + blockIdx.z;
    first = 0;
    const int query_of_image = level.start + (first_line + line) * level.width + first_column + column;
    exists = head < s.heads && line < level.height - first_line && column < level.width - first_column;
    offset = exists ? (static_cast<int>(image * s.queries) + query_of_image) * s.heads + head : -1;
  }

  // Its part of a tensor with `numbers` elements per row.
  template <class Number>
  __device__ Number* of(Number* tensor, int numbers) const {
    return tensor + first * numbers + static_cast<int64_t>(offset) * numbers;
  }
};

// ---- one axis ----

// Coordinate in cells, 0 = centre of the first. Far outside, infinity and NaN are clamped to just outside.
template <class A>
__device__ inline A place_of(A location, int size) {
  const A place = location * static_cast<A>(size) - static_cast<A>(0.5);
  return fmin(fmax(place, static_cast<A>(-2)), static_cast<A>(size));
}

template <class A>
__device__ inline A hat(A distance) {
  return fmax(static_cast<A>(0), static_cast<A>(1) - fabs(distance));
}

// True if a point at this distance from a column lies between it and a neighbouring column.
template <class A>
__device__ inline bool near(A distance) {
  return distance >= static_cast<A>(-1) && distance < static_cast<A>(1);
}

// Derivative of hat; at its kinks the right-hand derivative.
template <class A>
__device__ inline A slope(A distance) {
  const A rising = distance < static_cast<A>(0) ? static_cast<A>(1) : static_cast<A>(-1);
  return near(distance) ? rising : static_cast<A>(0);
}

// Position of a sample between two neighbouring columns, or rows.
template <class A>
struct Axis {
  int cell;            // the first of the two
  A distance[2];       // from each; large if there is no second

  __device__ Axis(A location, int size) {
    const A place = place_of(location, size);
    cell = max(min(static_cast<int>(floor(place)), size - 2), 0);
    distance[0] = place - static_cast<A>(cell);
    distance[1] = size > 1 ? distance[0] - static_cast<A>(1) : static_cast<A>(2);
  }
  __device__ A weight(int side) const { return hat(distance[side]); }
  __device__ A slope_of(int side) const { return slope(distance[side]); }
  __device__ uint32_t inside() const { return (near(distance[0]) ? 1u : 0u) | (near(distance[1]) ? 2u : 0u); }
};

// ---- one sample ----

// Raw values of a sample, so that a prefetch does not wait for them.
template <class T>
struct Sample {
  Sum<T> x = -2, y = -2;  // outside every level
  T unwidened_weight{};
  int level = 0;

  // NaN for a location that is not finite, which shows in the result.
  __device__ Sum<T> weight() const { return widen(unwidened_weight) + (x - x) + (y - y); }
};

// sample / points without a division; adding half a sample keeps the product away from integers.
__device__ inline int level_of(const Sampling& s, int sample) {
  return static_cast<int>((static_cast<float>(sample) + 0.5f) * s.inverse_points);
}

// The samples of one row that one lane prepares: its own index and every `lanes`-th after it.
template <class T>
struct Samples {
  const Sum<T>* location;
  const T* weight;
  uint32_t next, end;

  __device__ Samples(const Sampling& s, const Row& row)
      : location(row.of(static_cast<const Sum<T>*>(s.locations), 2 * s.samples()) + 2 * row.lane),
        weight(row.of(static_cast<const T*>(s.weights), s.samples()) + row.lane),
        next(row.lane),
        end(row.exists ? s.samples() : 0) {
    pin(location);
    pin(weight);
    pin(end);
  }

  __device__ Sample<T> take(const Sampling& s, int lanes) {
    Sample<T> sample;
    if (next < end) sample = {read(location), read(location + 1), read(weight), level_of(s, next)};
    next += lanes;
    location += 2 * lanes;
    weight += lanes;
    return sample;
  }
};

template <class A>
struct Bilinear {
  Axis<A> x, y;

  template <class T>
  __device__ Bilinear(const Sample<T>& sample, const Level& level)
      : x(sample.x, level.width), y(sample.y, level.height) {}
};

// A sample as shared with the group. Six words: an exchange costs as much as reading a cache line.
template <class A>
struct Corners {
  uint32_t cell;   // top left
  uint32_t steps;  // bits 0 to 3, and 4 to 7: the corners inside; bit 8: cells to the right; from bit 9: cells below
  A weights[kCorners];

  Corners() = default;
  // Computed twice, once to read a corner and once to use it: with one result the compiler would keep a predicate for
  // every corner, run out of predicates and wait for the first reads before it starts the others.
  __device__ bool inside(int corner) const { return steps & (1u << corner); }
  __device__ bool inside_again(int corner) const { return steps & (16u << corner); }
  __device__ uint32_t right() const { return steps >> 8 & 1; }
  __device__ uint32_t below() const { return steps >> 9; }
  __device__ void hide() { steps &= ~255u; }

  template <class T>
  __device__ Corners(const Sample<T>& sample, const Level& level) {
    const Bilinear<A> b(sample, level);
    const A weight = sample.weight();
    cell = level.start + b.y.cell * level.width + b.x.cell;
    const uint32_t columns = b.x.inside(), lines = b.y.inside();
    const uint32_t inside = (lines & 1 ? columns : 0) | (lines & 2 ? columns << 2 : 0);
    const uint32_t right = level.width > 1, below = level.height > 1 ? level.width : 0;
    const bool everywhere = weight != weight;
    steps = (everywhere ? 255u : inside * 17u) | right << 8 | below << 9;
#pragma unroll
    for (int corner = 0; corner < kCorners; ++corner) {
      weights[corner] = weight * b.y.weight(corner / 2) * b.x.weight(corner % 2);
    }
  }

  // The corners computed by another lane of the group.
  __device__ Corners of_lane(int lane, int lanes) const {
    Corners theirs;
    theirs.cell = shuffle(cell, lane, lanes);
    theirs.steps = shuffle(steps, lane, lanes);
#pragma unroll
    for (int corner = 0; corner < kCorners; ++corner) theirs.weights[corner] = shuffle(weights[corner], lane, lanes);
    return theirs;
  }
};

// Address of the cell `cells` further on.
template <class T>
__device__ inline T* cell_at(T* rows, uint32_t cells, uint32_t stride) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(rows) + static_cast<uint64_t>(cells) * stride);
}

// Channels of the four corners; `rows` points to cell 0, cells are `stride` bytes apart.
template <class T, class A>
__device__ inline void find(const Corners<A>& corners, T* rows, uint32_t stride, T* (&found)[kCorners]) {
  uint32_t right = corners.right();
  pin(right);  // one multiply-add a step; the compiler would use more instructions for a single bit
  const uint32_t below = corners.below();
  found[0] = cell_at(rows, corners.cell, stride);
  found[1] = cell_at(found[0], right, stride);
  found[2] = cell_at(found[0], below, stride);
  found[3] = cell_at(found[2], right, stride);
}

// Channels of one lane for the corners of K samples, [at, at + K) of those prepared by the group. All loads are issued
// before the first is used; corners outside the level are not read.
template <class T, int N, int K>
struct Visit {
  Corners<Sum<T>> corners[K];
  Packed<T, N> channels[K][kCorners];

  __device__ Visit(const Corners<Sum<T>>& ready, int at, int lanes, bool active, const T* rows, uint32_t stride) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      corners[k] = ready.of_lane(at + k, lanes);
      if (!active) corners[k].hide();
      const T* found[kCorners];
      find(corners[k], rows, stride, found);
#pragma unroll
      for (int corner = 0; corner < kCorners; ++corner) {
        if (corners[k].inside(corner)) channels[k][corner] = load<N>(found[corner]);
      }
    }
  }
};

}  // namespace detr_bf::cuda
