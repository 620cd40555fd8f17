// Random numbers of dropout, the same on every device: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"), a function of the seed and a call counter only.
//
// An element takes 16 bits. 16 calls serve a block of 128 elements; call c serves the elements c, c + 16, ..., c + 112.
// A vector of calls therefore gives neighbouring elements, for vectors of any width up to 16.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DETR_BF_HOST_DEVICE __host__ __device__
#else
#define DETR_BF_HOST_DEVICE
#endif

namespace detr_bf {

constexpr int kCallsOfBlock = 16;
constexpr int kNumbersOfCall = 8;  // four words of 32 bits, the lower half of each before its upper half
constexpr int kElementsOfBlock = kCallsOfBlock * kNumbersOfCall;

// The probability is rounded to a multiple of 2^-16; the scale follows from the rounded one, so the mean is kept.
struct DropoutRate {
  uint32_t dropped;  // threshold out of 2^16: an element is dropped if its random number is below
  double scale;      // of the kept elements

  explicit DropoutRate(double probability)
      : dropped(static_cast<uint32_t>(probability * 65536 + 0.5)),
        scale(dropped < 65536 ? 65536.0 / (65536 - dropped) : 0) {}
};

namespace {  // compiled for several instruction sets: see cpu/simd.h

// Word: an unsigned 64-bit integer or a vector of them. Only the lower half of each is used, here and in the result;
// multiply_lower_halves(Word, uint32_t) gives 64-bit products.
template <class Word, class Multiply>
DETR_BF_HOST_DEVICE inline void philox(uint64_t seed, Word call, Multiply multiply_lower_halves, Word (&words)[4]) {
  Word a = call, b = call >> 32, c{}, d{};
  auto key = static_cast<uint32_t>(seed), other_key = static_cast<uint32_t>(seed >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const Word first = multiply_lower_halves(a, 0xD2511F53u), second = multiply_lower_halves(c, 0xCD9E8D57u);
    a = (second >> 32) ^ b ^ static_cast<uint64_t>(key);
    c = (first >> 32) ^ d ^ static_cast<uint64_t>(other_key);
    b = second;
    d = first;
    key += 0x9E3779B9u;
    other_key += 0xBB67AE85u;
  }
  words[0] = a;
  words[1] = b;
  words[2] = c;
  words[3] = d;
}

}  // namespace
}  // namespace detr_bf
