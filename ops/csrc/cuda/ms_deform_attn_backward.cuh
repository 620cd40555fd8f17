// Backward: gradients of locations and weights are sums over the group; the gradient of value is added to memory
// atomically, in no fixed order, or left out if ms_deform_attn_gather.cuh computes it deterministically.
#pragma once

#include "ms_deform_attn.cuh"

namespace detr_bf::cuda {

template <class T>
constexpr int kBackwardBlocks = std::is_same_v<T, double> ? 1 : 2;  // per multiprocessor: 128 registers a thread
constexpr int kBackwardTogether = 2;  // samples whose corners are loaded at once
constexpr int kBatch = 4;             // samples whose dot products are summed over the group at once
static_assert(kBatch == kMinLanes && kBatch % kBackwardTogether == 0);

template <class T>
struct Gradients {
  const T* output;         // (B, Q, H, D)
  void* value;             // (B, S, H, D), zeros on entry; unused if the gradient of value is left out
  Sum<T>* locations;       // (B, Q, H, L, P, 2)
  T* weights;              // (B, Q, H, L, P)
};

// Channels of one lane at a time, of the row and of the cells its samples read.
template <class T, int N>
struct Part {
  int channel;
  bool active;
  const T* rows;
  Sum<T> gradient[N];

  __device__ Part(const Sampling& s, const Row& row, const Gradients<T>& gradients, int channel)
      : channel(channel), active(row.exists && channel < s.channels) {
    const char* value = static_cast<const char*>(s.value) + row.image * s.image_stride + row.head * s.head_stride;
    rows = reinterpret_cast<const T*>(value) + channel;
    if (!active) return;
    const Packed<T, N> packed = load<N>(row.of(gradients.output, s.channels) + channel);
#pragma unroll
    for (int n = 0; n < N; ++n) gradient[n] = packed[n];
  }
};

template <class T, int N>
using BackwardVisit = Visit<T, N, kBackwardTogether>;

// S: type of the sums in memory, T or Sum<T>.
template <class S, class T, int N>
__device__ inline void add_shares(const BackwardVisit<T, N>& visit, const Part<T, N>& part, S* sums, uint32_t stride) {
#pragma unroll
  for (int k = 0; k < kBackwardTogether; ++k) {
    const Corners<Sum<T>>& corners = visit.corners[k];
    S* found[kCorners];
    find(corners, sums + part.channel, stride, found);
#pragma unroll
    for (int corner = 0; corner < kCorners; ++corner) {
      if (!corners.inside_again(corner)) continue;
      Sum<T> share[N];
#pragma unroll
      for (int n = 0; n < N; ++n) share[n] = corners.weights[corner] * part.gradient[n];
      if constexpr (std::is_same_v<S, Sum<T>>) {
        add(found[corner], share);
      } else {
        add_narrow(found[corner], share);
      }
    }
  }
}

// Partial dot products of this lane: gradient of the output times every corner.
template <class T, int N>
__device__ inline void multiply(const BackwardVisit<T, N>& visit, const Part<T, N>& part, Sum<T> (*dots)[kCorners]) {
#pragma unroll
  for (int k = 0; k < kBackwardTogether; ++k) {
#pragma unroll
    for (int corner = 0; corner < kCorners; ++corner) {
      Sum<T> dot = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) dot += part.gradient[n] * visit.channels[k][corner][n];
      dots[k][corner] = visit.corners[k].inside_again(corner) ? dot : 0;
    }
  }
}

// Sums over the group. A lane ends with the sums of sample lane % kBatch in dots[0]. In the first two steps a lane
// exchanges half of its values for the half it keeps: 12 exchanges instead of 32 for separate sums.
template <class A>
__device__ inline void sum_over_group(A (&dots)[kBatch][kCorners], int lane, int lanes) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int corner = 0; corner < kCorners; ++corner) {
    A kept[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const A first = dots[2 * pair][corner], second = dots[2 * pair + 1][corner];
      kept[pair] = (odd ? second : first) + shuffle_xor(odd ? first : second, 1);
    }
    dots[0][corner] = (high ? kept[1] : kept[0]) + shuffle_xor(high ? kept[0] : kept[1], 2);
  }
  for (int mask = kBatch; mask < lanes; mask *= 2) {
#pragma unroll
    for (int corner = 0; corner < kCorners; ++corner) dots[0][corner] += shuffle_xor(dots[0][corner], mask);
  }
}

// Gradients of the sample prepared by this lane (index in the row) from the dot products of its corners.
template <class T>
__device__ inline void write_gradients(const Sampling& s, const Row& row, const Sample<T>& sample,
                                       const Sum<T> (&dots)[kCorners], const Gradients<T>& gradients, int number) {
  using A = Sum<T>;
  const Level& level = s.level[sample.level];
  const Bilinear<A> b(sample, level);
  A weight = 0, along_x = 0, along_y = 0;
#pragma unroll
  for (int corner = 0; corner < kCorners; ++corner) {
    const int line = corner / 2, column = corner % 2;
    weight += b.y.weight(line) * b.x.weight(column) * dots[corner];
    along_x += b.y.weight(line) * b.x.slope_of(column) * dots[corner];
    along_y += b.y.slope_of(line) * b.x.weight(column) * dots[corner];
  }
  A* location = row.of(gradients.locations, 2 * s.samples()) + 2 * number;
  write(row.of(gradients.weights, s.samples()) + number, narrow(weight, T{}));
  write(location, sample.weight() * along_x * static_cast<A>(level.width));
  write(location + 1, sample.weight() * along_y * static_cast<A>(level.height));
}

template <class T, int N, bool kValue, class S, class L>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T>)
    backward_kernel(const __grid_constant__ Sampling s, const __grid_constant__ L layout,
                    const __grid_constant__ Gradients<T> gradients) {
  using A = Sum<T>;
  Row row(s, layout);
  const int lanes = layout.lanes();
  const uint32_t sums_stride = s.heads * s.channels * sizeof(S);
  S* const sums = kValue ? static_cast<S*>(gradients.value) + (row.image * s.cells * s.heads + row.head) * s.channels : nullptr;
  Samples<T> samples(s, row);
  Sample<T> next = samples.take(s, lanes);
  for (int first = 0; first < s.samples(); first += lanes) {
    if constexpr (std::is_same_v<L, Patches>) {  // keep one number, not what follows from it: registers are few
      pin(row.offset);
      row.exists = row.offset >= 0;
    }
    const Sample<T> sample = next;
    const Corners<A> ready(sample, s.level[sample.level]);
    next = samples.take(s, lanes);  // under way while these are worked on
    const int count = min(lanes, s.samples() - first);
    A mine[kCorners] = {};
    for (int chunk = 0; chunk < s.channels; chunk += N * lanes) {
      const Part<T, N> part(s, row, gradients, chunk + N * row.lane);
      for (int at = 0; at < count; at += kBatch) {
        A dots[kBatch][kCorners];
#pragma unroll
        for (int k = 0; k < kBatch; k += kBackwardTogether) {
          const BackwardVisit<T, N> visit(ready, at + k, lanes, part.active, part.rows, s.cell_stride);
          if constexpr (kValue) add_shares(visit, part, sums, sums_stride);
          multiply(visit, part, dots + k);
        }
        sum_over_group(dots, row.lane, lanes);
        if (row.lane / kBatch != at / kBatch) continue;
#pragma unroll
        for (int corner = 0; corner < kCorners; ++corner) mine[corner] += dots[0][corner];
      }
    }
    const int own = first + row.lane;
    if (row.exists && own < s.samples()) write_gradients(s, row, sample, mine, gradients, own);
  }
}

}  // namespace detr_bf::cuda
