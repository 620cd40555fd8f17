// Cells and weights of sampling locations, for a vector of samples at once.
//
// A query and head has n = L x P samples of four corners each. Values that depend on the sample alone (cells, bilinear
// weights, their derivatives) are computed here. A corner outside the level gets a cell inside it and weight zero: no
// branches.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ms_deform_attn.h"
#include "scratch.h"
#include "simd.h"

namespace detr_bf::cpu {
namespace {

constexpr int kCorners = 4;  // top left, top right, bottom left, bottom right
// Corners of this many queries are computed before their rows are read, so that the queries do not wait for each other.
constexpr int64_t kQueriesTogether = 8;

// Level data of the samples of a query, one lane per sample, padded to whole vectors.
template <class A>
struct Levels {
  int64_t first, count, padded;  // samples of a query, from the first level of the task
  A *width, *height;
  Int<A>*columns, *lines, *start;

  static int64_t bytes(int64_t count) {
    const int64_t padded = round_up(count, kLanes<A>);
    return 2 * Scratch::bytes<A>(padded) + 3 * Scratch::bytes<Int<A>>(padded);
  }

  Levels(Scratch& scratch, const Sampling& s, int64_t level_begin, int64_t level_end)
      : first(level_begin * s.points), count((level_end - level_begin) * s.points), padded(round_up(count, kLanes<A>)) {
    width = scratch.take<A>(padded);
    height = scratch.take<A>(padded);
    columns = scratch.take<Int<A>>(padded);
    lines = scratch.take<Int<A>>(padded);
    start = scratch.take<Int<A>>(padded);
    const int64_t origin = s.level_start_index[level_begin];
    for (int64_t sample = 0; sample < padded; ++sample) {
      const int64_t level = sample < count ? level_begin + sample / s.points : level_begin;
      lines[sample] = static_cast<Int<A>>(s.spatial_shapes[2 * level]);
      columns[sample] = static_cast<Int<A>>(s.spatial_shapes[2 * level + 1]);
      start[sample] = static_cast<Int<A>>(s.level_start_index[level] - origin);
      height[sample] = static_cast<A>(lines[sample]);
      width[sample] = static_cast<A>(columns[sample]);
    }
  }
};

// The two neighbours of a coordinate along one axis, for a vector of samples.
template <class A>
struct Axis {
  Vec<Int<A>> near, far;          // clamped into the level
  Vec<A> near_weight, far_weight;  // zero outside
  Vec<A> near_slope, far_slope;    // derivatives of the weights by the coordinate in cells: -1 and 1, zero outside

  Axis(Vec<A> location, Vec<A> size, Vec<Int<A>> cells) {
    const Vec<A> low = broadcast<A>(-2), high = size + 1;  // beyond these both neighbours are outside
    Vec<A> place = location * size - static_cast<A>(0.5);
    place = select<A>(place > low, place, low);  // NaN becomes low
    place = select<A>(place < high, place, high);
    Vec<Int<A>> floor = __builtin_convertvector(place, Vec<Int<A>>);
    floor += __builtin_convertvector(floor, Vec<A>) > place;  // true is -1
    const Vec<A> fraction = place - __builtin_convertvector(floor, Vec<A>);
    const Vec<Int<A>> next = floor + 1, zero = {}, last = cells - 1;
    const Vec<Int<A>> near_inside = (floor >= zero) & (floor <= last);
    const Vec<Int<A>> far_inside = (next >= zero) & (next <= last);
    near = clamp(floor, zero, last);
    far = clamp(next, zero, last);
    near_weight = select<A>(near_inside, 1 - fraction, Vec<A>{});
    far_weight = select<A>(far_inside, fraction, Vec<A>{});
    near_slope = select<A>(near_inside, broadcast<A>(-1), Vec<A>{});
    far_slope = select<A>(far_inside, broadcast<A>(1), Vec<A>{});
  }

 private:
  static Vec<Int<A>> clamp(Vec<Int<A>> number, Vec<Int<A>> low, Vec<Int<A>> high) {
    number = number > low ? number : low;
    return number < high ? number : high;
  }
};

// A vector of samples of one query and head.
template <class T, class A>
struct Samples {
  Vec<A> weight;
  Axis<A> x, y;

  Samples(const A* locations, const T* weights, const Levels<A>& levels, int64_t at)
      : Samples(Loaded(locations, weights, levels, at), levels, at) {}

  Vec<A> share(int corner) const {
    return (corner < 2 ? y.near_weight : y.far_weight) * (corner % 2 ? x.far_weight : x.near_weight);
  }
  Vec<Int<A>> cell(int corner, const Levels<A>& levels, int64_t at) const {
    const auto columns = read<Vec<Int<A>>>(levels.columns + at), start = read<Vec<Int<A>>>(levels.start + at);
    return start + (corner < 2 ? y.near : y.far) * columns + (corner % 2 ? x.far : x.near);
  }

 private:
  struct Loaded {
    Vec<A> weight, x, y;

    Loaded(const A* locations, const T* weights, const Levels<A>& levels, int64_t at) {
      const int64_t left = levels.count - at;
      Vec<A> low, high;
      if (left >= kLanes<A>) {
        weight = load<A>(weights + at);
        low = load<A>(locations + 2 * at);
        high = load<A>(locations + 2 * at + kLanes<A>);
      } else {
        weight = load_first<A>(weights + at, left);
        const int64_t in_low = 2 * left < kLanes<A> ? 2 * left : kLanes<A>;
        low = load_first<A>(locations + 2 * at, in_low);
        high = load_first<A>(locations + 2 * at + in_low, 2 * left - in_low);
      }
      x = shuffle<EverySecond<0>, A>(low, high);
      y = shuffle<EverySecond<1>, A>(low, high);
      const Vec<A> not_finite = (x - x) + (y - y);  // NaN or zero: non-finite locations show in the result
      weight = select<A>(not_finite == not_finite, weight, not_finite);
    }
  };

  Samples(const Loaded& loaded, const Levels<A>& levels, int64_t at)
      : weight(loaded.weight),
        x(loaded.x, read<Vec<A>>(levels.width + at), read<Vec<Int<A>>>(levels.columns + at)),
        y(loaded.y, read<Vec<A>>(levels.height + at), read<Vec<Int<A>>>(levels.lines + at)) {}
};

// Cells and weights of all corners of all samples of some queries, query by query and corner by corner.
template <class A>
struct Corners {
  int64_t padded;
  Int<A>* cells;
  A* weights;

  static int64_t bytes(int64_t padded) {
    return Scratch::bytes<Int<A>>(kQueriesTogether * kCorners * padded) +
           Scratch::bytes<A>(kQueriesTogether * kCorners * padded);
  }
  Corners(Scratch& scratch, int64_t padded)
      : padded(padded),
        cells(scratch.take<Int<A>>(kQueriesTogether * kCorners * padded)),
        weights(scratch.take<A>(kQueriesTogether * kCorners * padded)) {}

  Corners of_query(int64_t query) const {
    Corners corners = *this;
    corners.cells += query * kCorners * padded;
    corners.weights += query * kCorners * padded;
    return corners;
  }
  template <class T>
  void set(const Samples<T, A>& samples, const Levels<A>& levels, int64_t at) const {
    for (int corner = 0; corner < kCorners; ++corner) {
      store<Int<A>>(cells + corner * padded + at, samples.cell(corner, levels, at));
      store<A>(weights + corner * padded + at, samples.weight * samples.share(corner));
    }
  }
};

// Calls step<N>(channel) for whole groups of N vectors of channels, then tail(channel, count) for the rest.
template <class A, class Whole, class Tail>
inline void over_channels(int64_t channels, Whole&& whole, Tail&& tail) {
  constexpr int lanes = kLanes<A>;
  int64_t channel = 0;
  for (; channel + 4 * lanes <= channels; channel += 4 * lanes) whole(std::integral_constant<int, 4>{}, channel);
  for (; channel + 2 * lanes <= channels; channel += 2 * lanes) whole(std::integral_constant<int, 2>{}, channel);
  for (; channel + lanes <= channels; channel += lanes) whole(std::integral_constant<int, 1>{}, channel);
  if (channel < channels) tail(channel, channels - channel);
}

}  // namespace
}  // namespace detr_bf::cpu
