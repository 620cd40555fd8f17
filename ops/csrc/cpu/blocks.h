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

}  // namespace
}  // namespace detr_bf::cpu
