// The rows of one image and head: their range, when to pack them, and how to copy one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ms_deform_attn.h"
#include "simd.h"

namespace detr_bf::cpu {
namespace {

// Cells from the first given level to the end of the last.
inline int64_t span(const Sampling& s, int64_t level_begin, int64_t level_end) {
  const int64_t last = level_end - 1;
  return s.level_start_index[last] + s.spatial_shapes[2 * last] * s.spatial_shapes[2 * last + 1] -
         s.level_start_index[level_begin];
}

// In the memory of the caller the rows of a head are H x D apart and share a few sets of the cache; packed rows use all
// sets. The copy pays off if a row is read often enough.
inline bool pays_to_pack(const Sampling& s, int64_t queries) {
  constexpr int64_t kVisitsOfACell = 4;
  return queries * s.levels * s.points >= kVisitsOfACell * span(s, 0, s.levels);
}

// Requests the first 128 bytes ahead of their use, into the second-level cache: at the distance of rows they would
// replace each other in the first. Addresses beyond the end of a tensor do no harm.
inline void fetch(const void* from) {
  __builtin_prefetch(from, 0, 2);
  __builtin_prefetch(static_cast<const char*>(from) + 64, 0, 2);
}

template <class A, class From, class To>
inline void copy_row(const From* from, To* to, int64_t channels) {
  if constexpr (std::is_same_v<From, To> && sizeof(To) < sizeof(A)) {
    std::memcpy(to, from, static_cast<size_t>(channels) * sizeof(To));  // no conversion to A and back
    return;
  }
  int64_t channel = 0;
  for (; channel + kLanes<A> <= channels; channel += kLanes<A>) store<A>(to + channel, load<A>(from + channel));
  if (const int64_t left = channels - channel) store_first<A>(to + channel, load_first<A>(from + channel, left), left);
}

// Copies rows at any distance. Those of a head are far apart, so the processor does not foresee the next one.
template <class A, class From, class To>
inline void copy_rows(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t count,
                      int64_t channels) {
  constexpr int64_t kAhead = 16;
  for (int64_t row = 0; row < count; ++row) {
    fetch(from + (row + kAhead) * from_stride);
    fetch(to + (row + kAhead) * to_stride);
    copy_row<A>(from + row * from_stride, to + row * to_stride, channels);
  }
}

}  // namespace
}  // namespace detr_bf::cpu
