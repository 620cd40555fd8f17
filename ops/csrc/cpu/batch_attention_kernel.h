// Batch attention for the instruction set this file is compiled for.
#pragma once

#include "batch_attention_products.h"
#include "exponential.h"
#include "random_vectors.h"
#include "types.h"

namespace detr_bf::cpu {
namespace {

// The tables of one call and its blocks.
template <class A>
class Tables {
 public:
  Tables(const BatchAttention& b, int count)
      : b_(b), line_(round_up(positions_together(b) * b.heads * b.images, kLanes<A>)), scratch_(bytes(count)) {
    Lane* places = scratch_.template take<Lane>(line_);
    list_lanes(b, positions_together(b), places);
    places_ = places;
    numbers_ = scratch_.template take<uint16_t>(numbers());
  }
  A* table() { return scratch_.template take<A>(b_.images * line_); }

  Block block(int64_t position, int64_t end) const {
    const int64_t left = end - position, most = positions_together(b_);
    return {b_.images, b_.heads, b_.channels, position, left < most ? left : most, line_, places_};
  }
  // Random numbers of a line. The elements of a call are numbered by key, position, head and query.
  const uint16_t* numbers_of_line(const Block& block, int64_t key) const {
    const int64_t first = (key * b_.positions + block.position) * b_.heads * b_.images;
    const int64_t start = first / kElementsOfBlock, last = (first + block.lanes() - 1) / kElementsOfBlock;
    random_numbers(b_.seed, start, last - start + 1, numbers_);
    return numbers_ + (first - start * kElementsOfBlock);
  }

 private:
  // Whole blocks around a line, plus padding to read a whole vector at its end.
  int64_t numbers() const { return line_ + 3 * kElementsOfBlock; }
  int64_t bytes(int count) const {
    return Scratch::bytes<Lane>(line_) + Scratch::bytes<uint16_t>(numbers()) +
           count * Scratch::bytes<A>(b_.images * line_);
  }

  const BatchAttention& b_;
  const int64_t line_;
  Scratch scratch_;
  const Lane* places_;
  uint16_t* numbers_;
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

template <class T, class A>
void probabilities(const BatchAttention& b, const Block& block, A scale, A* table) {
  dot_products<T, A>(block, TypedRows<T>(b.query), TypedRows<T>(b.key), table);
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
  for (int64_t position = begin; position < end; position += positions_together(b)) {
    const Block block = tables.block(position, end);
    probabilities<T>(b, block, scale_of<A>(b), table);
    for (int64_t key = 0; key < b.images && b.rate.dropped > 0; ++key) {
      A* line = table + key * block.line;
      drop(block, b.rate, tables.numbers_of_line(block, key), line, line);
    }
    weighted_sums<T, A>(block, table, false, TypedRows<T>(b.value), TypedRows<T>(output));
  }
}

template <class T, class A>
void attend_backward(const BatchAttention& b, const BatchAttentionGradients& g, int64_t begin, int64_t end) {
  const bool drops = b.rate.dropped > 0;
  Tables<A> tables(b, drops ? 3 : 2);
  A *shares = tables.table(), *gradient = tables.table(), *kept = drops ? tables.table() : shares;
  const TypedRows<T> output(g.output);
  for (int64_t position = begin; position < end; position += positions_together(b)) {
    const Block block = tables.block(position, end);
    probabilities<T>(b, block, scale_of<A>(b), shares);
    dot_products<T, A>(block, output, TypedRows<T>(b.value), gradient);
    for (int64_t key = 0; key < b.images && drops; ++key) {
      const uint16_t* numbers = tables.numbers_of_line(block, key);
      const int64_t line = key * block.line;
      drop(block, b.rate, numbers, shares + line, kept + line);
      drop(block, b.rate, numbers, gradient + line, gradient + line);
    }
    softmax_backward(block, scale_of<A>(b), shares, gradient);
    weighted_sums<T, A>(block, kept, true, output, TypedRows<T>(g.value));
    weighted_sums<T, A>(block, gradient, false, TypedRows<T>(b.key), TypedRows<T>(g.query));
    weighted_sums<T, A>(block, gradient, true, TypedRows<T>(b.query), TypedRows<T>(g.key));
  }
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
