// Batch attention for the instruction set this file is compiled for.
#pragma once

#include "batch_attention_products.h"
#include "exponential.h"
#include "random_vectors.h"
#include "scratch.h"
#include "types.h"

namespace detr_bf::cpu {
namespace {

// The random numbers of dropout, for the tables of several blocks at once: 128 elements are drawn together, which is
// more than a line of a table has.
class Numbers {
 public:
  explicit Numbers(const BatchAttention& b)
      : b_(b),
        lanes_(b.heads * b.images),
        positions_(round_up(positions_of(b), positions_together(b))),
        stride_(round_up(positions_ * lanes_, kElementsOfBlock) + 2 * kElementsOfBlock) {}

  int64_t count() const { return b_.images * stride_; }
  void keep_in(uint16_t* numbers) { numbers_ = numbers; }

  // Those of a line of the table of a block. Blocks must come in order.
  const uint16_t* of_line(const Block& block, int64_t key) {
    if (block.position >= end_) draw(block.position);
    return numbers_ + key * stride_ + element(key, block.position) - first_block(key) * kElementsOfBlock;
  }

 private:
  // About 8 KiB of numbers for a few images.
  static int64_t positions_of(const BatchAttention& b) { return 4096 / (b.images * b.images * b.heads) + 1; }
  // The elements of a call are numbered by key, position, head and query.
  int64_t element(int64_t key, int64_t position) const { return (key * b_.positions + position) * lanes_; }
  int64_t first_block(int64_t key) const { return element(key, begin_) / kElementsOfBlock; }

  void draw(int64_t position) {
    begin_ = position;
    end_ = position + positions_ < b_.positions ? position + positions_ : b_.positions;
    for (int64_t key = 0; key < b_.images; ++key) {
      const int64_t first = first_block(key), last = (element(key, end_) - 1) / kElementsOfBlock;
      random_numbers(b_.seed, first, last - first + 1, numbers_ + key * stride_);
    }
  }

  const BatchAttention& b_;
  const int64_t lanes_, positions_, stride_;
  int64_t begin_ = 0, end_ = 0;
  uint16_t* numbers_ = nullptr;
};

// The tables of one call and its blocks.
template <class A>
class Tables {
 public:
  Tables(const BatchAttention& b, int count)
      : b_(b),
        line_(round_up(positions_together(b) * b.heads * b.images, kLanes<A>)),
        numbers_(b),
        scratch_(bytes(count)) {
    Lane* places = scratch_.template take<Lane>(line_);
    list_lanes(b, positions_together(b), places);
    places_ = places;
    numbers_.keep_in(scratch_.template take<uint16_t>(numbers_.count()));
  }
  A* table() { return scratch_.template take<A>(b_.images * line_); }

  Block block(int64_t position, int64_t end) const {
    const int64_t left = end - position, most = positions_together(b_);
    return {b_.images, b_.heads, b_.channels, position, left < most ? left : most, line_, places_};
  }
  const uint16_t* numbers_of_line(const Block& block, int64_t key) { return numbers_.of_line(block, key); }

  template <class Ahead>
  void request_next(const Block& block, int64_t end, Ahead& ahead) const {
    const int64_t next = block.position + positions_together(b_), last = next + positions_together(b_);
    ahead.start(next, last < end ? last : end);
  }

 private:
  int64_t bytes(int count) const {
    return Scratch::bytes<Lane>(line_) + Scratch::bytes<uint16_t>(numbers_.count()) +
           count * Scratch::bytes<A>(b_.images * line_);
  }

  const BatchAttention& b_;
  const int64_t line_;
  Numbers numbers_;
  Scratch scratch_;
  const Lane* places_;
};

template <class A>
void hide_masked_keys(const BatchAttention& b, const Block& block, A* table) {
  const int64_t lanes = b.heads * b.images;
  for (int64_t key = 0; key < b.images; ++key) {
    for (int64_t position = 0; position < block.positions; ++position) {
      if (!b.key_mask[key * b.positions + block.position + position]) continue;
      A* line = table + key * block.line + position * lanes;
      for (int64_t lane = 0; lane < lanes; ++lane) line[lane] = -static_cast<A>(__builtin_inf());
    }
  }
}

// Softmax over the keys, of numbers times scale. All-masked lanes (all minus infinity) become zero.
template <class A>
void softmax(const Block& b, A scale, A* table) {
  for (int64_t lane = 0; lane < b.line; lane += kLanes<A>) {
    Vec<A> most = load<A>(table + lane), sum = {};
    for (int64_t key = 1; key < b.images; ++key) {
      const Vec<A> number = load<A>(table + key * b.line + lane);
      most = select<A>(number > most, number, most);
    }
    most = select<A>(most == -static_cast<A>(__builtin_inf()), Vec<A>{}, most);
    for (int64_t key = 0; key < b.images; ++key) {
      A* place = table + key * b.line + lane;
      const Vec<A> part = exponential<A>((load<A>(place) - most) * scale);
      store<A>(place, part);
      sum += part;
    }
    const Vec<A> inverse = select<A>(sum == 0, Vec<A>{}, 1 / sum);
    for (int64_t key = 0; key < b.images; ++key) {
      A* place = table + key * b.line + lane;
      store<A>(place, load<A>(place) * inverse);
    }
  }
}

// Gradient of the dot products from the gradient of the probabilities.
template <class A>
void softmax_backward(const Block& b, A scale, const A* probabilities, A* gradient) {
  for (int64_t lane = 0; lane < b.line; lane += kLanes<A>) {
    Vec<A> mean = {};
    for (int64_t key = 0; key < b.images; ++key) {
      const int64_t at = key * b.line + lane;
      mean += load<A>(probabilities + at) * load<A>(gradient + at);
    }
    for (int64_t key = 0; key < b.images; ++key) {
      const int64_t at = key * b.line + lane;
      store<A>(gradient + at, load<A>(probabilities + at) * scale * (load<A>(gradient + at) - mean));
    }
  }
}

template <class A>
void drop(const Block& b, const DropoutRate& rate, const uint16_t* numbers, const A* line, A* result) {
  for (int64_t lane = 0; lane < b.lanes(); lane += kLanes<A>) {
    store<A>(result + lane, dropout<A>(load<A>(line + lane), numbers + lane, rate));
  }
}

template <class T, class A, class Ahead>
void probabilities(const BatchAttention& b, const Block& block, A scale, A* table, Ahead& ahead) {
  dot_products<T, A>(block, TypedRows<T>(b.query), TypedRows<T>(b.key), table, ahead);
  if (b.key_mask != nullptr) hide_masked_keys(b, block, table);
  softmax(block, scale, table);
}

template <class A>
A scale_of(const BatchAttention& b) {
  return static_cast<A>(1 / __builtin_sqrt(static_cast<double>(b.channels)));
}

template <class T, class A>
void attend(const BatchAttention& b, const Rows& output, int64_t begin, int64_t end) {
  Tables<A> tables(b, 1);
  A* table = tables.table();
  RowsAhead<T, 3> ahead(b, {b.query, b.key, b.value});
  const bool streams = streams_to<T, A>(b, output);
  for (int64_t position = begin; position < end; position += positions_together(b)) {
    const Block block = tables.block(position, end);
    tables.request_next(block, end, ahead);
    probabilities<T>(b, block, scale_of<A>(b), table, ahead);
    for (int64_t key = 0; key < b.images && b.rate.dropped > 0; ++key) {
      A* line = table + key * block.line;
      drop(block, b.rate, tables.numbers_of_line(block, key), line, line);
    }
    weighted_sums<T, A>(block, table, false, TypedRows<T>(b.value), TypedRows<T>(output), streams, ahead);
  }
  finish_streams();
}

template <class T, class A>
void attend_backward(const BatchAttention& b, const BatchAttentionGradients& g, int64_t begin, int64_t end) {
  const bool drops = b.rate.dropped > 0;
  Tables<A> tables(b, drops ? 3 : 2);
  A *shares = tables.table(), *gradient = tables.table(), *kept = drops ? tables.table() : shares;
  const TypedRows<T> output(g.output);
  RowsAhead<T, 4> ahead(b, {b.query, b.key, b.value, g.output});
  const bool streams = streams_to<T, A>(b, g.query) && streams_to<T, A>(b, g.key) && streams_to<T, A>(b, g.value);
  for (int64_t position = begin; position < end; position += positions_together(b)) {
    const Block block = tables.block(position, end);
    tables.request_next(block, end, ahead);
    probabilities<T>(b, block, scale_of<A>(b), shares, ahead);
    dot_products<T, A>(block, output, TypedRows<T>(b.value), gradient, ahead);
    for (int64_t key = 0; key < b.images && drops; ++key) {
      const uint16_t* numbers = tables.numbers_of_line(block, key);
      const int64_t line = key * block.line;
      drop(block, b.rate, numbers, shares + line, kept + line);
      drop(block, b.rate, numbers, gradient + line, gradient + line);
    }
    softmax_backward(block, scale_of<A>(b), shares, gradient);
    weighted_sums<T, A>(block, kept, true, output, TypedRows<T>(g.value), streams, ahead);
    weighted_sums<T, A>(block, gradient, false, TypedRows<T>(b.key), TypedRows<T>(g.query), streams, ahead);
    weighted_sums<T, A>(block, gradient, true, TypedRows<T>(b.query), TypedRows<T>(g.key), streams, ahead);
  }
  finish_streams();
}

void attend_any(Type type, const BatchAttention& b, const Rows& output, int64_t begin, int64_t end) {
  with_types(type, [&](auto number, auto sum) { attend<decltype(number), decltype(sum)>(b, output, begin, end); });
}

void attend_backward_any(Type type, const BatchAttention& b, const BatchAttentionGradients& g, int64_t begin,
                         int64_t end) {
  with_types(type, [&](auto number, auto sum) { attend_backward<decltype(number), decltype(sum)>(b, g, begin, end); });
}

}  // namespace
}  // namespace detr_bf::cpu
