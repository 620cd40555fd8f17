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
inline bool pays_to_pack(int64_t samples, int64_t cells) {
  constexpr int64_t kVisitsOfACell = 4;
  return samples >= kVisitsOfACell * cells;
}

template <class A, class From, class To>
inline void copy_row(const From* from, To* to, int64_t channels) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(channels) * sizeof(To));
    return;
  }
  int64_t channel = 0;
  for (; channel + kLanes<A> <= channels; channel += kLanes<A>) store<A>(to + channel, load<A>(from + channel));
  if (const int64_t left = channels - channel) store_first<A>(to + channel, load_first<A>(from + channel, left), left);
}

}  // namespace
}  // namespace detr_bf::cpu
