// Dropout for the instruction set this file is compiled for.
#pragma once

#include "dropout.h"
#include "random_vectors.h"
#include "types.h"

namespace detr_bf::cpu {
namespace {

// True if results of this size are written past the caches: see stream().
template <class A, class T>
inline bool streams_elements(const Dropout& d, const T* result) {
  const int64_t bytes = d.elements * static_cast<int64_t>(sizeof(T));
  return kStreams<T, A> && bytes >= kBytesToStream && reinterpret_cast<uintptr_t>(result) % kVectorBytes == 0;
}

// Writes the result of step(read_vector, place) for each vector of a block: place is its offset in the block, and
// read_vector loads these elements of any tensor.
template <class A, class T, class Step>
inline void over_block(const Dropout& d, int64_t block, T* result, Step&& step) {
  const int64_t first = block * kElementsOfBlock, left = d.elements - first;
  const int count = static_cast<int>(left < kElementsOfBlock ? left : kElementsOfBlock);
  const bool streams = streams_elements<A>(d, result);
  int place = 0;
  for (; place + kLanes<A> <= count; place += kLanes<A>) {
    const auto whole = [&](const T* from) { return load<A>(from + first + place); };
    const Vec<A> vector = step(whole, place);
    if (kStreams<T, A> && streams) {
      stream<A>(result + first + place, vector);
    } else {
      store<A>(result + first + place, vector);
    }
  }
  if (place < count) {
    const auto part = [&](const T* from) { return load_first<A>(from + first + place, count - place); };
    store_first<A>(result + first + place, step(part, place), count - place);
  }
}

// Calls step(block, numbers) for each block with its random numbers. They are computed some blocks ahead: reading data
// in larger pieces than it was just written in stalls (store forwarding).
template <class Step>
inline void with_numbers(const Dropout& d, int64_t begin, int64_t end, Step&& step) {
  constexpr int64_t ahead = 8;
  uint16_t numbers[ahead * kElementsOfBlock];
  for (; begin < end; begin += ahead) {
    const int64_t blocks = end - begin < ahead ? end - begin : ahead;
    random_numbers(d.seed, begin, blocks, numbers);
    for (int64_t block = 0; block < blocks; ++block) step(begin + block, numbers + block * kElementsOfBlock);
  }
}

template <class T, class A>
void dropout_add(const Dropout& d, const T* input, const T* residual, T* output, int64_t begin, int64_t end) {
  with_numbers(d, begin, end, [&](int64_t block, const uint16_t* numbers) {
    over_block<A>(d, block, output, [&](auto read_vector, int place) {
      const Vec<A> kept = dropout<A>(read_vector(input), numbers + place, d.rate);
      return residual == nullptr ? kept : kept + read_vector(residual);
    });
  });
  finish_streams();
}

template <class T, class A>
void relu_dropout(const Dropout& d, const T* input, T* output, int64_t begin, int64_t end) {
  with_numbers(d, begin, end, [&](int64_t block, const uint16_t* numbers) {
    over_block<A>(d, block, output, [&](auto read_vector, int place) {
      const Vec<A> vector = read_vector(input);
      return dropout<A>(select<A>(vector < 0, Vec<A>{}, vector), numbers + place, d.rate);  // NaN stays NaN
    });
  });
  finish_streams();
}

template <class T, class A>
void relu_dropout_backward(const Dropout& d, const T* gradient, const T* output, T* result, int64_t begin,
                           int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    over_block<A>(d, block, result, [&](auto read_vector, int) {
      const Vec<A> scaled = read_vector(gradient) * static_cast<A>(d.rate.scale);
      return select<A>(read_vector(output) > 0, scaled, Vec<A>{});
    });
  }
  finish_streams();
}

void dropout_add_any(Type type, const Dropout& d, const void* input, const void* residual, void* output, int64_t begin,
                     int64_t end) {
  with_types(type, [&](auto number, auto sum) {
    using T = decltype(number);
    dropout_add<T, decltype(sum)>(d, static_cast<const T*>(input), static_cast<const T*>(residual),
                                  static_cast<T*>(output), begin, end);
  });
}

void relu_dropout_any(Type type, const Dropout& d, const void* input, void* output, int64_t begin, int64_t end) {
  with_types(type, [&](auto number, auto sum) {
    using T = decltype(number);
    relu_dropout<T, decltype(sum)>(d, static_cast<const T*>(input), static_cast<T*>(output), begin, end);
  });
}

void relu_dropout_backward_any(Type type, const Dropout& d, const void* gradient, const void* output, void* result,
                               int64_t begin, int64_t end) {
  with_types(type, [&](auto number, auto sum) {
    using T = decltype(number);
    relu_dropout_backward<T, decltype(sum)>(d, static_cast<const T*>(gradient), static_cast<const T*>(output),
                                            static_cast<T*>(result), begin, end);
  });
}

}  // namespace
}  // namespace detr_bf::cpu
