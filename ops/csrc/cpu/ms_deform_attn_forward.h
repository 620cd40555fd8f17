// Forward: weighted sum of the corner rows (D channels) of each query and head, a vector of channels at a time.
#pragma once

#include "rows.h"
#include "sampling.h"

namespace detr_bf::cpu {
namespace {

// N vectors of channels of the weighted sum of all corner rows.
template <int N, class T, class A>
inline void add_up(const T* rows, int64_t stride, const Corners<A>& corners, int64_t count, T* out) {
  Vec<A> sums[kCorners][N] = {};  // independent sums for each corner
  for (int64_t sample = 0; sample < count; ++sample) {
    for (int corner = 0; corner < kCorners; ++corner) {
      const int64_t at = corner * corners.padded + sample;
      const T* row = rows + corners.cells[at] * stride;
      for (int n = 0; n < N; ++n) sums[corner][n] += corners.weights[at] * load<A>(row + n * kLanes<A>);
    }
  }
  for (int n = 0; n < N; ++n) store<A>(out + n * kLanes<A>, (sums[0][n] + sums[1][n]) + (sums[2][n] + sums[3][n]));
}

template <class T, class A>
inline void add_up_tail(const T* rows, int64_t stride, const Corners<A>& corners, int64_t count, T* out, int64_t left) {
  Vec<A> sum = {};
  for (int64_t sample = 0; sample < count; ++sample) {
    for (int corner = 0; corner < kCorners; ++corner) {
      const int64_t at = corner * corners.padded + sample;
      sum += corners.weights[at] * load_first<A>(rows + corners.cells[at] * stride, left);
    }
  }
  store_first<A>(out, sum, left);
}

template <class T, class A>
struct Forward {
  const Sampling& s;
  T* output;

  int64_t scratch_bytes() const {
    const int64_t samples = s.levels * s.points, padded = round_up(samples, kLanes<A>);
    return Levels<A>::bytes(samples) + Corners<A>::bytes(padded) +
           Scratch::bytes<T>(span(s, 0, s.levels) * s.channels);
  }

  // Queries [begin, end) of one image and head.
  void run(Scratch& scratch, int64_t image, int64_t head, int64_t begin, int64_t end) const {
    const Levels<A> levels(scratch, s, 0, s.levels);
    const Corners<A> corners(scratch, levels.padded);
    const T* rows = static_cast<const T*>(s.value) + image * s.image_stride + head * s.head_stride +
                    s.level_start_index[0] * s.cell_stride;
    int64_t stride = s.cell_stride;
    const int64_t cells = span(s, 0, s.levels);
    if (pays_to_pack(s, end - begin)) {
      T* packed = scratch.take<T>(cells * s.channels);
      copy_rows<A>(rows, stride, packed, s.channels, cells, s.channels);
      rows = packed;
      stride = s.channels;
    }
    for (; begin < end; begin += kQueriesTogether) {
      const int64_t count = end - begin < kQueriesTogether ? end - begin : kQueriesTogether;
      const int64_t first = (image * s.queries + begin) * s.heads + head;
      for (int64_t query = 0; query < count; ++query) {
        find_corners(first + query * s.heads, levels, corners.of_query(query));
      }
      for (int64_t query = 0; query < count; ++query) {
        sum_rows(first + query * s.heads, rows, stride, levels, corners.of_query(query));
      }
    }
  }

 private:
  // place: index of the query and head.
  void find_corners(int64_t place, const Levels<A>& levels, const Corners<A>& corners) const {
    const A* locations = static_cast<const A*>(s.locations) + place * levels.count * 2;
    const T* weights = static_cast<const T*>(s.weights) + place * levels.count;
    for (int64_t at = 0; at < levels.count; at += kLanes<A>) {
      corners.set(Samples<T, A>(locations, weights, levels, at), levels, at);
    }
    const int64_t ahead = kQueriesTogether * s.heads * levels.count;
    fetch(locations + 2 * ahead);
    fetch(weights + ahead);
    fetch(output + place * s.channels);
  }

  void sum_rows(int64_t place, const T* rows, int64_t stride, const Levels<A>& levels,
                const Corners<A>& corners) const {
    T* out = output + place * s.channels;
    over_channels<A>(
        s.channels,
        [&](auto vectors, int64_t channel) {
          add_up<decltype(vectors)::value>(rows + channel, stride, corners, levels.count, out + channel);
        },
        [&](int64_t channel, int64_t left) {
          add_up_tail(rows + channel, stride, corners, levels.count, out + channel, left);
        });
  }
};

template <class T, class A>
void forward(const Sampling& s, T* output, int64_t begin, int64_t end) {
  const Forward<T, A> pass{s, output};
  Scratch scratch(pass.scratch_bytes());
  while (begin < end) {
    const int64_t pair = begin / s.queries, first = pair * s.queries, last = first + s.queries,
                  stop = end < last ? end : last;
    scratch.clear();
    pass.run(scratch, pair / s.heads, pair % s.heads, begin - first, stop - first);
    begin = stop;
  }
}

}  // namespace
}  // namespace detr_bf::cpu
