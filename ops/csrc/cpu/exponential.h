// Exponential function of a vector of non-positive numbers.
#pragma once

#include <cstdint>

#include "simd.h"

namespace detr_bf::cpu {
namespace {

template <class A>
struct Exponential;
template <>
struct Exponential<float> {
  static constexpr float lowest = -87.33f;  // below it the result is subnormal
  static constexpr float ln2_upper = 0x1.62ep-1f, ln2_lower = 0x1.0bfbe8p-15f;
  static constexpr int mantissa_bits = 23, bias = 127, terms = 7;
};
template <>
struct Exponential<double> {
  static constexpr double lowest = -708.39;
  static constexpr double ln2_upper = 0x1.62e42fefap-1, ln2_lower = 0x1.cf79abc9e3b3ap-40;
  static constexpr int mantissa_bits = 52, bias = 1023, terms = 13;
};

template <class A>
constexpr A inverse_factorial(int number) {
  A factorial = 1;
  for (int factor = 2; factor <= number; ++factor) factorial *= static_cast<A>(factor);
  return 1 / factorial;
}

// exp(x) = 2^n exp(x - n ln 2); the second factor is a Taylor series for |x - n ln 2| <= ln(2) / 2, whose first omitted
// term is below the precision. Error: at most 2 units in the last place. Subnormal results become zero; NaN stays NaN.
// Requires x <= 0.
template <class A>
inline Vec<A> exponential(Vec<A> x) {
  using E = Exponential<A>;
  constexpr A log2e = static_cast<A>(0x1.71547652b82fep+0);
  // Adding it to a small number shifts out the fraction: the rounded number is in the last bits.
  constexpr A round = static_cast<A>(3) * static_cast<A>(int64_t{1} << (E::mantissa_bits - 1));
  const Vec<Int<A>> is_small = x < E::lowest;
  x = select<A>(is_small, broadcast<A>(E::lowest), x);
  const Vec<A> rounded = x * log2e + round;
  const Vec<A> n = rounded - round;
  const Vec<A> left = (x - n * E::ln2_upper) - n * E::ln2_lower;
  Vec<A> series = broadcast<A>(inverse_factorial<A>(E::terms));
#pragma GCC unroll 16
  for (int term = E::terms - 1; term >= 0; --term) series = series * left + inverse_factorial<A>(term);
  const auto power = bits_as<Vec<Int<A>>>(rounded) - bits_as<Vec<Int<A>>>(broadcast<A>(round));
  return select<A>(is_small, Vec<A>{}, series * bits_as<Vec<A>>((power + Int<A>{E::bias}) << E::mantissa_bits));
}

}  // namespace
}  // namespace detr_bf::cpu
