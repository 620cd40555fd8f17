// Loops with block sizes known at compile time.
#pragma once

#include <cstdint>
#include <type_traits>

namespace detr_bf::cpu {
namespace {

// Calls step(Most, at) for all whole blocks of Most between begin and end, then for halves of it, down to one.
template <int Most, class Step>
inline void in_blocks(int64_t begin, int64_t end, Step&& step) {
  for (; begin + Most <= end; begin += Most) step(std::integral_constant<int, Most>{}, begin);
  if constexpr (Most > 1) in_blocks<Most / 2>(begin, end, step);
}

// Calls step(Count, at) for blocks of four, and once for the remaining one to three.
template <class Step>
inline void in_fours(int64_t count, Step&& step) {
  int64_t at = 0;
  for (; at + 4 <= count; at += 4) step(std::integral_constant<int, 4>{}, at);
  switch (count - at) {
    case 3: return step(std::integral_constant<int, 3>{}, at);
    case 2: return step(std::integral_constant<int, 2>{}, at);
    case 1: return step(std::integral_constant<int, 1>{}, at);
    default: return;
  }
}

}  // namespace
}  // namespace detr_bf::cpu
