// Random numbers of single elements and of calls, see random.h.
#pragma once

#include "../random.h"
#include "device.cuh"

namespace detr_bf::cuda {

// Dropout arguments of the kernels; the seed is read from device memory, without a synchronisation.
struct Dropping {
  const int64_t* seed;
  uint32_t dropped;  // 0: nothing is dropped, and seed may be null
  double scale;      // of the kept elements

  Dropping(const DropoutRate& rate, const void* seed)
      : seed(static_cast<const int64_t*>(seed)), dropped(rate.dropped), scale(rate.scale) {}
};

// The eight numbers of a call, two in a word.
struct Numbers {
  uint32_t words[kNumbersOfCall / 2];

  __device__ Numbers(int64_t seed, int64_t call) {
    uint64_t wide[kNumbersOfCall / 2];
    const auto multiply = [](uint64_t word, uint32_t factor) { return (word & 0xffffffffu) * uint64_t{factor}; };
    philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(call), multiply, wide);
#pragma unroll
    for (int word = 0; word < kNumbersOfCall / 2; ++word) words[word] = static_cast<uint32_t>(wide[word]);
  }

  __device__ uint32_t operator[](int number) const {
    // Selected by comparison: a run-time index would move the words to local memory.
    const uint32_t lower = number & 2 ? words[1] : words[0], upper = number & 2 ? words[3] : words[2];
    return (number & 4 ? upper : lower) >> (number & 1) * 16 & 0xffffu;
  }
};

__device__ inline uint32_t number_of(int64_t seed, int64_t element) {
  const int64_t call = element / kElementsOfBlock * kCallsOfBlock + element % kCallsOfBlock;
  return Numbers(seed, call)[static_cast<int>(element % kElementsOfBlock / kCallsOfBlock)];
}

}  // namespace detr_bf::cuda
