// The two kinds of products in batch attention: dot products of rows and weighted sums of rows.
//
// A block of positions is processed at once. Its lanes are (position, head, query), query fastest. A table has a line
// per key with one number per lane, so a softmax over the keys needs no sums across a vector, and even a few queries
// fill a vector.
#pragma once

#include <cstring>

#include "batch_attention.h"
#include "batch_attention_rows.h"
#include "blocks.h"
#include "simd.h"

namespace detr_bf::cpu {
namespace {

constexpr int64_t kLanesOfBlock = 64;  // approximate
constexpr int kVectorsTogether = kVectorBytes == 64 ? 4 : 2;  // of channels: the sums take half of the registers

// Calls step(Count, at) for groups of images: keys that share one load of a query, or results that share one of a
// summand. With half precision not for three, so that the compiler inlines the step for four.
template <class T, class A, class Step>
inline void in_groups(int64_t images, Step&& step) {
  if constexpr (sizeof(T) < sizeof(A)) {
    in_blocks<4>(0, images, step);
  } else {
    in_fours(images, step);
  }
}

struct Lane {
  int64_t position, head, query;
};

// Positions [position, position + positions) of a call.
struct Block {
  int64_t images, heads, channels;
  int64_t position, positions;
  int64_t line;       // distance between lines of a table, whole vectors
  const Lane* places;  // of each lane, positions relative to the block

  int64_t lanes() const { return positions * heads * images; }
};

inline int64_t positions_together(const BatchAttention& b) {
  return (kLanesOfBlock + b.heads * b.images - 1) / (b.heads * b.images);
}

inline void list_lanes(const BatchAttention& b, int64_t positions, Lane* places) {
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t head = 0; head < b.heads; ++head) {
      for (int64_t query = 0; query < b.images; ++query) *places++ = {position, head, query};
    }
  }
}

// For K keys: products of the channels of key and query, added to vectors whose lane sums are the dot products; written
// kLanes apart.
template <int K, class T, class A>
inline void multiply(const T* query, const T* keys, int64_t key_stride, int64_t channels, Vec<A>* products) {
  constexpr int lanes = kLanes<A>;
  Vec<A> sums[K] = {};
  int64_t channel = 0;
  for (; channel + lanes <= channels; channel += lanes) {
    const Vec<A> of_query = load<A>(query + channel);
    for (int k = 0; k < K; ++k) sums[k] += of_query * load<A>(keys + k * key_stride + channel);
  }
  for (int k = 0; k < K; ++k) products[k * lanes] = sums[k];
  if (channel < channels) {
    const Vec<A> of_query = load_first<A>(query + channel, channels - channel);
    for (int k = 0; k < K; ++k) {
      products[k * lanes] += of_query * load_first<A>(keys + k * key_stride + channel, channels - channel);
    }
  }
}

// table(key, lane) = dot product of the lane's row of `queries` and the key's row of `keys`.
template <class T, class A, class Ahead>
void dot_products(const Block& b, const TypedRows<T>& queries, const TypedRows<T>& keys, A* table, Ahead& ahead) {
  for (int64_t first = 0; first < b.lanes(); first += kLanes<A>) {
    const int64_t left = b.lanes() - first, count = left < kLanes<A> ? left : kLanes<A>;
    const T *query[kLanes<A>], *key[kLanes<A>];
    for (int64_t lane = 0; lane < count; ++lane) {
      const Lane& place = b.places[first + lane];
      query[lane] = queries.at(place.query, b.position + place.position, place.head);
      key[lane] = keys.at(0, b.position + place.position, place.head);
      ahead.request();
    }
    in_groups<T, A>(b.images, [&](auto together, int64_t at) {
      constexpr int K = decltype(together)::value;
      Vec<A> products[K * kLanes<A>];
      if (count < kLanes<A>) std::memset(products, 0, sizeof(products));
      for (int64_t lane = 0; lane < count; ++lane) {
        const T* rows = key[lane] + at * keys.image_stride;
        multiply<K, T, A>(query[lane], rows, keys.image_stride, b.channels, products + lane);
      }
      for (int k = 0; k < K; ++k) store<A>(table + (at + k) * b.line + first, sums_of<A>(products + k * kLanes<A>));
    });
  }
}

// Weights of R results for each of `count` rows.
template <class A>
struct Weights {
  const A* first;
  int64_t result_stride, row_stride;

  A of(int64_t result, int64_t row) const { return first[result * result_stride + row * row_stride]; }
};

template <int R, int N, class T, class A>
inline void add_up_rows(const Weights<A>& weights, const T* rows, int64_t row_stride, int64_t count, T* results,
                        int64_t result_stride, bool streams) {
  constexpr int lanes = kLanes<A>;
  Vec<A> sums[R][N] = {};
  for (int64_t row = 0; row < count; ++row) {
    Vec<A> channels[N];
    for (int n = 0; n < N; ++n) channels[n] = load<A>(rows + row * row_stride + n * lanes);
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n] += weights.of(r, row) * channels[n];
    }
  }
  if (kStreams<T, A> && streams) {
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) stream<A>(results + r * result_stride + n * lanes, sums[r][n]);
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) store<A>(results + r * result_stride + n * lanes, sums[r][n]);
  }
}

template <int R, class T, class A>
inline void add_up_tail(const Weights<A>& weights, const T* rows, int64_t row_stride, int64_t count, T* results,
                        int64_t result_stride, int64_t channels) {
  Vec<A> sums[R] = {};
  for (int64_t row = 0; row < count; ++row) {
    const Vec<A> of_row = load_first<A>(rows + row * row_stride, channels);
    for (int r = 0; r < R; ++r) sums[r] += weights.of(r, row) * of_row;
  }
  for (int r = 0; r < R; ++r) store_first<A>(results + r * result_stride, sums[r], channels);
}

// Results of all images for one position and head: see weighted_sums.
template <class T, class A>
inline void sums_of_pair(const Block& b, const Weights<A>& first, const T* from, int64_t row_stride, T* to,
                         int64_t result_stride, bool streams) {
  const int64_t whole = b.channels / kLanes<A> * kLanes<A>;
  in_groups<T, A>(b.images, [&](auto together, int64_t result) {
    constexpr int R = decltype(together)::value;
    Weights<A> weights = first;
    weights.first += result * weights.result_stride;
    T* results = to + result * result_stride;
    in_blocks<kVectorsTogether>(0, whole / kLanes<A>, [&](auto vectors, int64_t vector) {
      const int64_t channel = vector * kLanes<A>;
      add_up_rows<R, decltype(vectors)::value, T, A>(weights, from + channel, row_stride, b.images, results + channel,
                                                     result_stride, streams);
    });
    if (whole < b.channels) {
      add_up_tail<R, T, A>(weights, from + whole, row_stride, b.images, results + whole, result_stride,
                           b.channels - whole);
    }
  });
}

// Results of all images for each position and head: sum over rows of table(row, result) x row, or of
// table(result, row) x row if by_key.
template <class T, class A, class Ahead>
void weighted_sums(const Block& b, const A* table, bool by_key, const TypedRows<T>& rows, const TypedRows<T>& results,
                   bool streams, Ahead& ahead) {
  Weights<A> weights{table, by_key ? b.line : 1, by_key ? 1 : b.line};
  for (int64_t position = b.position; position < b.position + b.positions; ++position) {
    for (int64_t head = 0; head < b.heads; ++head, weights.first += b.images) {
      for (int64_t image = 0; image < b.images; ++image) ahead.request();
      sums_of_pair<T, A>(b, weights, rows.at(0, position, head), rows.image_stride, results.at(0, position, head),
                         results.image_stride, streams);
    }
  }
}

}  // namespace
}  // namespace detr_bf::cpu
