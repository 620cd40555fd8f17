// Vectorised random numbers and dropout.
#pragma once

#include <cstdint>

#include "../random.h"
#include "simd.h"

#ifdef DETR_BF_X86
#include <immintrin.h>
#endif

namespace detr_bf::cpu {
namespace {

using Words = Vec<uint64_t>;

// One instruction; compilers would turn an ordinary multiplication into a full 64-bit product.
inline Words multiply_lower_halves(Words words, uint32_t factor) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  constexpr __mmask8 all = 0xff;  // the mask avoids a warning of GCC 12 about its own header
  return reinterpret_cast<Words>(
      _mm512_maskz_mul_epu32(all, reinterpret_cast<__m512i>(words), _mm512_set1_epi64(factor)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_mul_epu32(reinterpret_cast<__m256i>(words), _mm256_set1_epi64x(factor)));
#elif defined(__SSE2__)
  return reinterpret_cast<Words>(_mm_mul_epu32(reinterpret_cast<__m128i>(words), _mm_set1_epi64x(factor)));
#else
  return (words & 0xffffffffu) * static_cast<uint64_t>(factor);
#endif
}

// The numbers of all elements of the blocks [block, block + blocks).
inline void random_numbers(uint64_t seed, int64_t block, int64_t blocks, uint16_t* numbers) {
  constexpr int lanes = kLanes<uint64_t>;
  Words calls = {};
  for (int lane = 0; lane < lanes; ++lane) calls[lane] = static_cast<uint64_t>(block * kCallsOfBlock + lane);
  for (; blocks > 0; --blocks, numbers += kElementsOfBlock) {
    for (int call = 0; call < kCallsOfBlock; call += lanes, calls += static_cast<uint64_t>(lanes)) {
      Words words[4];
      philox(seed, calls, [](Words factor, uint32_t other) { return multiply_lower_halves(factor, other); }, words);
      for (int number = 0; number < kNumbersOfCall; ++number) {
        const auto narrow = __builtin_convertvector(words[number / 2] >> (number % 2 * 16),
                                                    typename VectorOf<uint16_t, lanes>::type);
        std::memcpy(numbers + number * kCallsOfBlock + call, &narrow, sizeof(narrow));
      }
    }
  }
}

// Dropout of a vector: kept elements are scaled, the others zero.
template <class A>
inline Vec<A> dropout(Vec<A> vector, const uint16_t* numbers, const DropoutRate& rate) {
  const auto narrow = read<typename VectorOf<uint16_t, kLanes<A>>::type>(numbers);
  const Vec<Int<A>> wide = __builtin_convertvector(narrow, Vec<Int<A>>);
  const Vec<Int<A>> kept = wide >= static_cast<Int<A>>(rate.dropped);
  return select<A>(kept, vector * static_cast<A>(rate.scale), Vec<A>{});
}

}  // namespace
}  // namespace detr_bf::cpu
