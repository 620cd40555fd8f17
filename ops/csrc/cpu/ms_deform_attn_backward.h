// Backward: the gradient of the output is added to the gradient of each corner row and multiplied with the row, one
// vector of channels at a time. The dot products of a vector of samples give gradients of locations and weights.
#pragma once

#include <cstring>

#include "rows.h"
#include "sampling.h"

namespace detr_bf::cpu {
namespace {

// Rows of one image and head, in the memory of the caller (type T) or packed (type A).
template <class R, class A>
struct Rows {
  const R* value;
  int64_t value_stride;
  A* gradient;
  int64_t gradient_stride;
};

// Partial dot products of the corners of a sample with the gradient of the output: products of channels, added to the
// smallest number of vectors that holds all four corners.
template <class A>
struct DotProducts {
  static constexpr int kFold = kLanes<A> < kCorners ? kLanes<A> : kCorners;
  static constexpr int kVectors = kCorners / kFold;  // of a sample
  Vec<A>* folded;

  static int64_t bytes(int64_t padded) { return Scratch::bytes<Vec<A>>(kQueriesTogether * kVectors * padded); }
  DotProducts(Scratch& scratch, int64_t padded) : folded(scratch.take<Vec<A>>(kQueriesTogether * kVectors * padded)) {
    std::memset(folded, 0, static_cast<size_t>(bytes(padded)));  // padding stays zero
  }
  DotProducts of_query(int64_t query, int64_t padded) const {
    DotProducts products = *this;
    products.folded += query * kVectors * padded;
    return products;
  }

  template <bool First>
  void add(int64_t sample, const Vec<A>* products) {
    for (int part = 0; part < kVectors; ++part) {
      const Vec<A> sums = sums_of<A, kFold>(products + part * kFold);
      Vec<A>& place = folded[sample * kVectors + part];
      place = First ? sums : place + sums;
    }
  }

  // Dot products of one vector of samples from `at` on: lane i of dots[corner] belongs to sample at + i.
  void finish(int64_t at, Vec<A>* dots) const {
    constexpr int count = kLanes<A> / kFold;
    Vec<A> by_sample[kCorners];  // concatenated: all corners of the first sample, all of the second, ...
    for (int part = 0; part < kCorners; ++part) {
      by_sample[part] = sums_of<A, count, kFold>(folded + at * kVectors + part * count);
    }
    const Vec<A> even_low = shuffle<EverySecond<0>, A>(by_sample[0], by_sample[1]);
    const Vec<A> even_high = shuffle<EverySecond<0>, A>(by_sample[2], by_sample[3]);
    const Vec<A> odd_low = shuffle<EverySecond<1>, A>(by_sample[0], by_sample[1]);
    const Vec<A> odd_high = shuffle<EverySecond<1>, A>(by_sample[2], by_sample[3]);
    dots[0] = shuffle<EverySecond<0>, A>(even_low, even_high);
    dots[1] = shuffle<EverySecond<0>, A>(odd_low, odd_high);
    dots[2] = shuffle<EverySecond<1>, A>(even_low, even_high);
    dots[3] = shuffle<EverySecond<1>, A>(odd_low, odd_high);
  }
};

// Adds the weighted gradient of the output, N vectors of channels, to the gradient of each corner row.
template <int N, class T, class A>
inline void spread(A* rows, int64_t stride, const Corners<A>& corners, int64_t count, const T* output) {
  Vec<A> gradient[N];
  for (int n = 0; n < N; ++n) gradient[n] = load<A>(output + n * kLanes<A>);
  for (int64_t sample = 0; sample < count; ++sample) {
    for (int corner = 0; corner < kCorners; ++corner) {
      const int64_t at = corner * corners.padded + sample;
      A* row = rows + corners.cells[at] * stride;
      const Vec<A> weight = broadcast<A>(corners.weights[at]);
      for (int n = 0; n < N; ++n) {
        const int64_t lane = n * kLanes<A>;
        store<A>(row + lane, load<A>(row + lane) + weight * gradient[n]);
      }
    }
  }
}

template <class T, class A>
inline void spread_tail(A* rows, int64_t stride, const Corners<A>& corners, int64_t count, const T* output,
                        int64_t left) {
  const Vec<A> gradient = load_first<A>(output, left);
  for (int64_t sample = 0; sample < count; ++sample) {
    for (int corner = 0; corner < kCorners; ++corner) {
      const int64_t at = corner * corners.padded + sample;
      A* row = rows + corners.cells[at] * stride;
      store_first<A>(row, load_first<A>(row, left) + corners.weights[at] * gradient, left);
    }
  }
}

// Adds the gradient of the output times each corner row to the dot products. First: true for the first channels.
template <int N, bool First, class R, class T, class A>
inline void multiply(const R* rows, int64_t stride, const Corners<A>& corners, int64_t count, const T* output,
                     DotProducts<A> dots) {
  Vec<A> gradient[N];
  for (int n = 0; n < N; ++n) gradient[n] = load<A>(output + n * kLanes<A>);
  for (int64_t sample = 0; sample < count; ++sample) {
    Vec<A> products[kCorners];
    for (int corner = 0; corner < kCorners; ++corner) {
      const R* row = rows + corners.cells[corner * corners.padded + sample] * stride;
      products[corner] = gradient[0] * load<A>(row);
      for (int n = 1; n < N; ++n) products[corner] += gradient[n] * load<A>(row + n * kLanes<A>);
    }
    dots.template add<First>(sample, products);
  }
}

template <bool First, class R, class T, class A>
inline void multiply_tail(const R* rows, int64_t stride, const Corners<A>& corners, int64_t count, const T* output,
                          int64_t left, DotProducts<A> dots) {
  const Vec<A> gradient = load_first<A>(output, left);
  for (int64_t sample = 0; sample < count; ++sample) {
    Vec<A> products[kCorners];
    for (int corner = 0; corner < kCorners; ++corner) {
      products[corner] =
          gradient * load_first<A>(rows + corners.cells[corner * corners.padded + sample] * stride, left);
    }
    dots.template add<First>(sample, products);
  }
}

// Gradients of a vector of samples from the dot products of their four corners with the output's gradient.
template <class T, class A>
inline void write_gradients(const Samples<T, A>& samples, const Vec<A>* dots, const Levels<A>& levels, int64_t at,
                            A* locations, A* weights) {
  const Axis<A>&x = samples.x, &y = samples.y;
  Vec<A> weight = {};
  for (int corner = 0; corner < kCorners; ++corner) weight += samples.share(corner) * dots[corner];
  const Vec<A> along_x = y.near_weight * (x.near_slope * dots[0] + x.far_slope * dots[1]) +
                         y.far_weight * (x.near_slope * dots[2] + x.far_slope * dots[3]);
  const Vec<A> along_y = x.near_weight * (y.near_slope * dots[0] + y.far_slope * dots[2]) +
                         x.far_weight * (y.near_slope * dots[1] + y.far_slope * dots[3]);
  const Vec<A> to_x = samples.weight * along_x * read<Vec<A>>(levels.width + at);
  const Vec<A> to_y = samples.weight * along_y * read<Vec<A>>(levels.height + at);
  const Vec<A> low = shuffle<Interleave<A, false>, A>(to_x, to_y), high = shuffle<Interleave<A, true>, A>(to_x, to_y);
  const int64_t left = levels.count - at;
  if (left >= kLanes<A>) {
    store<A>(weights + at, weight);
    store<A>(locations + 2 * at, low);
    store<A>(locations + 2 * at + kLanes<A>, high);
  } else {
    const int64_t in_low = 2 * left < kLanes<A> ? 2 * left : kLanes<A>;
    store_first<A>(weights + at, weight, left);
    store_first<A>(locations + 2 * at, low, in_low);
    store_first<A>(locations + 2 * at + in_low, high, 2 * left - in_low);
  }
}

// The queries of one image and head, for the given levels.
template <class R, class T, class A>
struct BackwardQueries {
  const Sampling& s;
  const SamplingGradients& g;
  const Rows<R, A>& rows;
  const Levels<A>& levels;
  const Corners<A> corners;
  const DotProducts<A> products;
  Samples<T, A>* const samples;

  BackwardQueries(const Sampling& s, const SamplingGradients& g, const Rows<R, A>& rows, const Levels<A>& levels,
                  Scratch& scratch)
      : s(s),
        g(g),
        rows(rows),
        levels(levels),
        corners(scratch, levels.padded),
        products(scratch, levels.padded),
        samples(scratch.take<Samples<T, A>>(kQueriesTogether * levels.padded / kLanes<A>)) {}

  void run(int64_t image, int64_t head) const {
    for (int64_t begin = 0; begin < s.queries; begin += kQueriesTogether) {
      const int64_t left = s.queries - begin, count = left < kQueriesTogether ? left : kQueriesTogether;
      const int64_t place = (image * s.queries + begin) * s.heads + head;
      for (int64_t query = 0; query < count; ++query) find_corners(query, place + query * s.heads);
      for (int64_t query = 0; query < count; ++query) {
        multiply_rows(query, place + query * s.heads);
        spread_to_rows(query, place + query * s.heads);
      }
      for (int64_t query = 0; query < count; ++query) finish(query, place + query * s.heads);
    }
  }

 private:
  // query: of the block; place: index of the query and head in the tensors.
  int64_t first_sample(int64_t place) const { return place * s.levels * s.points + levels.first; }
  const T* output(int64_t place) const { return static_cast<const T*>(g.output) + place * s.channels; }
  Samples<T, A>& kept(int64_t query, int64_t at) const { return samples[(query * levels.padded + at) / kLanes<A>]; }

  void find_corners(int64_t query, int64_t place) const {
    const A* locations = static_cast<const A*>(s.locations) + 2 * first_sample(place);
    const T* weights = static_cast<const T*>(s.weights) + first_sample(place);
    const Corners<A> of_query = corners.of_query(query);
    for (int64_t at = 0; at < levels.padded; at += kLanes<A>) {
      kept(query, at) = Samples<T, A>(locations, weights, levels, at);
      of_query.set(kept(query, at), levels, at);
    }
    const int64_t ahead = kQueriesTogether * s.heads;
    fetch(locations + ahead * 2 * s.levels * s.points);
    fetch(weights + ahead * s.levels * s.points);
    fetch(output(place + ahead));
    fetch(static_cast<A*>(g.locations) + 2 * first_sample(place));
    fetch(static_cast<A*>(g.weights) + first_sample(place));
  }

  void multiply_rows(int64_t query, int64_t place) const {
    const Corners<A> of_query = corners.of_query(query);
    const DotProducts<A> dots = products.of_query(query, levels.padded);
    const R* value = rows.value;
    const int64_t stride = rows.value_stride;
    bool started = false;
    over_channels<A>(
        s.channels,
        [&](auto vectors, int64_t at) {
          constexpr int N = decltype(vectors)::value;
          started ? multiply<N, false>(value + at, stride, of_query, levels.count, output(place) + at, dots)
                  : multiply<N, true>(value + at, stride, of_query, levels.count, output(place) + at, dots);
          started = true;
        },
        [&](int64_t at, int64_t left) {
          started ? multiply_tail<false>(value + at, stride, of_query, levels.count, output(place) + at, left, dots)
                  : multiply_tail<true>(value + at, stride, of_query, levels.count, output(place) + at, left, dots);
        });
  }

  void spread_to_rows(int64_t query, int64_t place) const {
    const Corners<A> of_query = corners.of_query(query);
    const int64_t stride = rows.gradient_stride;
    over_channels<A>(
        s.channels,
        [&](auto vectors, int64_t at) {
          spread<decltype(vectors)::value>(rows.gradient + at, stride, of_query, levels.count, output(place) + at);
        },
        [&](int64_t at, int64_t left) {
          spread_tail(rows.gradient + at, stride, of_query, levels.count, output(place) + at, left);
        });
  }

  void finish(int64_t query, int64_t place) const {
    for (int64_t at = 0; at < levels.padded; at += kLanes<A>) {
      Vec<A> dots[kCorners];
      products.of_query(query, levels.padded).finish(at, dots);
      write_gradients(kept(query, at), dots, levels, at, static_cast<A*>(g.locations) + 2 * first_sample(place),
                      static_cast<A*>(g.weights) + first_sample(place));
    }
  }
};

template <class T, class A>
struct Backward {
  const Sampling& s;
  const SamplingGradients& g;

  int64_t scratch_bytes() const {
    const int64_t samples = s.levels * s.points, padded = round_up(samples, kLanes<A>);
    return Levels<A>::bytes(samples) + Corners<A>::bytes(padded) + DotProducts<A>::bytes(padded) +
           Scratch::bytes<Samples<T, A>>(kQueriesTogether * padded / kLanes<A>) +
           Scratch::bytes<A>(2 * span(s, 0, s.levels) * s.channels);
  }

  void run(Scratch& scratch, int64_t image, int64_t head, int64_t level_begin, int64_t level_end) const {
    const Levels<A> levels(scratch, s, level_begin, level_end);
    const int64_t origin = s.level_start_index[level_begin], cells = span(s, level_begin, level_end);
    const T* value = static_cast<const T*>(s.value) + image * s.image_stride + head * s.head_stride +
                     origin * s.cell_stride;
    A* gradient = static_cast<A*>(g.value) + ((image * s.cells + origin) * s.heads + head) * s.channels;
    const int64_t gradient_stride = s.heads * s.channels;
    if (!g.packed) {
      const Rows<T, A> rows{value, s.cell_stride, gradient, gradient_stride};
      BackwardQueries<T, T, A>(s, g, rows, levels, scratch).run(image, head);
      return;
    }
    // A row of value and its gradient are adjacent: half as many pages to look up.
    const int64_t stride = 2 * s.channels;
    A* packed = scratch.take<A>(cells * stride);
    std::memset(packed, 0, static_cast<size_t>(cells * stride) * sizeof(A));
    copy_rows<A>(value, s.cell_stride, packed, stride, cells, s.channels);
    const Rows<A, A> rows{packed, stride, packed + s.channels, stride};
    BackwardQueries<A, T, A>(s, g, rows, levels, scratch).run(image, head);
    copy_rows<A>(packed + s.channels, stride, gradient, gradient_stride, cells, s.channels);
  }
};

template <class T, class A>
void backward(const Sampling& s, const SamplingGradients& g, bool by_level, int64_t begin, int64_t end) {
  const Backward<T, A> pass{s, g};
  Scratch scratch(pass.scratch_bytes());
  for (int64_t task = begin; task < end; ++task) {
    scratch.clear();
    const int64_t place = by_level ? task / s.levels : task, level = by_level ? task % s.levels : 0;
    pass.run(scratch, place / s.heads, place % s.heads, level, by_level ? level + 1 : s.levels);
  }
}

}  // namespace
}  // namespace detr_bf::cpu
